"""The parts of a worker that all of its answers use."""

from dataclasses import dataclass

from handlers.chat.pictures.fetch_pool import FetchPool
from handlers.chat.pictures.receiver import ImageReceiver
from handlers.chat.pictures.store import ImageStore
from handlers.chat.sessions.stored_kv import StoredKv
from handlers.chat.turns.admission import Admission
from handlers.chat.turns.context_limits import ContextLimits
from handlers.counters import Counters
from handlers.engine.contract import ChatEngine
from handlers.fair_threads import FairThreads
from handlers.models.prompt_format import PromptFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParts:
    """The parts of a worker that all of its answers use."""

    limits: ContextLimits
    model: PromptFormat
    engine: ChatEngine
    images: ImageStore
    admission: Admission
    receiver: ImageReceiver
    preparing: FairThreads  # for answers that fetch no images, and for the end of every answer
    loading: FairThreads  # for answers that decode images or rebuild a session
    fetching: FetchPool  # for answers that fetch images
    stored_kv: StoredKv | None  # None unless the journal has KV caches
    counters: Counters
