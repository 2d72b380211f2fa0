"""One answer, from the question to the last byte.

    composing -> generating -> over

A worker thread composes the prompt, the engine's thread adds the tokens, and a worker thread ends the answer. The
generation calls its question, never the reverse; `on_over` is called once, at the end.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from handlers.chat.adapters import AdapterUse
from handlers.chat.commands import Ask, Generate
from handlers.chat.forms import Summary
from handlers.chat.parameters import check_supported, draw_seed
from handlers.chat.tools import constrain
from handlers.chat.turns.answer import AnswerWriter
from handlers.chat.turns.generation_parts import GenerationParts, Submit
from handlers.chat.turns.placed_images import PlacedImages, place_images
from handlers.chat.turns.question import AnsweredBefore, Prompt, Question, digest_of
from handlers.engine.contract import AnswerRequest, Cancel, FinishReason, KvCache, SamplingParams, TokenEvent
from handlers.errors import (
    STOPPING,
    ClientGone,
    HandlerError,
    InternalError,
    InvalidRequest,
    OutOfMemory,
    TurnConflict,
    TurnTimedOut,
)
from handlers.models.answer_style import AnswerStyle
from handlers.requests.continuation import AnswerStart
from handlers.requests.reply import PendingReply
from torchmoor.wire.receipt import CACHE_TIER, CONTEXT_TOKENS, PREFILL_TOKENS, QUEUE_MS, TTFT_MS, TURN

logger = logging.getLogger(__name__)


class Generation:
    """Generates one answer. Every outcome, errors included, goes through the reply.

    on_over: called once at the end of the answer, whatever its outcome, on any thread; must return at once.
    """

    def __init__(
        self,
        parts: GenerationParts,
        question: Question,
        cache: KvCache,
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
        self._writer = AnswerWriter(reply, request, parts.model)
        self._session_id = request.session_id if isinstance(request, Ask) else ""
        self._is_marked = request.is_streaming and reply.may_mark
        self._lock = threading.Lock()
        self._cancel: Cancel | None = None  # set while the engine generates
        self._num_new = 0  # tokens that this worker has generated
        self._preparation: Future[None] | None = None
        self._stopped: HandlerError | None = None
        self._is_over = False
        self._received = time.monotonic()
        self._begun = self._first_token_at = self._received
        self._deadline = reply.shorten_deadline(self._received + parts.limits.engine.turn_timeout_s)
        self._images = PlacedImages(parts.images)
        self._adapter = AdapterUse(parts.adapters)
        self._grammar: Any = None
        self._prompt: Prompt | None = None
        self._is_admitted = False
        self._given: Sequence[int] = ()
        self._is_restored = False
        self._kept = 0
        self._ends_early = False

    # From the question to the engine

    def begin(self, *, is_slow: bool, line: str | None) -> None:
        """Start composing the prompt.

        is_slow: the prompt needs images or a rebuilt session, so other threads prepare it. line: the queue for its
        downloads of images (see FetchPool); None if there are none.
        """
        with self._lock:
            if self._is_over:
                return
            self._is_admitted = True
            self._parts.admission.enter()
        preparation = self._submit(self._parts.threads_for(self._reply, is_slow=is_slow, line=line), self._prepare)
        with self._lock:
            self._preparation, error = preparation, self._stopped
        if error is not None and preparation is not None and preparation.cancel():  # `stop` did not find it
            self.fail(error)

    def _submit(self, submit: Submit, action: Callable[[], None]) -> Future[None] | None:
        try:
            return submit(action)
        except RuntimeError:  # it has been shut down
            self.fail(InternalError(STOPPING))
            return None

    def stop(self, error: HandlerError) -> None:
        """End the answer within a step of the engine, or at its preparation's next `_raise_if_stopped`. Any thread."""
        with self._lock:
            if self._stopped is not None:
                return
            self._stopped = error
            cancel, preparation = self._cancel, self._preparation
        if cancel is not None:
            cancel(error)
        elif (
            self._adapter.try_end()
            or self._parts.admission.try_remove(self._try_again)
            or (preparation is not None and preparation.cancel())  # it had not begun
        ):
            self.fail(error)

    def end_early(self) -> bool:
        """End the answer with its next token, as at a stop string. Any thread.

        Return False if the engine is not generating it: it is in preparation, waits for memory, or has ended.
        """
        with self._lock:
            self._ends_early = self._cancel is not None and self._stopped is None and not self._is_over
            return self._ends_early

    def _raise_if_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped
        if time.monotonic() >= self._deadline:
            raise TurnTimedOut("the answer was not begun before the turn's deadline")

    def _prepare(self) -> None:
        """Compose the prompt and submit it to the engine."""
        try:
            self._raise_if_stopped()
            if self._prompt is None:
                self._begun = time.monotonic()
                self._parts.counters.observe("queue", self._begun - self._received)
                self._prompt = self._compose()
                self._writer.begin_feed()  # not before: an attempt that finds the answer recorded begins none
                self._writer.receipt |= self._prompt.receipt
                self._raise_if_stopped()
            if self._adapter.must_wait(self._prompt.adapter):
                self._adapter.wait(self._prompt.adapter, self._go_on, self.fail)
                if self._stopped is not None and self._adapter.try_end():
                    self.fail(self._stopped)
                return
            request = self._make_request(self._prompt)
            with self._lock:
                self._raise_if_stopped()
                self._cancel = self._parts.engine.submit(self._cache, request)
        except AnsweredBefore as answered:
            self._repeat(answered)
        except OutOfMemory as error:
            if self._prompt is None:
                self.fail(error)
            else:
                self._wait_for_memory(error)
        except HandlerError as error:
            self.fail(self._stopped or error)  # a download that was aborted raises another error
        except Exception:
            logger.exception("answer could not be prepared %s", self._reply.ids)
            self.fail(InternalError("the question could not be prepared; the worker's log has the reason"))

    def _compose(self) -> Prompt:
        """Make the prompt; prepare its answer's reader and grammar. Raises HandlerError, AnsweredBefore."""
        style, field = self._parts.model.template.style, self._parameters.reasoning_field
        if field and style.thought is None and not style.knows_effort:
            raise InvalidRequest(f"this model's chat template marks no reasoning for '{field}'", param=field)
        tools, grammar = self._parameters.tools, self._parameters.grammar
        constrain(tools, grammar, style)  # refuse early what no prompt allows
        try:
            prompt = self._question.compose(self._raise_if_stopped)
        except AnsweredBefore as answered:
            self._read_as(answered.style)
            raise
        self._read_as(prompt.style)
        source = constrain(tools, grammar, prompt.style)
        self._grammar = None if source is None else self._parts.engine.compile_grammar(source)
        return prompt

    def _read_as(self, style: AnswerStyle) -> None:
        """Read the answer by its style, with what another worker has begun. Raises InvalidRequest, TurnConflict."""
        self._writer.read_as(style)
        given, model = self._reply.continuation, self._parts.model
        if given is None:
            return
        ends = () if self._parameters.ignore_eos else model.eos_token_ids
        if not all(0 <= each.id < model.vocabulary and each.id not in ends for each in given.tokens):
            raise InvalidRequest("the answer that is to be continued is not this model's")
        self._writer.resume(given)

    def _make_request(self, prompt: Prompt) -> AnswerRequest:
        """Match the prompt with the cache; pin the features of the images that must be prefilled."""
        self._parameters.check_tokens(self._parts.model.vocabulary)
        keys, starts = place_images(prompt, self._parts.model.image_token_id)
        max_new_tokens = self._parts.limits.max_new_tokens(len(keys), self._parameters)
        num_matched = self._cache.match(keys, self._adapter.version)
        kept = self._question.restore(keys)
        self._is_restored = kept > num_matched
        params = self._with_seed(self._parameters.sampling(max_new_tokens, self._grammar))
        check_supported(params, self._parts.engine.capabilities)
        begun = self._reply.continuation
        if self._is_marked and (params.is_plain or self._parts.engine.capabilities.can_resume):
            params = self._mark(prompt, params, kept)
        elif begun is not None:
            raise TurnConflict("this worker's engine cannot continue the answer that another one has begun")
        self._parameters = replace(self._parameters, seed=params.seed)
        self._given = () if begun is None else [token.id for token in begun.tokens]
        if len(self._given) >= max_new_tokens:
            raise TurnConflict("the answer that is to be continued has already reached its maximum length")
        self._writer.num_prompt_tokens = len(keys)
        images = self._images.pin(prompt, starts, kept, self._question.fetch)
        return AnswerRequest(
            prompt=keys,
            images=images,
            params=params,
            deadline=self._deadline,
            on_event=self._on_event,
            wake=self._reply.wake,
            given=self._given,
            adapter=self._adapter.adapter,
        )

    def _with_seed(self, params: SamplingParams) -> SamplingParams:
        """Draw the seed of a sampled answer whose request has none, if the engine's sampler needs one anyway."""
        if not params.do_sample or params.seed is not None or not self._parts.engine.capabilities.can_resume:
            return params
        return replace(params, seed=draw_seed())

    def _mark(self, prompt: Prompt, params: SamplingParams, num_cached: int) -> SamplingParams:
        """Mark the answer for continuation by another worker, or check that this worker can continue it.

        Return the parameters with their seed.

        Raises TurnConflict.
        """
        about = f"{self._parts.model.fingerprint} {self._session_id} {params.max_new_tokens}"
        digest = digest_of(f"{about} {self._adapter.version}".rstrip(), prompt)
        start = self._writer.start
        if start is None:
            start = self._writer.start = AnswerStart(self._reply.received_at, params.seed, num_cached, digest)
        elif start.digest != digest:
            raise TurnConflict("the answer began with another model or prompt and cannot be continued here")
        return replace(params, seed=start.seed)

    # The engine's thread

    def _on_event(self, event: TokenEvent) -> bool:
        """Handle a token or an error. Return False to end the sequence."""
        error = event.error
        if error is not None:
            if isinstance(error, OutOfMemory) and not self._num_new:
                self._wait_for_memory(error)
            else:
                self.fail(error)
            return False
        if self._ends_early and event.finish_reason is None:
            event = replace(event, finish_reason=FinishReason.STOP)
        reason = self._writer.add(event)
        self._num_new += 1
        if self._num_new == 1:
            self._note_first(event)
        if reason is not None:
            if self._num_new > 1:
                gap_s = (time.monotonic() - self._first_token_at) / (self._num_new - 1)
                self._parts.counters.observe("inter_token", gap_s)
            self._submit(self._parts.threads_for(self._reply), partial(self._finish, reason))
            return False
        self._writer.show()
        return True

    def _note_first(self, event: TokenEvent) -> None:
        """Add the prompt's cost to the receipt, and unpin its images, which the engine has read."""
        self._first_token_at = time.monotonic()
        ttft_s = self._first_token_at - self._received
        self._kept = kept = event.num_cached
        num_prefilled = self._writer.num_prompt_tokens + len(self._given) - kept
        self._writer.receipt |= {
            CACHE_TIER: self._images.name_tier(kept, is_restored=self._is_restored),
            PREFILL_TOKENS: str(num_prefilled),
            CONTEXT_TOKENS: str(self._writer.num_prompt_tokens),
            QUEUE_MS: f"{(self._begun - self._received) * 1000:.1f}",
            TTFT_MS: f"{ttft_s * 1000:.1f}",
            **self._adapter.receipt,
        }
        if self._writer.start is not None and self._reply.continuation is None:
            self._writer.start = replace(self._writer.start, num_cached=kept)
        self._parts.counters.observe("ttft", ttft_s)
        self._parts.counters.add("tokens_prefilled", num_prefilled)
        self._parts.counters.add("tokens_reused", kept)
        self._images.release()

    def _wait_for_memory(self, error: OutOfMemory) -> None:
        """Free this answer's memory and begin again when another answer ends. Fail if no other answer runs."""
        self._images.release()
        self._cache.drop()
        with self._lock:
            self._cancel = None
            self._is_admitted = False
        if not self._parts.admission.try_wait(self._try_again):
            self._is_admitted = True
            self.fail(error)
        elif self._stopped is not None and self._parts.admission.try_remove(self._try_again):
            self.fail(self._stopped)

    def _try_again(self) -> None:
        self._is_admitted = True
        self._go_on()

    def _go_on(self) -> None:
        """Prepare the rest: the prompt is composed."""
        self._submit(self._parts.threads_for(self._reply), self._prepare)

    def _summarize(self, reason: FinishReason) -> Summary:
        text, tokens = self._writer.read_rest()
        return Summary(
            text=text,
            finish_reason=reason.value,
            num_tokens=len(self._given) + self._num_new,
            num_prompt_tokens=self._writer.num_prompt_tokens,
            seed=self._parameters.seed,
            tokens=tokens,
            message=self._writer.message,
            num_cached_tokens=self._kept if self._writer.start is None else self._writer.start.num_cached,
        )

    # The end

    def _finish(self, reason: FinishReason) -> None:
        """Commit the answer, then send its end. Runs on a worker thread, because recording may take long."""
        try:
            summary = self._summarize(reason)
            self._commit(summary)
            self._over("turns_finished")
            self._writer.end(summary.tokens[-1], summary)
        except AnsweredBefore as answered:
            if self._writer.is_begun:  # the client's tokens may differ from the stored answer
                self.fail(TurnConflict("this question has been answered already; send it again to get that answer"))
            else:
                self._repeat(answered)
        except HandlerError as error:
            self.fail(error)
        except Exception:
            logger.exception("answer could not be finished %s", self._reply.ids)
            self.fail(InternalError("the answer could not be recorded; the worker's log has the reason"))

    def _commit(self, summary: Summary) -> None:
        """Record the answer, unless the worker that began it has already recorded it. Raises as `commit` does."""
        try:
            self._question.commit(summary)
        except AnsweredBefore as answered:
            if self._reply.continuation is None or answered.text != summary.text:
                raise

    def _repeat(self, answered: AnsweredBefore) -> None:
        """Send the stored answer to a retried request."""
        self._writer.receipt[TURN] = str(answered.number)
        self._over("turns_repeated")
        with self._reply.guarded():
            self._writer.end_with(answered.text)

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
        if self._cancel is not None:
            self._parts.counters.add("tokens_generated", self._num_new)
        self._images.release()
        self._adapter.release()
        self._on_over()
        if self._is_admitted:
            self._parts.admission.leave()
