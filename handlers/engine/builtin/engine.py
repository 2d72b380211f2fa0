"""The engine thread, which owns the device. Sequences join and leave the batch between two steps.

Other threads call only `submit`, `call` and `cancel`; their work is done on this thread between two steps.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from traceback import clear_frames
from typing import TypeVar

import torch
from torch import Tensor

from handlers.engine.builtin.draw import Draw
from handlers.engine.builtin.kv_cache import BLOCK
from handlers.engine.builtin.pace import MIN_CHUNK
from handlers.engine.builtin.runner import ModelRunner, StepResult
from handlers.engine.builtin.sampler import Sampler
from handlers.engine.builtin.scheduler import Scheduler, StepShare
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import FinishReason, TokenEvent
from handlers.engine.grammar import GrammarFailed
from handlers.errors import (
    MODEL_FAILED,
    STOPPING,
    HandlerError,
    InternalError,
    InvalidRequest,
    OutOfMemory,
    TurnTimedOut,
)
from handlers.models.memory import is_out_of_memory
from handlers.worker.device import return_gpu_memory, use_device

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Engine:
    """Continuous batching over one model.

    on_device_lost: called when the device has failed and only a new process can use it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        num_threads: int,
        clock: Callable[[], float] = time.monotonic,
        on_device_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.num_steps = 0
        self._on_device_lost = on_device_lost
        self._num_threads = num_threads
        self._clock = clock
        # Measures a step: on a CPU this thread's processor time, because others use it, too; on a GPU elapsed time.
        self._step_clock = time.thread_time if runner.model.device.type == "cpu" else clock
        self._samplers: dict[TokenSequence, Sampler] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and free the KV cache; sequences still running end with an error."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout=30)
        if not self._thread.is_alive():  # otherwise a running step still reads it
            self.runner.close()

    def submit(self, sequence: TokenSequence) -> None:
        """Queue a sequence, which begins when there is room. Its events are called on the engine thread."""
        self._post(self._inbox, lambda: self.admit(sequence))

    def cancel(self, sequence: TokenSequence, error: HandlerError) -> None:
        """Remove a sequence before the next step, with this error as its last event. Does nothing if it has ended."""
        with suppress(InternalError):  # `stop` ends every sequence
            self._post(self._inbox, lambda: self.finish(sequence, error))

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run `function` on the engine thread between two steps.

        At most one call runs between two steps: encoding an image takes longer than a step, and several in a row would
        delay streams noticeably.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as exc:
                clear_frames(exc.__traceback__)  # they hold tensors, and the future makes a cycle of them
                future.set_exception(exc)

        self._post(self._calls, run)
        return future

    def _post(self, queue: deque[Callable[[], None]], action: Callable[[], None]) -> None:
        with self._wake:
            if self._is_stopping:
                raise InternalError(STOPPING)
            queue.append(action)
            self._wake.notify()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        use_device(self.runner.model.device)
        while True:
            with self._wake:
                while not (self._inbox or self._calls or self.scheduler.all() or self._is_stopping):
                    self._wake.wait()
                actions = list(self._inbox)
                self._inbox.clear()
                if self._calls:
                    actions.append(self._calls.popleft())
                is_last = self._is_stopping and not self._calls
            for action in actions:
                self._guard(action)
            if is_last:
                self._fail_all(InternalError(STOPPING))
                return
            try:
                self.step()
            except Exception:
                logger.exception("engine step failed")
                self._fail_all(InternalError("the engine failed; the worker's log has the reason"))

    def _guard(self, action: Callable[[], object]) -> None:
        """Run an action for one sequence, so that its failure does not affect others."""
        try:
            action()
        except Exception:
            logger.exception("engine action failed")

    def _fail_all(self, error: HandlerError) -> None:
        for sequence in self.scheduler.all():
            self.finish(sequence, error)

    def step(self) -> None:
        """Give each scheduled sequence its next token. Engine thread only."""
        now = self._clock()
        for sequence in self.scheduler.all():
            if sequence.deadline <= now:
                self.finish(sequence, TurnTimedOut())
        while (newest := self.scheduler.admit()) is not None:
            self.finish(newest, OutOfMemory("the KV cache has no room for this turn beside others; try again later"))
        batch = self.scheduler.next_batch()
        if batch:
            num_decoding = sum(not share.sequence.is_prefilling for share in batch)
            num_prompt_tokens = sum(len(share.tokens) for share in batch) - num_decoding
            begin = self._step_clock()
            if self._commit(batch):
                self.scheduler.pace.note(num_decoding, num_prompt_tokens, self._step_clock() - begin)

    def _commit(self, batch: list[StepShare], *, is_part: bool = False) -> bool:
        """Run the batch and deliver its tokens; return whether it ran as a whole. is_part: of a step that failed."""
        draw = Draw({row: each for row, each in self._samplers_of(batch).items() if not each.is_plain_greedy})
        try:
            result = self.runner.run(batch, draw.begin)
        except Exception as exc:
            clear_frames(exc.__traceback__)  # they hold the failed step's tensors
            self._isolate(batch, exc, is_part=is_part)
            return False
        self.num_steps += 1
        chosen = self._choose(batch, result, draw)
        try:
            tops = self._find_top(batch, result, chosen)
        except Exception as exc:
            clear_frames(exc.__traceback__)
            for sequence in [sequence for sequence, _, _ in chosen if sequence.params.top_n_tokens]:
                self._fail(sequence, exc)
            tops, chosen = {}, [each for each in chosen if not each[0].params.top_n_tokens]
        for sequence, token, logprob in chosen:
            try:
                own, top = tops.get(sequence, (logprob, ()))
                self._deliver(sequence, token, own, top)
            except Exception as exc:
                self._fail(sequence, exc)
        for wake in {share.sequence.wake for share in batch if share.is_last and share.sequence.wake is not None}:
            self._guard(wake)
        return True

    def _samplers_of(self, batch: list[StepShare]) -> dict[int, Sampler]:
        """Return the samplers, by row of the batch, of the sequences that get a token in this step."""
        return {row: self._samplers[share.sequence] for row, share in enumerate(batch) if share.is_last}

    def _choose(self, batch: list[StepShare], result: StepResult, draw: Draw) -> list[tuple[TokenSequence, int, float]]:
        """Return the next token, and its log probability, of each sequence whose prompt is computed."""
        chosen: list[tuple[TokenSequence, int, float]] = []
        for row, sampler in self._samplers_of(batch).items():
            sequence = batch[row].sequence
            token, logprob = result.greedy[row], result.logprobs[row]
            if not math.isfinite(logprob):
                self._fail(sequence, ArithmeticError("the model's logits are not finite"))
                continue
            if not sampler.is_plain_greedy:
                try:
                    token, logprob = draw.finish(row, result)
                except GrammarFailed as exc:
                    self.finish(sequence, _too_complex(exc))
                    continue
                except Exception as exc:
                    self._fail(sequence, exc)
                    continue
                if not math.isfinite(logprob):
                    self._fail(sequence, ArithmeticError("the warped logits are not finite"))
                    continue
            chosen.append((sequence, token, logprob))
        return chosen

    def _find_top(
        self, batch: list[StepShare], result: StepResult, chosen: list[tuple[TokenSequence, int, float]]
    ) -> dict[TokenSequence, tuple[float, tuple[tuple[int, float], ...]]]:
        """Return, for sequences that ask for it, the chosen token's log probability and the likeliest tokens."""
        asking = [(sequence, token) for sequence, token, _ in chosen if sequence.params.top_n_tokens]
        if not asking:
            return {}
        rows = {share.sequence: row for row, share in enumerate(batch)}
        logprobs = result.logits[[rows[sequence] for sequence, _ in asking]].log_softmax(dim=-1)
        most = max(sequence.params.top_n_tokens or 0 for sequence, _ in asking)
        tokens = torch.tensor([[token] for _, token in asking], device=logprobs.device)
        own = logprobs.gather(1, tokens)[:, 0].tolist()
        values, ids = (found.tolist() for found in logprobs.topk(min(most, logprobs.shape[-1])))
        return {
            sequence: (own[n], tuple(zip(ids[n], values[n], strict=True))[: sequence.params.top_n_tokens])
            for n, (sequence, _) in enumerate(asking)
        }

    def _isolate(self, batch: list[StepShare], error: Exception, *, is_part: bool) -> None:
        """After a failed step, run its halves separately, until only the failing sequence ends."""
        has_no_memory = is_out_of_memory(error)
        if is_device_lost(self.runner.model.device):
            logger.critical("device lost error=%s", error)
            self._guard(self._on_device_lost)
            parts = []
        else:
            parts = _halve(batch, can_shorten=has_no_memory)
        if not parts:
            for share in batch:
                self._fail(share.sequence, error)
            return
        if not has_no_memory:
            logger.warning("step failed and is repeated in halves shares=%s error=%s", len(batch), error)
        else:
            if len(batch) == 1 or not is_part:  # other parts have the step's prompt tokens, which are halved already
                self.scheduler.pace.halve()
                logger.warning(
                    "device out of memory in a step shares=%s, next steps take fewer prompt tokens", len(batch)
                )
            return_gpu_memory()
        for part in parts:
            self._commit(part, is_part=True)

    def _fail(self, sequence: TokenSequence, error: Exception) -> None:
        """End a sequence whose step failed, and log the reason."""
        logger.error("sequence failed error=%s", error, exc_info=error)
        answer: HandlerError = InternalError(MODEL_FAILED)
        if is_out_of_memory(error):
            answer = OutOfMemory("the device ran out of memory while computing this answer")
        sequence.cache.drop()  # its stored keys and values may be the cause
        self._end(sequence, answer)

    def _deliver(
        self, sequence: TokenSequence, token: int, logprob: float, top: tuple[tuple[int, float], ...] = ()
    ) -> None:
        sequence.output.append(token)
        reason = None
        is_end = token in self.runner.model.eos_token_ids and not sequence.params.ignore_eos
        if is_end or self._samplers[sequence].is_complete:
            reason = FinishReason.EOS
        elif len(sequence.output) >= sequence.params.max_new_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._forget(sequence)
        num_cached = 0
        if sequence.num_new == 1:
            num_cached = sequence.num_cached
            sequence.images.clear()  # the prefill has read them
        if not sequence.on_event(TokenEvent(token, logprob, reason, top=top, num_cached=num_cached)):
            self._forget(sequence)

    def admit(self, sequence: TokenSequence) -> None:
        """Let the sequence join the batch, or wait for room. Engine thread only."""
        pool, model = self.runner.pool, self.runner.model
        try:
            context = sequence.prompt + sequence.output
            self._samplers[sequence] = Sampler(
                sequence.params, context, model.device, sequence.output, model.eos_token_ids
            )
            self.scheduler.add(sequence)
        except GrammarFailed as exc:
            self._end(sequence, _too_complex(exc))
        except Exception as exc:
            self._fail(sequence, exc)
        if pool.shape.num_bytes(sequence.max_tokens) > pool.capacity_bytes:  # it would wait forever, and block others
            self.finish(
                sequence, OutOfMemory(f"this turn takes more than the KV cache's {pool.capacity * BLOCK} tokens")
            )

    def finish(self, sequence: TokenSequence, error: HandlerError) -> None:
        """End a sequence with this error unless it has ended. Engine thread only."""
        if sequence in self._samplers:
            self._end(sequence, error)

    def _end(self, sequence: TokenSequence, error: HandlerError) -> None:
        self._forget(sequence)
        self._guard(lambda: sequence.on_event(TokenEvent(None, error=error)))

    def _forget(self, sequence: TokenSequence) -> None:
        """Remove a sequence from the batch, unless its own event has already done so."""
        self.scheduler.remove(sequence)
        self._samplers.pop(sequence, None)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless exactly the running and waiting sequences have a sampler. Engine thread only."""
        if set(self._samplers) != set(self.scheduler.all()):
            raise RuntimeError(f"{len(self._samplers)} samplers are kept for {self.scheduler!r}")

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Return an image's features, (image tokens, hidden size). Call from any thread but the engine's.

        They are computed on the engine thread.

        Raises OutOfMemory if the device has no room.
        """
        try:
            return self.call(lambda: self.runner.encode_image(pixels)).result()
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            raise OutOfMemory("the device ran out of memory while encoding this image") from exc


def _halve(batch: list[StepShare], *, can_shorten: bool) -> list[list[StepShare]]:
    """Return the parts of a failed step that are run instead; none if it is not divided further.

    can_shorten: a single share is replaced by the first half of its tokens.
    """
    if len(batch) > 1:
        middle = len(batch) // 2
        return [batch[:middle], batch[middle:]]
    [share] = batch
    if not can_shorten or len(share.tokens) <= MIN_CHUNK:
        return []
    return [[StepShare(share.sequence, share.tokens[: len(share.tokens) // 2], is_last=False)]]


def _too_complex(error: GrammarFailed) -> InvalidRequest:
    return InvalidRequest(f"the grammar of this answer is too complex: {error}")


def is_device_lost(device: torch.device) -> bool:
    """Return True if even the simplest computation fails: a CUDA error that only a new process clears."""
    try:
        torch.ones(1, device=device).add(1).cpu()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False
