"""The engine with the tiny checkpoint: batches, shared memory, failures, cancellation, deadlines."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch

from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.kv_cache import BLOCK, SequenceCache, cache_shape
from handlers.engine.builtin.pace import Pace
from handlers.engine.builtin.runner import ModelRunner
from handlers.engine.builtin.scheduler import Scheduler
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import AnswerRequest, FinishReason, PlacedImage, SamplingParams, TokenEvent
from handlers.errors import HandlerError, InternalError, OutOfMemory, TurnTimedOut
from handlers.models.attention import PackedBatch, PackedShare, in_place
from handlers.models.llava import LlavaModel
from tests.waiting import DEADLINE_S

FOREVER = float("inf")


class Generation:
    """A sequence and its events; like a turn it pins its cache until its end.

    cache: from an earlier turn; kept: how much of the prompt it contains, or shares.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        max_new_tokens: int = 12,
        deadline: float = FOREVER,
        stop_after: int | None = None,
        cache: SequenceCache | None = None,
        images: list[PlacedImage] | None = None,
        wake: Callable[[], None] | None = None,
        **params: Any,
    ) -> None:
        self.events: list[TokenEvent] = []
        self.cache = cache or SequenceCache(engine.runner.pool)
        self._stop_after = stop_after
        self._changed = threading.Condition()
        self.cache.pin()
        self.kept = self.cache.match(prompt)
        settings = SamplingParams(max_new_tokens=max_new_tokens, **params)
        request = AnswerRequest(
            prompt=prompt, images=images or [], params=settings, deadline=deadline, on_event=self._on_event, wake=wake
        )
        self.sequence = TokenSequence(self.cache, request)

    def _on_event(self, event: TokenEvent) -> bool:
        with self._changed:
            self.events.append(event)
            if self.is_over:
                self.cache.unpin()
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
        """Wait for the end, or for a number of tokens."""
        with self._changed:
            reached = lambda: self.is_over or (num_tokens is not None and len(self.tokens) >= num_tokens)  # noqa: E731
            assert self._changed.wait_for(reached, DEADLINE_S), self.events
        return self


EngineFactory = Callable[..., Engine]


@pytest.fixture
def model(endless_llava: Any) -> Any:
    return endless_llava


def make_engine(
    model: Any,
    max_rows: int = 8,
    prefill_chunk: int = 256,
    num_tokens: int = 8192,
    is_row_batched: bool | None = None,
    has_prompt_rows: bool | None = None,
    **options: Any,
) -> Engine:
    """Create an engine. num_tokens: the KV cache's capacity. Without pacing, so that steps are predictable."""
    num_bytes = cache_shape(model).num_bytes(num_tokens)
    runner = ModelRunner(model, num_bytes, max_rows, is_row_batched=is_row_batched, has_prompt_rows=has_prompt_rows)
    return Engine(runner, Scheduler(max_rows, Pace(prefill_chunk, 1e9)), 1, **options)


def check_is_at_rest(engine: Engine) -> None:
    """Check that every sequence is released and every block is free or in an unpinned cache."""
    assert engine.scheduler.all() == []
    engine.check_integrity()
    engine.runner.pool.check_integrity([])


@pytest.fixture
def start_engine(model: Any) -> Iterator[EngineFactory]:
    """Start engines; check at the end that each is alive and at rest."""
    engines: list[Engine] = []

    def start(**options: Any) -> Engine:
        engine = make_engine(model, **options)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        assert engine.call(lambda: 42).result(DEADLINE_S) == 42
        check_is_at_rest(engine)
        engine.stop()


@pytest.fixture
def still_engine(model: Any) -> Iterator[EngineFactory]:
    """Create engines without a thread, which the test steps; check at the end that each is at rest."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(make_engine(model, **options))
        return engines[-1]

    yield make
    for engine in engines:
        check_is_at_rest(engine)


def admit(engine: Engine, *generations: Generation) -> None:
    for generation in generations:
        engine.admit(generation.sequence)


def run_to_the_end(engine: Engine) -> None:
    while engine.scheduler.all():
        engine.step()


def is_in(batch: PackedBatch, cache: SequenceCache) -> bool:
    """Return whether this step writes to the cache."""
    return bool(torch.isin(batch.slots, cache.slots).any())


def prompts(num: int) -> list[list[int]]:
    """Return prompts of different lengths, the same in each run."""
    generator = torch.Generator().manual_seed(7)
    lengths = [3 + 11 * i % 70 for i in range(num)]
    return [torch.randint(10, 256, (n,), generator=generator).tolist() for n in lengths]


def alone(engine: Engine, prompt: list[int], **params: Any) -> list[int]:
    """Return the answer of a separate sequence that leaves nothing in the cache."""
    generation = Generation(engine, prompt, **params)
    engine.submit(generation.sequence)
    tokens = generation.wait().tokens
    generation.cache.drop()
    return tokens


def test_greedy_answer_is_that_of_whole_forward_passes(
    start_engine: EngineFactory, tiny_llava: LlavaModel, model: Any
) -> None:
    """One sequence alone equals, token for token, a full recomputation for each token."""
    prompt = prompts(1)[0]

    tokens = alone(start_engine(), prompt)

    ids = list(prompt)
    for token in tokens:
        num = len(ids)
        storage = torch.zeros(tiny_llava.num_layers, 2, tiny_llava.num_kv_heads, num, tiny_llava.head_size)
        batch = PackedBatch(storage, torch.arange(num), [PackedShare(num, num, in_place(storage, 0, num))])
        with torch.inference_mode():
            embeds = tiny_llava.embed(torch.tensor(ids))
            logits = tiny_llava.forward(embeds, torch.arange(num), batch, torch.tensor([num - 1]))
        assert int(logits.argmax()) == token
        ids.append(token)


def test_batched_equals_alone_while_others_join_and_leave(start_engine: EngineFactory, model: Any) -> None:
    """Greedy answers do not depend on other sequences in the batch or when they join and leave."""
    engine = start_engine(max_rows=4, prefill_chunk=16)
    texts = prompts(10)
    lengths = [4 + 3 * (i % 5) for i in range(10)]
    expected = [alone(engine, p, max_new_tokens=n) for p, n in zip(texts, lengths, strict=True)]

    generations = [Generation(engine, p, max_new_tokens=n) for p, n in zip(texts, lengths, strict=True)]
    for i, generation in enumerate(generations):
        if i >= 3:
            generations[i - 3].wait(num_tokens=2)
        engine.submit(generation.sequence)
    found = [generation.wait().tokens for generation in generations]

    assert found == expected


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_equals_whole_prefill(start_engine: EngineFactory, model: Any, chunk: int) -> None:
    """The chunks of a prompt do not change its answer."""
    prompt = prompts(7)[6]

    whole = alone(start_engine(prefill_chunk=1000), prompt)

    assert alone(start_engine(prefill_chunk=chunk), prompt) == whole


def test_kept_cache_equals_a_fresh_one(start_engine: EngineFactory, model: Any) -> None:
    """A second sequence on the first one's cache computes only new tokens and answers the same."""
    engine = start_engine()
    first = Generation(engine, prompts(3)[2])
    engine.submit(first.sequence)
    first.wait()
    longer = first.sequence.prompt + first.tokens + [20, 21, 22]
    expected = alone(engine, longer)

    second = Generation(engine, longer, cache=first.cache)
    engine.submit(second.sequence)

    assert second.kept == len(first.sequence.prompt) + 11
    assert second.wait().tokens == expected


def test_sampled_answer_depends_on_its_seed_only(start_engine: EngineFactory, model: Any) -> None:
    """A seed gives the same answer with any other sequences."""
    engine = start_engine()
    options = {"do_sample": True, "temperature": 1.5, "seed": 11}
    expected = alone(engine, prompts(1)[0], **options)

    crowd = [Generation(engine, p, do_sample=True, seed=i) for i, p in enumerate(prompts(4))]
    one = Generation(engine, prompts(1)[0], **options)
    for generation in (*crowd, one):
        engine.submit(generation.sequence)
    for generation in crowd:
        generation.wait()

    assert one.wait().tokens == expected


def test_seeded_answers_are_the_same_after_a_failed_step(
    start_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded rows keep their random numbers when drawing together fails and each row is drawn alone."""
    engine = start_engine()
    options = [{"do_sample": True, "temperature": 1.5, "seed": seed} for seed in range(3)]
    expected = [alone(engine, prompt, **own) for prompt, own in zip(prompts(3), options, strict=True)]
    search, failures = torch.searchsorted, iter([True])

    def fail_once(sums: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if len(sums) == 3 and next(failures, False):
            raise RuntimeError("no memory")
        return search(sums, *arguments, **named)

    monkeypatch.setattr(torch, "searchsorted", fail_once)
    generations = [Generation(engine, prompt, **own) for prompt, own in zip(prompts(3), options, strict=True)]
    engine.call(lambda: [engine.admit(each.sequence) for each in generations]).result(DEADLINE_S)

    assert [each.wait().tokens for each in generations] == expected
    assert next(failures, False) is False


def test_answer_ends_by_length_eos_or_its_listener(start_engine: EngineFactory, model: Any) -> None:
    """max_new_tokens, an end token and on_event's False end a sequence; the last token has the reason."""
    engine = start_engine()
    by_length = Generation(engine, prompts(1)[0], max_new_tokens=5)
    engine.submit(by_length.sequence)
    by_length.wait()
    assert [e.finish_reason for e in by_length.events] == [None] * 4 + [FinishReason.LENGTH]

    by_listener = Generation(engine, prompts(1)[0], stop_after=2)
    engine.submit(by_listener.sequence)
    assert by_listener.wait().tokens == by_length.tokens[:2]

    end = by_length.tokens[2]
    model.eos_token_ids = frozenset([end])
    by_eos = Generation(engine, prompts(1)[0])
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
    engine = start_engine()
    generation = Generation(engine, prompts(1)[0], max_new_tokens=3)
    engine.submit(generation.sequence)
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
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
    ],
)
def test_failing_sequence_fails_alone(
    start_engine: EngineFactory, model: Any, failure: Exception, kind: type[HandlerError]
) -> None:
    """A sequence for which the model raises ends; the others' answers do not change."""
    engine = start_engine()
    good_prompts = prompts(3)
    expected = [alone(engine, p) for p in good_prompts]
    bad = Generation(engine, prompts(4)[3])

    def raise_for_bad(embeds: torch.Tensor, batch: PackedBatch) -> None:
        if bad.cache.length > len(bad.sequence.prompt) and is_in(batch, bad.cache):
            raise failure

    model.before_step = raise_for_bad
    good = [Generation(engine, p) for p in good_prompts]
    for generation in (good[0], bad, *good[1:]):
        engine.submit(generation.sequence)

    assert [generation.wait().tokens for generation in good] == expected
    assert isinstance(bad.wait().error, kind)
    assert len(bad.tokens) == 2


def test_logits_that_are_not_numbers_fail_their_row_only(start_engine: EngineFactory, model: Any) -> None:
    """A NaN neither becomes a token nor breaks the sampling of other rows."""
    engine = start_engine()
    expected = alone(engine, prompts(1)[0], max_new_tokens=6)

    def spoil(logits: torch.Tensor) -> torch.Tensor:
        if len(logits) > 1:
            logits = logits.clone()
            logits[1:] = float("nan")
        return logits

    model.after_step = spoil
    first = Generation(engine, prompts(1)[0], max_new_tokens=6)
    others = [Generation(engine, p, max_new_tokens=30, do_sample=bool(i)) for i, p in enumerate(prompts(3)[1:])]
    engine.call(lambda: [engine.admit(g.sequence) for g in (first, *others)]).result(DEADLINE_S)

    assert first.wait().tokens == expected
    assert [type(g.wait().error) for g in others] == [InternalError, InternalError]


def test_likeliest_tokens_without_memory_fail_only_those_that_ask(still_engine: EngineFactory, model: Any) -> None:
    """If the likeliest tokens do not fit into memory, only the rows that request them fail."""
    engine = still_engine()
    texts = prompts(2)
    expected = Generation(engine, texts[0])
    admit(engine, expected)
    run_to_the_end(engine)
    good, asking = Generation(engine, texts[0]), Generation(engine, texts[1], top_n_tokens=2)

    admit(engine, good, asking)
    with patch.object(torch.Tensor, "log_softmax", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
        run_to_the_end(engine)

    assert isinstance(asking.error, OutOfMemory)
    assert good.tokens == expected.tokens
    check_is_at_rest(engine)


def test_listener_that_raises_fails_its_own_sequence(start_engine: EngineFactory, model: Any) -> None:
    """An exception in on_event ends its own sequence with an error and does not reach the others."""
    engine = start_engine()
    expected = alone(engine, prompts(1)[0])
    bad, good = Generation(engine, prompts(2)[1]), Generation(engine, prompts(1)[0])
    told: list[TokenEvent] = []
    ended = threading.Event()

    def raising(event: TokenEvent) -> bool:
        told.append(event)
        if event.token_id is None:
            bad.cache.unpin()
            ended.set()
        raise KeyError("listener")

    bad.sequence.on_event = raising
    for generation in (bad, good):
        engine.submit(generation.sequence)

    assert good.wait().tokens == expected
    assert ended.wait(DEADLINE_S)
    assert [event.token_id is None for event in told] == [False, True]


def test_sequence_that_cannot_be_admitted_fails_alone(start_engine: EngineFactory, model: Any) -> None:
    """Invalid sampling settings end their own sequence; those submitted with it run."""
    engine = start_engine()
    bad = Generation(engine, prompts(1)[0], repetition_penalty=-1.0)
    good = Generation(engine, prompts(2)[1])

    def submit_both() -> None:
        engine.submit(bad.sequence)
        engine.submit(good.sequence)

    engine.call(submit_both).result(DEADLINE_S)

    assert len(good.wait().tokens) == 12
    assert isinstance(bad.wait().error, InternalError)


def test_cancelled_sequence_leaves_within_one_step(start_engine: EngineFactory, model: Any) -> None:
    """After a cancel no further token is computed, and the last event is the given error."""
    engine = start_engine()
    reached, may_go_on = threading.Event(), threading.Event()
    left = Generation(engine, prompts(1)[0], max_new_tokens=1000)
    stays = Generation(engine, prompts(2)[1], max_new_tokens=8)
    steps_after: list[bool] = []

    def pause(embeds: torch.Tensor, batch: PackedBatch) -> None:
        if len(left.tokens) == 3 and not reached.is_set():
            reached.set()
            assert may_go_on.wait(DEADLINE_S)
        elif reached.is_set():
            steps_after.append(is_in(batch, left.cache))

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
    """Cancelling an ended sequence sends no second end."""
    engine = start_engine()
    generation = Generation(engine, prompts(1)[0], max_new_tokens=2)
    engine.submit(generation.sequence)
    generation.wait()

    engine.cancel(generation.sequence, InternalError("late"))
    engine.call(lambda: None).result(DEADLINE_S)

    assert len(generation.events) == 2


def test_cancel_right_after_submit(start_engine: EngineFactory, model: Any) -> None:
    """A sequence that is cancelled before its first step gets exactly one event."""
    engine = start_engine()
    generation = Generation(engine, prompts(1)[0])

    def both() -> None:
        engine.submit(generation.sequence)
        engine.cancel(generation.sequence, InternalError("gone"))

    engine.call(both).result(DEADLINE_S)

    assert len(generation.wait().events) == 1


def test_deadline_ends_running_and_waiting_sequences(start_engine: EngineFactory, model: Any, clock: Any) -> None:
    """A turn past its deadline gets an error, whether it runs or waits."""
    engine = start_engine(max_rows=1, clock=clock)
    late = Generation(engine, prompts(1)[0], max_new_tokens=1500, deadline=clock.now + 60)
    waiting = Generation(engine, prompts(2)[1], deadline=clock.now + 60)
    patient = Generation(engine, prompts(2)[1])
    for generation in (late, waiting, patient):
        engine.submit(generation.sequence)
    late.wait(num_tokens=2)

    clock.advance(60)

    assert isinstance(late.wait().error, TurnTimedOut)
    assert isinstance(waiting.wait().error, TurnTimedOut)
    assert len(patient.wait().tokens) == 12


def test_engine_thread_survives_its_own_failure(start_engine: EngineFactory, model: Any) -> None:
    """A bug outside the model fails the running sequences, and the next one is served."""
    engine = start_engine()
    broken = Generation(engine, prompts(1)[0])
    original = engine.scheduler.next_batch

    def fail_once() -> Any:
        engine.scheduler.next_batch = original
        raise KeyError("scheduler")

    engine.scheduler.next_batch = fail_once
    engine.submit(broken.sequence)

    assert isinstance(broken.wait().error, InternalError)
    assert len(alone(engine, prompts(1)[0])) == 12


def test_call_runs_on_the_engine_thread_and_returns_errors(start_engine: EngineFactory) -> None:
    """The caller gets the result or the exception; the thread continues."""
    engine = start_engine()

    assert engine.call(lambda: threading.current_thread().name).result(DEADLINE_S) == "engine"
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0).result(DEADLINE_S)


def test_image_that_does_not_fit_the_device_is_out_of_memory(start_engine: EngineFactory, model: Any) -> None:
    """An out-of-memory error of the vision tower is a 507."""

    def no_memory(pixels: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.encode_image = no_memory

    with pytest.raises(OutOfMemory):
        start_engine().encode_image(torch.zeros(1, 3, 96, 96))


def test_image_that_does_not_fit_the_device_leaves_no_memory_behind(start_engine: EngineFactory, model: Any) -> None:
    """The tensors of a failed encoding are freed at once, not when Python looks for cycles."""
    engine = start_engine()
    kept: list[weakref.ref[torch.Tensor]] = []

    def no_memory(pixels: torch.Tensor) -> torch.Tensor:
        half_done = torch.ones(4)
        kept.append(weakref.ref(half_done))
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.encode_image = no_memory
    gc.disable()
    try:
        with pytest.raises(OutOfMemory):
            engine.encode_image(torch.zeros(1, 3, 96, 96))
        assert [tensor() for tensor in kept] == [None]
    finally:
        gc.enable()


# Shared memory


def blocks(*numbers: int) -> list[int]:
    """Return a prompt of one whole block for each number, followed by the number 9."""
    return [10 + (7 * n + i) % 200 for n in numbers for i in range(BLOCK)] + [9]


def test_sequences_that_run_share_their_beginning(start_engine: EngineFactory) -> None:
    """A prompt that begins like a running sequence's computes only the rest, and answers the same."""
    engine = start_engine()
    common = blocks(1, 2, 3)[:-1]
    texts = [[*common, *tail] for tail in ([20], [21, 22], [20], list(range(30, 60)))]
    expected = [alone(engine, text, max_new_tokens=40) for text in texts]

    generations = []
    for text in texts:
        generation = Generation(engine, text, max_new_tokens=40)
        generations.append(generation)
        engine.submit(generation.sequence)
        generation.wait(num_tokens=3)

    assert [generation.kept for generation in generations] == [0, 48, 48, 48]
    assert [generation.wait().tokens for generation in generations] == expected


def test_images_are_shared_by_key_only(start_engine: EngineFactory, model: Any) -> None:
    """Positions of the same image key are shared; another key answers as if alone."""
    engine = start_engine()
    num, size = 3 * BLOCK, model.embed(torch.tensor([0])).shape[1]
    features = [torch.randn(num, size, generator=torch.Generator().manual_seed(i)) * 3 for i in range(2)]
    texts = [[1, 50, *[-1 - i] * num, 60, 61] for i in range(2)]
    spans = [[PlacedImage(2, f)] for f in features]
    expected = [alone(engine, t, images=i) for t, i in zip(texts, spans, strict=True)]

    kept, found = [], []
    for i in (0, 1, 0, 1):
        generation = Generation(engine, texts[i], images=spans[i])
        engine.submit(generation.sequence)
        kept.append(generation.kept)
        found.append(generation.wait().tokens)

    assert expected[0] != expected[1]
    assert found == expected * 2
    assert kept == [0, 0, 48, 48]


@pytest.mark.parametrize("is_row_batched", [False, True])
def test_scattered_blocks_equal_a_run(start_engine: EngineFactory, is_row_batched: bool) -> None:
    """A sequence's answer does not depend on where its blocks are, with either attention."""
    texts = prompts(5)
    expected = [alone(start_engine(), text, max_new_tokens=20) for text in texts]
    engine = start_engine(num_tokens=64 * BLOCK, is_row_batched=is_row_batched)
    pool = engine.runner.pool
    pool.storage.fill_(float("nan"))  # unwritten memory must not be read
    fillers = [SequenceCache(pool) for _ in range(64)]
    for filler in fillers:
        filler.reserve(BLOCK)
    for filler in [f for f in fillers if f.table[0] % 2]:
        filler.drop()

    generations = [Generation(engine, text, max_new_tokens=20) for text in texts]
    for generation in generations:
        engine.submit(generation.sequence)
    found = [generation.wait().tokens for generation in generations]
    for filler in fillers:
        filler.drop()

    assert found == expected
    assert [generation.cache.run is None for generation in generations] == [len(t) + 19 > BLOCK for t in texts]


def test_one_call_for_all_rows_equals_one_call_a_row(start_engine: EngineFactory) -> None:
    """The GPU's joint attention gives the answers of the CPU's, while rows join and leave."""
    texts, lengths = prompts(9), [5 + 4 * (i % 4) for i in range(9)]
    found = []
    for is_row_batched in (False, True):
        engine = start_engine(max_rows=4, prefill_chunk=16, is_row_batched=is_row_batched)
        generations = [Generation(engine, t, max_new_tokens=n) for t, n in zip(texts, lengths, strict=True)]
        for generation in generations:
            engine.submit(generation.sequence)
        found.append([generation.wait().tokens for generation in generations])

    assert found[0] == found[1]


def test_short_prompts_in_rows_are_answered_as_in_steps_of_their_own(start_engine: EngineFactory) -> None:
    """Prompts of 1 to 16 tokens run as rows beside answers; longer ones take the usual path. Answers do not change."""
    texts = [prompt[: 1 + 5 * (i % 4)] for i, prompt in enumerate(prompts(9))]
    found = []
    for has_prompt_rows in (False, True):
        engine = start_engine(max_rows=16, is_row_batched=True, has_prompt_rows=has_prompt_rows)
        model = engine.runner.model
        with patch.object(model, "forward", wraps=model.forward) as forward:
            generations = [Generation(engine, text, max_new_tokens=6) for text in texts]
            for generation in generations:
                engine.submit(generation.sequence)
            answers = [generation.wait().tokens for generation in generations]
            for generation, text in zip(generations, texts, strict=True):
                follow_up = Generation(engine, [*text, *generation.tokens, 30, 31, 32], cache=generation.cache)
                engine.submit(follow_up.sequence)
                answers.append(follow_up.wait().tokens)
        found.append(answers)
        steps = [call.args for call in forward.call_args_list]
        sizes = [len(positions) for _, positions, batch, _ in steps if batch.shares]
        assert min(sizes, default=17) > 16 if has_prompt_rows else min(sizes) < 16

    assert found[0] == found[1]


def test_cache_evicted_between_turns_is_computed_again(still_engine: EngineFactory) -> None:
    """A conversation whose blocks were evicted gets the same next answer."""
    engine = still_engine(num_tokens=6 * BLOCK)
    question = blocks(1, 2)
    first = Generation(engine, question)
    admit(engine, first)
    run_to_the_end(engine)
    longer = [*question, *first.tokens, 30, 31]
    kept = Generation(engine, longer, cache=first.cache)
    admit(engine, kept)
    run_to_the_end(engine)

    crowd = Generation(engine, blocks(4, 5, 6, 7))
    admit(engine, crowd)
    run_to_the_end(engine)
    again = Generation(engine, longer, cache=first.cache)
    admit(engine, again)
    run_to_the_end(engine)

    assert (kept.kept, again.kept) == (len(question) + 11, 0)
    assert engine.runner.pool.num_evicted > 0
    assert again.tokens == kept.tokens


def test_sequence_without_room_waits_for_those_that_run(still_engine: EngineFactory) -> None:
    """Sequences wait in order: also a smaller one waits behind one that does not fit."""
    engine = still_engine(num_tokens=8 * BLOCK)
    running = Generation(engine, blocks(1, 2, 3, 4))
    large = Generation(engine, blocks(5, 6, 7, 8))
    small = Generation(engine, [20, 21], max_new_tokens=2)
    admit(engine, running, large, small)

    for _ in range(12):
        engine.step()
        assert list(engine.scheduler.waiting) == [large.sequence, small.sequence]
    assert running.is_over
    run_to_the_end(engine)

    assert [len(generation.tokens) for generation in (running, large, small)] == [12, 12, 2]


def test_reader_is_woken_once_per_step_for_all_its_rows(still_engine: EngineFactory) -> None:
    """The wake-up follows the last event of the step."""
    wakes: list[list[int]] = []
    engine = still_engine(prefill_chunk=16)
    generations: list[Generation] = []

    def wake() -> None:
        wakes.append([len(generation.tokens) for generation in generations])

    generations += [Generation(engine, prompt, 3, wake=wake) for prompt in prompts(2)]
    admit(engine, *generations)
    run_to_the_end(engine)

    assert wakes == [[1, 0], [2, 1], [3, 2], [3, 3]]


def test_newest_waiting_sequence_gives_way_when_nothing_runs(still_engine: EngineFactory) -> None:
    """If waiting sequences hold all memory, the newest ends with OutOfMemory until the oldest can run."""
    engine = still_engine(num_tokens=8 * BLOCK)
    caches = []
    for number in (1, 2, 3):
        turn = Generation(engine, blocks(number, number), max_new_tokens=1)
        admit(engine, turn)
        run_to_the_end(engine)
        caches.append(turn.cache)
        turn.cache.truncate(2 * BLOCK)
    turns = [
        Generation(engine, blocks(n, n, n + 5, n + 6, n + 7), cache=c) for n, c in zip((1, 2, 3), caches, strict=True)
    ]
    assert [turn.kept for turn in turns] == [2 * BLOCK] * 3

    admit(engine, *turns)
    run_to_the_end(engine)

    assert [len(turn.tokens) for turn in turns] == [12, 12, 0]
    assert isinstance(turns[2].error, OutOfMemory)


@pytest.mark.parametrize("is_row_batched", [False, True])
def test_sequence_that_can_never_fit_ends_at_once(still_engine: EngineFactory, is_row_batched: bool) -> None:
    """A sequence that can never fit gets an error, and other waiting sequences keep their blocks.

    One may take all positions, however the engine computes its steps.
    """
    engine = still_engine(num_tokens=4 * BLOCK, is_row_batched=is_row_batched)
    other = Generation(engine, blocks(2))
    huge = Generation(engine, blocks(1), max_new_tokens=3 * BLOCK + 1)
    fits = Generation(engine, blocks(1), max_new_tokens=3 * BLOCK)
    admit(engine, huge, other, fits)

    assert isinstance(huge.error, OutOfMemory)
    run_to_the_end(engine)
    assert [len(generation.tokens) for generation in (huge, other, fits)] == [0, 12, 3 * BLOCK]


def test_deadline_and_cancel_reach_those_without_room(still_engine: EngineFactory, clock: Any) -> None:
    """A sequence that waits for memory can be ended, and the next one takes its place."""
    engine = still_engine(num_tokens=4 * BLOCK, clock=clock)
    running = Generation(engine, blocks(1, 2), max_new_tokens=30)
    late = Generation(engine, blocks(3, 4), deadline=clock.now + 60)
    cancelled = Generation(engine, blocks(5, 6))
    patient = Generation(engine, blocks(7, 8))
    admit(engine, running, late, cancelled, patient)
    engine.step()
    assert list(engine.scheduler.waiting) == [late.sequence, cancelled.sequence, patient.sequence]

    clock.advance(60)
    engine.step()
    assert isinstance(late.error, TurnTimedOut)
    why = InternalError("gone")
    engine.finish(cancelled.sequence, why)
    assert cancelled.error is why
    run_to_the_end(engine)

    assert [len(generation.tokens) for generation in (running, late, cancelled, patient)] == [30, 0, 0, 12]


def test_nothing_of_a_failed_sequence_is_used_again(still_engine: EngineFactory, model: Any) -> None:
    """Blocks of a failed sequence may be faulty, so the same question is computed from the beginning."""
    engine = still_engine()
    bad = Generation(engine, blocks(1, 2))
    model.after_step = lambda logits: logits * float("nan")
    admit(engine, bad)
    run_to_the_end(engine)
    model.after_step = lambda logits: logits

    again = Generation(engine, blocks(1, 2), cache=bad.cache)
    admit(engine, again)
    run_to_the_end(engine)

    assert isinstance(bad.error, InternalError)
    assert (again.kept, len(again.tokens)) == (0, 12)


def test_threads_share_and_evict_while_the_engine_runs(start_engine: EngineFactory) -> None:
    """Conversations on four threads with too little memory get the answers that each gets alone."""
    engine = start_engine(num_tokens=24 * BLOCK)  # memory for four without sharing, but not for what eight leave
    common = blocks(1, 2)[:-1]
    texts = [[*common, 20 + i, *blocks(i, i + 8, i + 16)] for i in range(8)]
    expected = [alone(engine, text, max_new_tokens=8) for text in texts]

    def converse(number: int) -> list[tuple[int, list[int]]]:
        found, caches = [], [SequenceCache(engine.runner.pool) for _ in range(2)]
        for i in range(10):
            which = (i * (1 + number % 3) + number) % 8
            generation = Generation(engine, texts[which], max_new_tokens=8, cache=caches[i % 2])
            engine.submit(generation.sequence)
            found.append((which, generation.wait().tokens))
            if i % 5 == number:
                caches[i % 2].drop()
        return found

    with ThreadPoolExecutor(4) as executor:
        found = [answer for answers in executor.map(converse, range(4)) for answer in answers]

    assert [tokens for _, tokens in found] == [expected[which] for which, _ in found]
    assert engine.runner.pool.num_evicted > 0


# The device


def test_lost_device_is_reported(still_engine: EngineFactory, model: Any) -> None:
    """If even an addition fails after a failure, the loss is reported, once per step."""
    lost: list[bool] = []
    engine = still_engine(on_device_lost=lambda: lost.append(True))
    generations = [Generation(engine, prompt) for prompt in prompts(3)]

    def lose(embeds: torch.Tensor, batch: PackedBatch) -> None:
        model.device = torch.device("meta")  # nothing can be read from it
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    model.before_step = lose
    admit(engine, *generations)
    run_to_the_end(engine)

    assert lost == [True]
    assert [type(generation.error) for generation in generations] == [InternalError] * 3


@pytest.mark.parametrize("failure", [RuntimeError("shape"), torch.OutOfMemoryError("CUDA out of memory")])
def test_failure_on_a_sound_device_is_no_loss(still_engine: EngineFactory, model: Any, failure: Exception) -> None:
    """The worker continues after an error of one sequence."""
    lost: list[bool] = []
    engine = still_engine(on_device_lost=lambda: lost.append(True))
    generation = Generation(engine, prompts(1)[0])

    def fail(embeds: torch.Tensor, batch: PackedBatch) -> None:
        raise failure

    model.before_step = fail
    admit(engine, generation)
    run_to_the_end(engine)

    assert generation.error is not None
    assert not lost


@pytest.mark.parametrize("is_row_batched", [False, True])
def test_step_without_memory_is_repeated_in_halves(
    still_engine: EngineFactory, model: Any, caplog: pytest.LogCaptureFixture, is_row_batched: bool
) -> None:
    """After a step without memory all rows go on, the log says why, and the next prompts are read in smaller chunks."""
    engine = still_engine(is_row_batched=is_row_batched, prefill_chunk=64)
    texts = prompts(4)
    expected = []
    for text in texts:
        generation = Generation(engine, text)
        admit(engine, generation)
        run_to_the_end(engine)
        expected.append(generation.tokens)

    def fail_large_steps(embeds: torch.Tensor, batch: PackedBatch) -> None:
        if len(embeds) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    generations = [Generation(engine, text) for text in texts]
    admit(engine, *generations)
    while any(generation.sequence.is_prefilling for generation in generations):
        engine.step()
    model.before_step = fail_large_steps
    engine.step()
    model.before_step = lambda embeds, batch: None
    run_to_the_end(engine)

    assert [generation.tokens for generation in generations] == expected
    assert engine.scheduler.pace.max_chunk < 64
    assert "device out of memory in a step" in caplog.text


def test_a_prompt_that_fits_beside_fewer_rows_is_read_in_half_chunks(still_engine: EngineFactory, model: Any) -> None:
    """The parts of a step without memory are repeated with the same prompt tokens, so they do not halve them again."""
    engine = still_engine(prefill_chunk=64)
    rows = [Generation(engine, text) for text in prompts(7)]
    admit(engine, *rows)
    while any(row.sequence.is_prefilling for row in rows):
        engine.step()
    sizes: list[int] = []

    def fail_large_steps(embeds: torch.Tensor, batch: PackedBatch) -> None:
        sizes.append(len(embeds))
        if len(embeds) > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.before_step = fail_large_steps
    generation = Generation(engine, blocks(1, 2, 3, 4, 5, 6))
    admit(engine, generation)
    engine.step()

    assert sizes == [71, 4, 67, 2, 65, 1, 64]
    assert engine.scheduler.pace.max_chunk == 32
    run_to_the_end(engine)
    assert generation.error is None


def test_long_prompt_without_memory_is_read_in_smaller_chunks(still_engine: EngineFactory, model: Any) -> None:
    """A single prompt that exceeds the memory is read in smaller chunks; a failed step does not change the pace."""
    engine = still_engine(prefill_chunk=64)
    text = blocks(1, 2, 3)
    expected = Generation(engine, text)
    admit(engine, expected)
    run_to_the_end(engine)
    expected.cache.drop()
    sizes: list[int] = []

    def fail_large_steps(embeds: torch.Tensor, batch: PackedBatch) -> None:
        sizes.append(len(embeds))
        if len(embeds) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.before_step = fail_large_steps
    generation = Generation(engine, text)
    admit(engine, generation)
    run_to_the_end(engine)

    assert generation.tokens == expected.tokens
    assert sizes[:2] == [len(text), len(text) // 2]
    assert engine.scheduler.pace.max_chunk <= 32


def test_failure_that_shows_when_results_are_read_leaves_no_trace(still_engine: EngineFactory, model: Any) -> None:
    """An error that a device reports only when results are read leaves nothing of the step in the cache."""
    engine = still_engine()
    generation = Generation(engine, prompts(1)[0])
    admit(engine, generation)
    engine.step()
    length = generation.cache.length
    lengths: list[int] = []

    def spoil(logits: torch.Tensor) -> torch.Tensor:
        lengths.append(generation.cache.length)
        return logits[:, :0]  # which has no largest one

    model.after_step = spoil
    engine.step()

    assert lengths == [length]
    assert isinstance(generation.error, InternalError)


def test_kv_cache_is_freed_when_the_engine_stops(model: Any) -> None:
    """The cache's memory is freed although others still refer to the engine and its pool."""
    engine = make_engine(model)
    engine.start()
    pool = engine.runner.pool
    assert pool.storage.nbytes == pool.capacity_bytes

    engine.stop()

    assert pool.storage.nbytes == 0


def test_rows_that_join_and_leave_write_to_their_own_blocks(still_engine: EngineFactory) -> None:
    """Rows without a sequence, which fill a step to its fixed size, write to no stored block."""
    engine = still_engine(max_rows=8, is_row_batched=True, num_tokens=64 * BLOCK)
    texts = prompts(6)
    expected = []
    for text in texts:
        generation = Generation(engine, text)
        admit(engine, generation)
        run_to_the_end(engine)
        expected.append(generation.tokens)
    stays = Generation(engine, texts[0], max_new_tokens=30)
    admit(engine, stays)
    engine.step()

    for first in range(1, 6):
        generations = [Generation(engine, text) for text in texts[first:]]
        admit(engine, *generations)
        while not all(generation.is_over for generation in generations):
            engine.step()
        assert [generation.tokens for generation in generations] == expected[first:]
    run_to_the_end(engine)

    assert stays.tokens[:12] == expected[0]


def test_calls_take_turns_with_steps(model: Any) -> None:
    """Several queued images delay an answer by at most one of them per step."""
    engine = make_engine(model)
    engine.start()
    generation = Generation(engine, prompts(1)[0], max_new_tokens=1500)
    engine.submit(generation.sequence)
    generation.wait(num_tokens=1)

    calls = engine.call(lambda: [engine.call(lambda: engine.num_steps) for _ in range(4)]).result(30)
    steps = [call.result(30) for call in calls]
    engine.stop()

    assert steps == [steps[0] + i for i in range(4)]


def test_stop_forgets_no_call(model: Any) -> None:
    """Calls made before a stop are completed, so that no caller waits forever."""
    engine = make_engine(model)
    engine.start()
    stopper = threading.Thread(target=engine.stop)
    late: list[Future[int]] = []

    def call_and_stop() -> None:
        late.append(engine.call(lambda: 1))
        stopper.start()
        with suppress(InternalError):  # from the moment of the stop
            while True:
                late.append(engine.call(lambda: 1))

    engine.call(call_and_stop).result(30)
    stopper.join()

    assert [call.result(0) for call in late] == [1] * len(late)


def test_stop_ends_what_runs(model: Any) -> None:
    """A stopping engine ends its sequences with an error, and accepts no others."""
    engine = make_engine(model)
    engine.start()
    generation = Generation(engine, prompts(1)[0], max_new_tokens=1500)
    engine.submit(generation.sequence)
    generation.wait(num_tokens=1)

    engine.stop()

    assert isinstance(generation.error, InternalError)
    check_is_at_rest(engine)
    with pytest.raises(InternalError):
        engine.submit(generation.sequence)
    with pytest.raises(InternalError):
        engine.encode_image(torch.zeros(1, 3, 96, 96))
