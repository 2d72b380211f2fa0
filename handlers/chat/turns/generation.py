"""One answer, from what was asked to the last byte of it.

    composing -> generating -> over

A worker thread composes the prompt, the engine's thread drives the answer token by token, a worker thread ends it.
Whatever happens, `_release` runs once. What differs between a session's turn and a request without a session is in
the methods that say so: where the prompt comes from, and what becomes of the answer.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

from handlers.chat.forms import AnswerForm, Summary, Token
from handlers.chat.messages import ImageReference
from handlers.chat.parameters import Parameters
from handlers.chat.pictures.store import Image, ImageStore, Tier
from handlers.chat.turns.admission import Room
from handlers.chat.turns.answer import Answer
from handlers.chat.turns.context_limits import ContextLimits
from handlers.counters import Counters
from handlers.engine.engine import Engine
from handlers.engine.kv_cache import SequenceCache
from handlers.engine.sequence import FinishReason, ImageSpan, TokenEvent
from handlers.engine.sequence import Sequence as TokenSequence
from handlers.errors import (
    ClientGone,
    HandlerError,
    InternalError,
    OutOfMemory,
    TurnConflict,
    TurnTimedOut,
)
from handlers.models.text import TextModel
from handlers.reply import Reply
from handlers.settings import EngineSettings, SessionSettings
from torchmoor.wire import headers as wire

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """A picture that has just come in, with the bytes that it came as."""

    image: Image
    encoded: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParts:
    """What every answer of a worker works with.

    load_images: references to pictures, each held once for this sharing scope; raises BadImage's family, OutOfMemory,
    and why the reply was cancelled, should it be.
    """

    engine_settings: EngineSettings
    session_settings: SessionSettings
    model: TextModel
    engine: Engine
    images: ImageStore
    room: Room
    preparing: Executor  # for answers that need no images fetched, and for the ends of all
    loading: Executor  # for answers that bring images, which may be slow to fetch, or must take in a whole session
    counters: Counters
    load_images: Callable[[str, Sequence[ImageReference], Reply], list[LoadedImage]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is to read. ids: with `image_token_id` in each position of an image; images: in order."""

    ids: list[int]
    images: Sequence[Image]


class Generation(ABC):
    """Created for each answer; everything goes through the reply."""

    def __init__(
        self,
        parts: GenerationParts,
        cache: SequenceCache,
        parameters: Parameters,
        form: AnswerForm,
        reply: Reply,
        *,
        is_streaming: bool,
    ) -> None:
        self._parts = parts
        self._cache = cache
        self._parameters = parameters
        self._reply = reply
        self._answer = Answer(reply, form, parts.model, parameters.stop, is_streaming=is_streaming)
        self._limits = ContextLimits(parts.engine_settings, parts.session_settings, parts.model, cache.pool)
        self._lock = threading.Lock()
        self._sequence: TokenSequence | None = None
        self._preparation: Future[None] | None = None
        self._stopped: HandlerError | None = None
        self._is_over = False
        self._received = time.monotonic()
        self._begun = self._first_token_at = self._received
        self._deadline = reply.shorten_deadline(self._received + parts.engine_settings.turn_timeout_s)
        self._pinned: list[Image] = []
        self._prompt: Prompt | None = None
        self._is_using_room = False
        self._kept = 0

    # What a session's turn and a request without one do differently

    @abstractmethod
    def _compose(self) -> Prompt:
        """What the model is to read. Worker thread; may take its time. Raises HandlerError."""

    @abstractmethod
    def _fetch(self, image: Image) -> bytes:
        """The encoded bytes of one of the prompt's images that this worker does not keep. Raises HandlerError."""

    @abstractmethod
    def _commit(self, text: str) -> None:
        """The answer is complete, and the client has not heard of its end. Worker thread. Raises HandlerError."""

    @abstractmethod
    def _release(self) -> None:
        """The answer is over, for better or worse. Once, on any thread; must not wait."""

    # From the question to the engine

    def _schedule(self, *, is_slow: bool) -> None:
        """Begin. A slow image server holds up only other answers that are slow to begin."""
        with self._lock:
            if self._is_over:
                return
            self._is_using_room = True
            self._parts.room.enter()
        self._preparation = self._run_on(self._parts.loading if is_slow else self._parts.preparing, self._prepare)

    def _run_on(self, executor: Executor, action: Callable[[], None]) -> Future[None] | None:
        try:
            return executor.submit(action)
        except RuntimeError:  # it has been shut down
            self._fail(InternalError("the worker is stopping"))
            return None

    def stop(self, error: HandlerError) -> None:
        """End the answer early, within one step of the engine. Any thread.

        One that is being prepared ends at the next `_raise_if_stopped`; a fetch of its images is cut by its reply.
        """
        with self._lock:
            if self._stopped is not None:
                return
            self._stopped = error
            sequence, preparation = self._sequence, self._preparation
        if sequence is not None:
            self._parts.engine.cancel(sequence, error)
        elif self._parts.room.try_remove(self._try_again) or (
            preparation is not None and preparation.cancel()  # it had not begun
        ):
            self._fail(error)

    def _raise_if_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped
        if time.monotonic() >= self._deadline:
            raise TurnTimedOut("the answer was not begun before the turn's deadline")

    def _prepare(self) -> None:
        """Everything that must be known before the first token."""
        try:
            self._raise_if_stopped()
            if self._prompt is None:
                self._begun = time.monotonic()
                self._parts.counters.observe("queue", self._begun - self._received)
                self._prompt = self._compose()
                self._raise_if_stopped()
            sequence = self._make_sequence(self._prompt)
            with self._lock:
                self._raise_if_stopped()
                self._sequence = sequence
                self._parts.engine.submit(sequence)
        except AnsweredBefore as answered:
            self._end_with(answered.text)
        except OutOfMemory as error:
            if self._prompt is None:
                self._fail(error)
            else:
                self._wait_for_room(error)
        except HandlerError as error:
            self._fail(self._stopped or error)  # a fetch that was cut fails in its own words
        except Exception:
            logger.exception("answer could not be prepared %s", self._reply.ids)
            self._fail(InternalError("the question could not be prepared; the worker's log has the reason"))

    def _make_sequence(self, prompt: Prompt) -> TokenSequence:
        """Find what of the prompt is stored; pin the features of the images that are not."""
        keys, starts = place_images(prompt, self._parts.model.image_token_id)
        max_new_tokens = self._limits.max_new_tokens(len(keys), self._parameters)
        kept = self._cache.match(keys)
        tiers: set[Tier] = set()
        spans = []
        for image, start in zip(prompt.images, starts, strict=True):
            if start + image.num_tokens > kept:
                features, tier = self._parts.images.pin(image, partial(self._fetch, image))
                self._pinned.append(image)
                tiers.add(tier)
                spans.append(ImageSpan(start, features))
        self._answer.receipt |= {
            wire.CACHE_TIER: _tier(kept, tiers),
            wire.PREFILL_TOKENS: str(len(keys) - kept),
            wire.CONTEXT_TOKENS: str(len(keys)),
            wire.QUEUE_MS: f"{(self._begun - self._received) * 1000:.1f}",
        }
        self._kept = kept
        params = self._parameters.sampling(max_new_tokens)
        return TokenSequence(keys, spans, self._cache, params, self._deadline, self._on_event)

    # The engine's thread

    def _on_event(self, event: TokenEvent) -> bool:
        """One more token, or the end. False ends the generation here."""
        if event.token_id is None:
            error = event.error
            if isinstance(error, OutOfMemory) and self._sequence is not None and not self._sequence.output:
                self._wait_for_room(error)
                return False
            self._fail(error if isinstance(error, HandlerError) else InternalError("the answer could not be computed"))
            return False
        assert self._sequence is not None
        token, reason = self._answer.push(event)
        if len(self._sequence.output) == 1:
            self._first_token_at = time.monotonic()
            ttft_s = self._first_token_at - self._received
            self._answer.receipt[wire.TTFT_MS] = f"{ttft_s * 1000:.1f}"
            self._parts.counters.observe("ttft", ttft_s)
            self._parts.counters.add("tokens_prefilled", len(self._sequence.prompt) - self._kept)
            self._parts.counters.add("tokens_reused", self._kept)
            self._sequence.images.clear()  # they have been read
            self._unpin()
        if reason is not None:
            summary = self._summarise(reason)
            if summary.num_tokens > 1:
                gap_s = (time.monotonic() - self._first_token_at) / (summary.num_tokens - 1)
                self._parts.counters.observe("inter_token", gap_s)
            self._run_on(self._parts.preparing, lambda: self._finish(token, summary))
            return False
        self._answer.show(token)
        return True

    def _wait_for_room(self, error: OutOfMemory) -> None:
        """What this answer holds is in the way of others, and theirs in its own: begin again after one of them is over,
        or end with the error if there is none."""
        self._unpin()
        self._cache.drop()
        with self._lock:
            self._sequence = None
            self._is_using_room = False
        if not self._parts.room.try_wait(self._try_again):
            self._is_using_room = True
            self._fail(error)
        elif self._stopped is not None and self._parts.room.try_remove(self._try_again):
            self._fail(self._stopped)

    def _try_again(self) -> None:
        self._is_using_room = True
        self._run_on(self._parts.preparing, self._prepare)

    def _summarise(self, reason: FinishReason) -> Summary:
        assert self._sequence is not None
        return Summary(
            text=self._answer.text,
            finish_reason=reason.value,
            num_tokens=len(self._sequence.output),
            num_prompt_tokens=len(self._sequence.prompt),
            seed=self._parameters.seed,
            tokens=self._answer.tokens,
        )

    # The end

    def _finish(self, token: Token, summary: Summary) -> None:
        """On a worker thread, since recording may take its time: commit, then tell the client of the end."""
        try:
            self._commit(summary.text)
            self._over("turns_finished")
            self._answer.end(token, summary)
        except AnsweredBefore as answered:
            if self._reply.is_streaming:  # with tokens of its own, which may be others
                self._fail(TurnConflict("this question has been answered already; send it again to get that answer"))
            else:
                self._end_with(answered.text)
        except HandlerError as error:
            self._fail(error)
        except Exception:
            logger.exception("answer could not be finished %s", self._reply.ids)
            self._fail(InternalError("the answer could not be recorded; the worker's log has the reason"))

    def _end_with(self, text: str) -> None:
        """The stored answer to a request that was answered before."""
        self._over("turns_repeated")
        self._answer.end_with(text)

    def _fail(self, error: HandlerError) -> None:
        if isinstance(error, ClientGone):
            outcome = "turns_cancelled"
        else:
            outcome = "turns_timed_out" if isinstance(error, TurnTimedOut) else "turns_failed"
        self._over(outcome)
        self._reply.fail(error)

    def _over(self, outcome: str) -> None:
        """Counts the outcome and lets go of everything, once."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._parts.counters.add(outcome)
        if self._sequence is not None:
            self._parts.counters.add("tokens_generated", len(self._sequence.output))
        self._unpin()
        self._release()
        if self._is_using_room:
            self._parts.room.leave()

    def _unpin(self) -> None:
        while self._pinned:
            self._parts.images.unpin(self._pinned.pop())


class AnsweredBefore(Exception):
    """The question's answer is in the conversation already."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


def place_images(prompt: Prompt, image_token_id: int | None) -> tuple[list[int], list[int]]:
    """The prompt's keys: token ids, and where an image stands its own key; and where each image begins."""
    keys, starts, start = list(prompt.ids), [], 0
    for image in prompt.images:
        assert image_token_id is not None
        start = keys.index(image_token_id, start)
        keys[start : start + image.num_tokens] = [image.key] * image.num_tokens
        starts.append(start)
    return keys, starts


def _tier(kept: int, tiers: set[Tier]) -> str:
    """What the answer's beginning had to be computed from; of several the dearest."""
    if not tiers:
        return "kv" if kept else "none"
    return max(tiers, key=list(Tier).index).value
