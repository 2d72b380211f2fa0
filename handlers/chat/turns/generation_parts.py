"""The parts of a worker that all its answers share."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from handlers.chat.adapters import Adapters
from handlers.chat.images.fetch_pool import FetchPool
from handlers.chat.images.receiver import ImageReceiver
from handlers.chat.images.store import ImageStore
from handlers.chat.sessions.stored_kv import StoredKv
from handlers.chat.turns.admission import Admission
from handlers.chat.turns.context_limits import ContextLimits
from handlers.engine.contract import ChatEngine
from handlers.models.prompt_format import PromptFormat
from handlers.requests.reply import PendingReply
from handlers.worker.counters import Counters
from handlers.worker.fair_threads import FairThreads

Submit = Callable[[Callable[[], None]], Future[None]]
"""Runs an action on another thread. Raises RuntimeError once that is shut down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParts:
    """The parts of a worker that all of its answers use."""

    limits: ContextLimits
    model: PromptFormat
    engine: ChatEngine
    images: ImageStore
    adapters: Adapters | None  # None if the model has none
    admission: Admission
    receiver: ImageReceiver
    preparing: FairThreads  # for answers without images to download, and for the end of every answer
    loading: FairThreads  # for answers that decode images or rebuild a session
    fetching: FetchPool  # for answers that download images
    stored_kv: StoredKv | None  # None unless the journal has KV caches
    counters: Counters

    def threads_for(self, reply: PendingReply, *, is_slow: bool = False, line: str | None = None) -> Submit:
        """Return where an answer's next part runs.

        is_slow: use the threads for slow work. line: the queue for its downloads (see FetchPool).
        """
        if line is not None:
            return partial(self.fetching.submit, line, reply)
        return partial((self.loading if is_slow else self.preparing).submit, reply.line)
