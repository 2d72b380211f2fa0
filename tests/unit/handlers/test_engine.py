"""The engine with the tiny checkpoint: batches, failures, cancellation, deadlines."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from handlers.engine.engine import Engine
from handlers.engine.kv_cache import SequenceCache
from handlers.engine.runner import ModelRunner
from handlers.engine.scheduler import Scheduler
from handlers.engine.sequence import FinishReason, SamplingParams, Sequence, TokenEvent
from handlers.errors import HandlerError, InternalError, OutOfMemory, TurnTimedOut
from handlers.models.llava import LlavaModel

FOREVER = float("inf")
DEADLINE_S = 30.0


class Generation:
    """One sequence and what came of it."""

    def __init__(
        self,
        model: Any,
        prompt: list[int],
        max_new_tokens: int = 12,
        deadline: float = FOREVER,
        stop_after: int | None = None,
        **params: Any,
    ) -> None:
        self.events: list[TokenEvent] = []
        self._stop_after = stop_after
        self._changed = threading.Condition()
        cache = SequenceCache(ModelRunner(model).cache_shape)
        cache.reserve(len(prompt) + max_new_tokens)
        self.sequence = Sequence(
            prompt, [], cache, SamplingParams(max_new_tokens=max_new_tokens, **params), deadline, self._on_event
        )

    def _on_event(self, event: TokenEvent) -> bool:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        return len(self.tokens) != self._stop_after

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if event.token_id is not None]

    @property
    def error(self) -> Exception | None:
        return self.events[-1].error if self.events else None

    @property
    def is_over(self) -> bool:
        last = self.events[-1] if self.events else None
        is_stopped = self._stop_after is not None and len(self.tokens) == self._stop_after
        return last is not None and (last.finish_reason is not None or last.error is not None or is_stopped)

    def wait(self, num_tokens: int | None = None) -> "Generation":
        """Until it is over, or has so many tokens."""
        with self._changed:
            reached = lambda: self.is_over or (num_tokens is not None and len(self.tokens) >= num_tokens)  # noqa: E731
            assert self._changed.wait_for(reached, DEADLINE_S), self.events
        return self


EngineFactory = Callable[..., Engine]


@pytest.fixture
def model(endless_llava: Any) -> Any:
    return endless_llava


@pytest.fixture
def start_engine(model: Any) -> Iterator[EngineFactory]:
    """Starts engines; on the way out each is alive and has let go of every sequence."""
    engines: list[Engine] = []

    def start(max_rows: int = 8, prefill_chunk: int = 256, **options: Any) -> Engine:
        engine = Engine(ModelRunner(model), Scheduler(max_rows, prefill_chunk), 1, **options)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        assert engine.call(lambda: 42).result(DEADLINE_S) == 42
        assert engine.scheduler.all() == []
        assert engine._samplers == {}
        engine.stop()


def prompts(num: int) -> list[list[int]]:
    """Prompts of different lengths, the same in each run."""
    generator = torch.Generator().manual_seed(7)
    lengths = [3 + 11 * i % 70 for i in range(num)]
    return [torch.randint(10, 256, (n,), generator=generator).tolist() for n in lengths]


def alone(engine: Engine, model: Any, prompt: list[int], **params: Any) -> list[int]:
    generation = Generation(model, prompt, **params)
    engine.submit(generation.sequence)
    return generation.wait().tokens


def test_greedy_answer_is_that_of_whole_forward_passes(
    start_engine: EngineFactory, tiny_llava: LlavaModel, model: Any
) -> None:
    """One sequence alone: token for token what computing everything again for each token gives."""
    prompt = prompts(1)[0]

    tokens = alone(start_engine(), model, prompt)

    ids = list(prompt)
    cache_free = SequenceCache(ModelRunner(tiny_llava).cache_shape)
    for token in tokens:
        cache_free.drop()
        cache_free.reserve(len(ids))
        embeds = tiny_llava.embed(torch.tensor(ids))
        with torch.inference_mode():
            logits = tiny_llava.forward(
                embeds, torch.arange(len(ids)), [(cache_free, len(ids))], torch.tensor([len(ids) - 1])
            )
        assert int(logits.argmax()) == token
        ids.append(token)


def test_batched_equals_alone_while_others_join_and_leave(start_engine: EngineFactory, model: Any) -> None:
    """Greedy answers do not depend on who else is in the batch, nor on when they came and went."""
    engine = start_engine(max_rows=4, prefill_chunk=16)
    texts = prompts(10)
    lengths = [4 + 3 * (i % 5) for i in range(10)]
    expected = [alone(engine, model, p, max_new_tokens=n) for p, n in zip(texts, lengths, strict=True)]

    generations = [Generation(model, p, max_new_tokens=n) for p, n in zip(texts, lengths, strict=True)]
    for i, generation in enumerate(generations):
        if i >= 3:
            generations[i - 3].wait(num_tokens=2)
        engine.submit(generation.sequence)
    found = [generation.wait().tokens for generation in generations]

    assert found == expected


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_equals_whole_prefill(start_engine: EngineFactory, model: Any, chunk: int) -> None:
    """Where a prompt is cut does not change its answer."""
    prompt = prompts(7)[6]

    whole = alone(start_engine(prefill_chunk=1000), model, prompt)

    assert alone(start_engine(prefill_chunk=chunk), model, prompt) == whole


def test_kept_cache_equals_a_fresh_one(start_engine: EngineFactory, model: Any) -> None:
    """A second sequence on the first one's cache computes only what is new and answers the same."""
    engine = start_engine()
    first = Generation(model, prompts(3)[2])
    engine.submit(first.sequence)
    first.wait()
    longer = first.sequence.prompt + first.tokens + [20, 21, 22]
    expected = alone(engine, model, longer)

    second = Generation(model, longer)
    cache = first.sequence.cache
    cache.truncate(cache.common_prefix(longer))
    assert cache.length >= len(first.sequence.prompt)
    cache.reserve(len(longer) + 12)
    second.sequence.cache = cache
    engine.submit(second.sequence)

    assert second.wait().tokens == expected


def test_sampled_answer_depends_on_its_seed_only(start_engine: EngineFactory, model: Any) -> None:
    """The same seed gives the same answer beside any neighbours."""
    engine = start_engine()
    options = {"do_sample": True, "temperature": 1.5, "seed": 11}
    expected = alone(engine, model, prompts(1)[0], **options)

    crowd = [Generation(model, p, do_sample=True, seed=i) for i, p in enumerate(prompts(4))]
    one = Generation(model, prompts(1)[0], **options)
    for generation in (*crowd, one):
        engine.submit(generation.sequence)
    for generation in crowd:
        generation.wait()

    assert one.wait().tokens == expected


def test_answer_ends_by_length_eos_or_its_listener(start_engine: EngineFactory, model: Any) -> None:
    """max_new_tokens, an end token and on_event's False end a sequence; the reason goes with the last token."""
    engine = start_engine()
    by_length = Generation(model, prompts(1)[0], max_new_tokens=5)
    engine.submit(by_length.sequence)
    by_length.wait()
    assert [e.finish_reason for e in by_length.events] == [None] * 4 + [FinishReason.LENGTH]

    by_listener = Generation(model, prompts(1)[0], stop_after=2)
    engine.submit(by_listener.sequence)
    assert by_listener.wait().tokens == by_length.tokens[:2]

    end = by_length.tokens[2]
    model.eos_token_ids = frozenset([end])
    by_eos = Generation(model, prompts(1)[0])
    engine.submit(by_eos.sequence)
    by_eos.wait()
    assert by_eos.tokens == by_length.tokens[: by_length.tokens.index(end) + 1]
    assert by_eos.events[-1].finish_reason is FinishReason.EOS


def test_logprobs_are_those_of_the_model(start_engine: EngineFactory, model: Any) -> None:
    """Greedy rows report the logarithm of the chosen token's probability."""
    seen: list[torch.Tensor] = []

    def keep(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return logits

    model.after_step = keep
    generation = Generation(model, prompts(1)[0], max_new_tokens=3)
    start_engine().submit(generation.sequence)
    generation.wait()

    expected = [float(logits.log_softmax(-1)[0].max()) for logits in seen]
    assert [e.logprob for e in generation.events] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (RuntimeError("shape"), InternalError),
        (IndexError("index out of range"), InternalError),
        (ValueError("value"), InternalError),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
    ],
)
def test_failing_sequence_fails_alone(
    start_engine: EngineFactory, model: Any, failure: Exception, kind: type[HandlerError]
) -> None:
    """A model that raises for one sequence ends that one; the others' answers are as if it had not been there."""
    engine = start_engine()
    good_prompts = prompts(3)
    expected = [alone(engine, model, p) for p in good_prompts]
    bad = Generation(model, prompts(4)[3])

    def raise_for_bad(embeds: torch.Tensor, parts: Any) -> None:
        if any(cache is bad.sequence.cache and cache.length > len(bad.sequence.prompt) for cache, _ in parts):
            raise failure

    model.before_step = raise_for_bad
    good = [Generation(model, p) for p in good_prompts]
    for generation in (good[0], bad, *good[1:]):
        engine.submit(generation.sequence)

    assert [generation.wait().tokens for generation in good] == expected
    assert isinstance(bad.wait().error, kind)
    assert len(bad.tokens) == 2


def test_logits_that_are_not_numbers_fail_their_row_only(start_engine: EngineFactory, model: Any) -> None:
    """A NaN must not become a token, nor break the sampling of the other rows."""
    engine = start_engine()
    expected = alone(engine, model, prompts(1)[0], max_new_tokens=6)

    def spoil(logits: torch.Tensor) -> torch.Tensor:
        if len(logits) > 1:
            logits = logits.clone()
            logits[1:] = float("nan")
        return logits

    model.after_step = spoil
    first = Generation(model, prompts(1)[0], max_new_tokens=6)
    others = [Generation(model, p, max_new_tokens=30, do_sample=bool(i)) for i, p in enumerate(prompts(3)[1:])]
    engine.call(lambda: [engine._admit(g.sequence) for g in (first, *others)]).result(DEADLINE_S)

    assert first.wait().tokens == expected
    assert [type(g.wait().error) for g in others] == [InternalError, InternalError]


def test_listener_that_raises_fails_its_own_sequence(start_engine: EngineFactory, model: Any) -> None:
    """An exception in one sequence's on_event does not reach the others, and the sequence is told."""
    engine = start_engine()
    expected = alone(engine, model, prompts(1)[0])
    bad, good = Generation(model, prompts(2)[1]), Generation(model, prompts(1)[0])
    told: list[TokenEvent] = []
    ended = threading.Event()

    def raising(event: TokenEvent) -> bool:
        told.append(event)
        if event.token_id is None:
            ended.set()
        raise KeyError("listener")

    bad.sequence.on_event = raising
    for generation in (bad, good):
        engine.submit(generation.sequence)

    assert good.wait().tokens == expected
    assert ended.wait(DEADLINE_S)
    assert [event.token_id is None for event in told] == [False, True]


def test_sequence_that_cannot_be_admitted_fails_alone(start_engine: EngineFactory, model: Any) -> None:
    """Sampling settings that the warpers refuse end their own sequence; those submitted with it run."""
    engine = start_engine()
    bad = Generation(model, prompts(1)[0], repetition_penalty=-1.0)
    good = Generation(model, prompts(2)[1])

    def submit_both() -> None:
        engine.submit(bad.sequence)
        engine.submit(good.sequence)

    engine.call(submit_both).result(DEADLINE_S)

    assert len(good.wait().tokens) == 12
    assert isinstance(bad.wait().error, InternalError)


def test_cancelled_sequence_leaves_within_one_step(start_engine: EngineFactory, model: Any) -> None:
    """After a cancel no further token is computed for the sequence, and its last event is the error given."""
    engine = start_engine()
    reached, may_go_on = threading.Event(), threading.Event()
    left = Generation(model, prompts(1)[0], max_new_tokens=1000)
    stays = Generation(model, prompts(2)[1], max_new_tokens=8)
    steps_after: list[int] = []

    def pause(embeds: torch.Tensor, parts: Any) -> None:
        if len(left.tokens) == 3 and not reached.is_set():
            reached.set()
            assert may_go_on.wait(DEADLINE_S)
        elif reached.is_set():
            steps_after.append(sum(cache is left.sequence.cache for cache, _ in parts))

    model.before_step = pause
    for generation in (left, stays):
        engine.submit(generation.sequence)
    assert reached.wait(DEADLINE_S)
    why = InternalError("gone")
    engine.cancel(left.sequence, why)
    may_go_on.set()

    assert left.wait().error is why
    assert len(stays.wait().tokens) == 8
    assert len(left.tokens) <= 4
    assert not any(steps_after)


def test_cancel_of_an_ended_sequence_does_nothing(start_engine: EngineFactory, model: Any) -> None:
    """No second end."""
    engine = start_engine()
    generation = Generation(model, prompts(1)[0], max_new_tokens=2)
    engine.submit(generation.sequence)
    generation.wait()

    engine.cancel(generation.sequence, InternalError("late"))
    engine.call(lambda: None).result(DEADLINE_S)

    assert len(generation.events) == 2


def test_cancel_right_after_submit(start_engine: EngineFactory, model: Any) -> None:
    """A sequence that is cancelled before its first step gets its one last event."""
    engine = start_engine()
    generation = Generation(model, prompts(1)[0])

    def both() -> None:
        engine.submit(generation.sequence)
        engine.cancel(generation.sequence, InternalError("gone"))

    engine.call(both).result(DEADLINE_S)

    assert len(generation.wait().events) == 1


def test_deadline_ends_running_and_waiting_sequences(start_engine: EngineFactory, model: Any, clock: Any) -> None:
    """A turn past its deadline is told so, whether it has a row or waits for one."""
    engine = start_engine(max_rows=1, clock=clock)
    late = Generation(model, prompts(1)[0], max_new_tokens=1500, deadline=clock.now + 60)
    waiting = Generation(model, prompts(2)[1], deadline=clock.now + 60)
    patient = Generation(model, prompts(2)[1])
    for generation in (late, waiting, patient):
        engine.submit(generation.sequence)
    late.wait(num_tokens=2)

    clock.advance(60)

    assert isinstance(late.wait().error, TurnTimedOut)
    assert isinstance(waiting.wait().error, TurnTimedOut)
    assert len(patient.wait().tokens) == 12


def test_engine_thread_survives_its_own_failure(start_engine: EngineFactory, model: Any) -> None:
    """A bug outside the model fails those who run, and the next sequence is served."""
    engine = start_engine()
    broken = Generation(model, prompts(1)[0])
    original = engine.scheduler.next_batch

    def fail_once() -> Any:
        engine.scheduler.next_batch = original  # type: ignore[method-assign]
        raise KeyError("scheduler")

    engine.scheduler.next_batch = fail_once  # type: ignore[method-assign]
    engine.submit(broken.sequence)

    assert isinstance(broken.wait().error, InternalError)
    assert len(alone(engine, model, prompts(1)[0])) == 12


def test_call_runs_on_the_engine_thread_and_returns_errors(start_engine: EngineFactory) -> None:
    """Whoever calls gets the result or the exception; the thread goes on."""
    engine = start_engine()

    assert engine.call(lambda: threading.current_thread().name).result(DEADLINE_S) == "engine"
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0).result(DEADLINE_S)


def test_image_that_does_not_fit_the_device_is_out_of_memory(start_engine: EngineFactory, model: Any) -> None:
    """The vision tower's OOM is a 507."""

    def no_memory(pixels: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.encode_image = no_memory

    with pytest.raises(OutOfMemory):
        start_engine().encode_image(torch.zeros(1, 3, 96, 96))


def test_stop_ends_what_runs(model: Any) -> None:
    """A stopping engine tells its sequences, and takes no more."""
    engine = Engine(ModelRunner(model), Scheduler(8, 256), 1)
    engine.start()
    generation = Generation(model, prompts(1)[0], max_new_tokens=1500)
    engine.submit(generation.sequence)
    generation.wait(num_tokens=1)

    engine.stop()

    assert isinstance(generation.error, InternalError)
    with pytest.raises(InternalError):
        engine.submit(generation.sequence)
    with pytest.raises(InternalError):
        engine.encode_image(torch.zeros(1, 3, 96, 96))
