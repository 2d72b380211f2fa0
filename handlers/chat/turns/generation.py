"""One answer, from the question to the last byte.

    composing -> generating -> over

A worker thread composes the prompt, the engine's thread adds the tokens, and a worker thread ends the answer. Calls go
one way: from the generation to its question. Its owner is called back once, when the answer is over.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

from handlers.chat.commands import Ask, Generate
from handlers.chat.forms import Summary, Token
from handlers.chat.pictures.fetch_pool import FetchPool
from handlers.chat.pictures.receiver import ImageReceiver
from handlers.chat.pictures.store import Image, ImageStore, ImageTier
from handlers.chat.turns.admission import Admission
from handlers.chat.turns.answer import AnswerWriter
from handlers.chat.turns.context_limits import ContextLimits
from handlers.chat.turns.question import AnsweredBefore, Prompt, Question, place_images
from handlers.counters import Counters
from handlers.engine.engine import Engine
from handlers.engine.kv_cache import SequenceCache
from handlers.engine.sequence import FinishReason, ImageSpan, TokenEvent
from handlers.engine.sequence import Sequence as TokenSequence
from handlers.errors import ClientGone, HandlerError, InternalError, OutOfMemory, TurnConflict, TurnTimedOut
from handlers.models.text import TextModel
from handlers.reply import PendingReply
from torchmoor.wire import headers as wire

logger = logging.getLogger(__name__)

Submit = Callable[[Callable[[], None]], Future[None]]
"""Runs an action on another thread. Raises RuntimeError once that is shut down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParts:
    """The parts of a worker that all of its answers use."""

    limits: ContextLimits
    model: TextModel
    engine: Engine
    images: ImageStore
    admission: Admission
    receiver: ImageReceiver
    preparing: Executor  # for answers that fetch no images, and for the end of every answer
    loading: Executor  # for answers that decode images or rebuild a session
    fetching: FetchPool  # for answers that fetch images
    counters: Counters


class Generation:
    """One answer being made. Every outcome, errors included, goes through the reply.

    on_over: called once when the answer is over, whatever its outcome, on any thread; must return at once.
    """

    def __init__(
        self,
        parts: GenerationParts,
        question: Question,
        cache: SequenceCache,
        request: Ask | Generate,
        reply: PendingReply,
        on_over: Callable[[], None],
    ) -> None:
        parameters = request.parameters
        self._parts = parts
        self._question = question
        self._on_over = on_over
        self._cache = cache
        self._parameters = parameters
        self._reply = reply
        self._writer = AnswerWriter(
            reply, request.form, parts.model, parameters.stop, is_streaming=request.is_streaming
        )
        self._lock = threading.Lock()
        self._sequence: TokenSequence | None = None
        self._preparation: Future[None] | None = None
        self._stopped: HandlerError | None = None
        self._is_over = False
        self._received = time.monotonic()
        self._begun = self._first_token_at = self._received
        self._deadline = reply.shorten_deadline(self._received + parts.limits.engine.turn_timeout_s)
        self._pinned: list[Image] = []
        self._prompt: Prompt | None = None
        self._is_admitted = False
        self._kept = 0

    # From the question to the engine

    def begin(self, *, is_slow: bool, line: str | None) -> None:
        """Start composing the prompt.

        is_slow: the prompt needs images or a rebuilt session; then it delays only others that are slow. line: in which
        it waits for the images that it fetches (see FetchPool); None if it fetches none.
        """
        with self._lock:
            if self._is_over:
                return
            self._is_admitted = True
            self._parts.admission.enter()
        self._preparation = self._submit(self._choose_threads(is_slow, line), self._prepare)

    def _choose_threads(self, is_slow: bool, line: str | None) -> Submit:
        parts = self._parts
        if line is not None:
            return partial(parts.fetching.submit, line, self._reply)
        return parts.loading.submit if is_slow else parts.preparing.submit

    def _submit(self, submit: Submit, action: Callable[[], None]) -> Future[None] | None:
        try:
            return submit(action)
        except RuntimeError:  # it has been shut down
            self.fail(InternalError("the worker is stopping"))
            return None

    def stop(self, error: HandlerError) -> None:
        """End the answer early, within one step of the engine. Any thread.

        An answer in preparation ends at the next `_raise_if_stopped`; its reply cuts a fetch of its images.
        """
        with self._lock:
            if self._stopped is not None:
                return
            self._stopped = error
            sequence, preparation = self._sequence, self._preparation
        if sequence is not None:
            self._parts.engine.cancel(sequence, error)
        elif self._parts.admission.try_remove(self._try_again) or (
            preparation is not None and preparation.cancel()  # it had not begun
        ):
            self.fail(error)

    def _raise_if_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped
        if time.monotonic() >= self._deadline:
            raise TurnTimedOut("the answer was not begun before the turn's deadline")

    def _prepare(self) -> None:
        """Compose the prompt and submit the sequence to the engine."""
        try:
            self._raise_if_stopped()
            if self._prompt is None:
                self._begun = time.monotonic()
                self._parts.counters.observe("queue", self._begun - self._received)
                self._prompt = self._question.compose(self._raise_if_stopped)
                self._writer.receipt |= self._prompt.receipt
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
                self.fail(error)
            else:
                self._wait_for_memory(error)
        except HandlerError as error:
            self.fail(self._stopped or error)  # a fetch that was cut has an error of its own
        except Exception:
            logger.exception("answer could not be prepared %s", self._reply.ids)
            self.fail(InternalError("the question could not be prepared; the worker's log has the reason"))

    def _make_sequence(self, prompt: Prompt) -> TokenSequence:
        """Match the prompt with the cache; pin the features of the images that must be prefilled."""
        keys, starts = place_images(prompt, self._parts.model.image_token_id)
        max_new_tokens = self._parts.limits.max_new_tokens(len(keys), self._parameters)
        kept = self._cache.match(keys)
        tiers: set[ImageTier] = set()
        spans = []
        for image, start in zip(prompt.images, starts, strict=True):
            if start + image.num_tokens > kept:
                features, tier = self._parts.images.pin(image, partial(self._question.fetch, image))
                self._pinned.append(image)
                tiers.add(tier)
                spans.append(ImageSpan(start, features))
        self._writer.receipt |= {
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
        """Take one more token or an error. Return False to end the sequence."""
        if event.token_id is None:
            error = event.error
            if isinstance(error, OutOfMemory) and self._sequence is not None and not self._sequence.output:
                self._wait_for_memory(error)
                return False
            self.fail(error if isinstance(error, HandlerError) else InternalError("the answer could not be computed"))
            return False
        assert self._sequence is not None
        token, reason = self._writer.push(event)
        if len(self._sequence.output) == 1:
            self._first_token_at = time.monotonic()
            ttft_s = self._first_token_at - self._received
            self._writer.receipt[wire.TTFT_MS] = f"{ttft_s * 1000:.1f}"
            self._parts.counters.observe("ttft", ttft_s)
            self._parts.counters.add("tokens_prefilled", len(self._sequence.prompt) - self._kept)
            self._parts.counters.add("tokens_reused", self._kept)
            self._sequence.images.clear()  # the prefill has read them
            self._unpin()
        if reason is not None:
            summary = self._summarise(reason)
            if summary.num_tokens > 1:
                gap_s = (time.monotonic() - self._first_token_at) / (summary.num_tokens - 1)
                self._parts.counters.observe("inter_token", gap_s)
            self._submit(self._parts.preparing.submit, lambda: self._finish(token, summary))
            return False
        self._writer.show(token)
        return True

    def _wait_for_memory(self, error: OutOfMemory) -> None:
        """Free what this answer holds and begin again when another answer is over; fail if no other answer runs."""
        self._unpin()
        self._cache.drop()
        with self._lock:
            self._sequence = None
            self._is_admitted = False
        if not self._parts.admission.try_wait(self._try_again):
            self._is_admitted = True
            self.fail(error)
        elif self._stopped is not None and self._parts.admission.try_remove(self._try_again):
            self.fail(self._stopped)

    def _try_again(self) -> None:
        self._is_admitted = True
        self._submit(self._parts.preparing.submit, self._prepare)

    def _summarise(self, reason: FinishReason) -> Summary:
        assert self._sequence is not None
        return Summary(
            text=self._writer.text,
            finish_reason=reason.value,
            num_tokens=len(self._sequence.output),
            num_prompt_tokens=len(self._sequence.prompt),
            seed=self._parameters.seed,
            tokens=self._writer.tokens,
        )

    # The end

    def _finish(self, token: Token, summary: Summary) -> None:
        """Commit the answer, then send its end. Runs on a worker thread, because recording may take long."""
        try:
            self._question.commit(summary.text)
            self._over("turns_finished")
            self._writer.end(token, summary)
        except AnsweredBefore as answered:
            if self._reply.is_streaming:  # its tokens may differ from the stored answer
                self.fail(TurnConflict("this question has been answered already; send it again to get that answer"))
            else:
                self._end_with(answered.text)
        except HandlerError as error:
            self.fail(error)
        except Exception:
            logger.exception("answer could not be finished %s", self._reply.ids)
            self.fail(InternalError("the answer could not be recorded; the worker's log has the reason"))

    def _end_with(self, text: str) -> None:
        """Send the stored answer of a request that was answered before."""
        self._over("turns_repeated")
        self._writer.end_with(text)

    def fail(self, error: HandlerError) -> None:
        if isinstance(error, ClientGone):
            outcome = "turns_cancelled"
        else:
            outcome = "turns_timed_out" if isinstance(error, TurnTimedOut) else "turns_failed"
        self._over(outcome)
        self._reply.fail(error)

    def _over(self, outcome: str) -> None:
        """Count the outcome and release everything, once."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._parts.counters.add(outcome)
        if self._sequence is not None:
            self._parts.counters.add("tokens_generated", len(self._sequence.output))
        self._unpin()
        self._on_over()
        if self._is_admitted:
            self._parts.admission.leave()

    def _unpin(self) -> None:
        while self._pinned:
            self._parts.images.unpin(self._pinned.pop())


def _tier(kept: int, tiers: set[ImageTier]) -> str:
    """Name the slowest tier that the answer's prompt was computed from."""
    if not tiers:
        return "kv" if kept else "none"
    return max(tiers, key=list(ImageTier).index).value
