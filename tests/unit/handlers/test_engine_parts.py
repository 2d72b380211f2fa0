"""The engine's parts without a model: scheduler, pace, detokenizer, sampler."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoTokenizer,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.modeling_utils import local_torch_dtype

from handlers.chat.turns.detokenizer import MAX_HELD_TOKENS, REPLACEMENT, Detokenizer
from handlers.engine.builtin.kv_cache import BLOCK, BlockPool, CacheShape, SequenceCache
from handlers.engine.builtin.pace import MIN_CHUNK, Pace, make_pace
from handlers.engine.builtin.sampler import Sampler, choose_tokens
from handlers.engine.builtin.scheduler import Scheduler
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import AnswerRequest, SamplingParams
from handlers.settings.engine import EngineSettings
from torchmoor.wire.held_text import num_held

SHAPE = CacheShape(num_layers=3, num_kv_heads=2, head_size=4, dtype=torch.float16, device=torch.device("cpu"))
TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "models" / "tiny-llava", local_files_only=True)
CPU = torch.device("cpu")


# Scheduler


def new_pool(num_tokens: int) -> BlockPool:
    return BlockPool(SHAPE, SHAPE.num_bytes(num_tokens))


def sequence(
    num_prompt: int, num_output: int = 0, pool: BlockPool | None = None, max_new_tokens: int = 100
) -> TokenSequence:
    """Create a sequence with all but its last token in the cache; it has its own pool unless one is given."""
    cache = SequenceCache(pool or new_pool(num_prompt + max_new_tokens))
    params = SamplingParams(max_new_tokens=max_new_tokens)
    request = AnswerRequest(
        prompt=list(range(num_prompt)), images=[], params=params, deadline=float("inf"), on_event=lambda event: True
    )
    made = TokenSequence(cache, request)
    if num_output:
        made.output = list(range(1000, 1000 + num_output))
        cache.reserve(made.max_tokens)
        cache.advance(made.prompt + made.output[:-1])
    return made


def run_step(scheduler: Scheduler) -> list[tuple[TokenSequence, list[int], bool]]:
    """Simulate the next batch: prompts advance, and rows get their tokens."""
    assert scheduler.admit() is None
    batch = scheduler.next_batch()
    for work in batch:
        work.sequence.cache.advance(work.tokens)
        if work.is_last:
            work.sequence.output.append(7)
    return [(work.sequence, work.tokens, work.is_last) for work in batch]


def new_scheduler(max_rows: int, chunk: int) -> Scheduler:
    """Create a scheduler with the same chunk size in each step."""
    return Scheduler(max_rows, Pace(chunk, 2.0))


def test_nothing_to_do_is_an_empty_batch() -> None:
    """Without sequences the batch is empty."""
    assert new_scheduler(4, 8).admit() is None
    assert new_scheduler(4, 8).next_batch() == []


def test_decoding_rows_come_first_and_never_wait() -> None:
    """Each decoding sequence gets a token in every step; a prompt uses only the prefill budget."""
    scheduler = new_scheduler(8, 4)
    decoding = [sequence(3, 1), sequence(5, 2)]
    for s in (*decoding, sequence(100)):
        scheduler.add(s)

    for _ in range(3):
        step = run_step(scheduler)
        assert [s for s, *_ in step[:2]] == decoding
        assert [len(tokens) for _, tokens, _ in step] == [1, 1, 4]
        assert [is_last for *_, is_last in step] == [True, True, False]


def test_prompts_are_cut_into_chunks() -> None:
    """Chunks cover the prompt in order, and only the last one gives a token."""
    scheduler = new_scheduler(8, 4)
    scheduler.add(sequence(10))

    steps = [run_step(scheduler)[0] for _ in range(4)]

    assert [tokens for _, tokens, _ in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [7]]
    assert [is_last for *_, is_last in steps] == [False, False, True, True]


def test_half_of_the_prefill_budget_is_the_oldest_prompts_the_rest_the_shortest() -> None:
    """Half of the prefill budget goes to the oldest prompt and the rest to the shortest.

    Unused parts go to the others.
    """
    scheduler = new_scheduler(8, 8)
    oldest, middle, short = prompts = [sequence(20), sequence(9), sequence(3)]
    for s in prompts:
        scheduler.add(s)

    assert [(s, len(tokens)) for s, tokens, _ in run_step(scheduler)] == [(oldest, 4), (short, 3), (middle, 1)]
    scheduler.remove(short)
    assert [(s, len(tokens)) for s, tokens, _ in run_step(scheduler)] == [(oldest, 4), (middle, 4)]
    assert [(s, len(tokens)) for s, tokens, _ in run_step(scheduler)] == [(oldest, 4), (middle, 4)]
    scheduler.remove(middle)
    assert [(s, len(tokens)) for s, tokens, _ in run_step(scheduler)] == [(oldest, 8)]


def test_pace_protects_answers_from_prompts_that_come_later_only() -> None:
    """Prompts of a burst are not paced although the first of them decodes; a later prompt is."""
    scheduler = new_scheduler(8, 32)
    scheduler.pace.note(1, 0, 1.0)
    scheduler.pace.note(0, 32, 32.0)  # a prompt token costs as much as a step, so the chunk is the smallest
    first, second = sequence(8), sequence(100)
    for s in (first, second):
        scheduler.add(s)
    run_step(scheduler)
    assert first.output

    assert [len(tokens) for _, tokens, _ in run_step(scheduler)] == [1, 32]
    while second.is_prefilling:
        run_step(scheduler)
    run_step(scheduler)
    scheduler.add(sequence(100))

    assert [len(tokens) for _, tokens, _ in run_step(scheduler)] == [1, 1, MIN_CHUNK]


def test_rows_are_limited_first_come_first_served() -> None:
    """Sequences beyond max_rows wait, and the oldest takes the next free row."""
    scheduler = new_scheduler(2, 100)
    sequences = [sequence(3) for _ in range(4)]
    for s in sequences:
        scheduler.add(s)

    assert [s for s, *_ in run_step(scheduler)] == sequences[:2]
    scheduler.remove(sequences[0])
    assert [s for s, *_ in run_step(scheduler)] == sequences[1:3]
    scheduler.remove(sequences[3])
    scheduler.remove(sequences[3])
    scheduler.remove(sequences[1])
    assert scheduler.all() == [sequences[2]]
    assert repr(scheduler) == "<Scheduler 1 running, 0 waiting>"


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    max_rows=st.integers(1, 4),
    chunk=st.integers(1, 16),
)
def test_every_prompt_is_computed_once_whatever_the_limits(prompts: list[int], max_rows: int, chunk: int) -> None:
    """No token is skipped or computed twice, and no step exceeds the limits."""
    scheduler = new_scheduler(max_rows, chunk)
    sequences = [sequence(n) for n in prompts]
    for s in sequences:
        scheduler.add(s)
    seen: dict[int, list[int]] = {id(s): [] for s in sequences}

    for _ in range(sum(prompts) + 10 * len(prompts)):
        for s, tokens, _ in run_step(scheduler):
            seen[id(s)] += tokens
            if len(s.output) == 2:
                scheduler.remove(s)
        assert len(scheduler.running) <= max_rows

    assert not scheduler.all()
    assert [seen[id(s)][: len(s.prompt)] for s in sequences] == [s.prompt for s in sequences]


def test_sequence_joins_with_room_for_its_whole_answer() -> None:
    """A sequence reserves all its memory when it joins, so that it cannot run out later."""
    pool = new_pool(10 * BLOCK)
    scheduler = new_scheduler(8, 1000)
    first, second = (sequence(BLOCK, pool=pool, max_new_tokens=4 * BLOCK + 1) for _ in range(2))
    scheduler.add(first)
    scheduler.add(second)

    assert scheduler.admit() is None
    assert [s.cache.capacity for s in (first, second)] == [5 * BLOCK, 5 * BLOCK]
    assert pool.num_used == 10


def test_without_room_the_oldest_waits_and_the_others_behind_it() -> None:
    """Waiting sequences keep their order; when running ones have left, they join."""
    pool = new_pool(10 * BLOCK)
    scheduler = new_scheduler(8, 1000)
    runs, large, small = (sequence(n * BLOCK, pool=pool, max_new_tokens=1) for n in (6, 5, 1))
    for s in (runs, large, small):
        scheduler.add(s)

    assert scheduler.admit() is None
    assert (scheduler.running, list(scheduler.waiting)) == ([runs], [large, small])
    scheduler.remove(runs)
    runs.cache.drop()
    assert scheduler.admit() is None
    assert (scheduler.running, list(scheduler.waiting)) == ([large, small], [])


def test_newest_is_named_when_nothing_runs_and_the_oldest_has_no_room() -> None:
    """With no running sequence to wait for, the newest must release its memory, then the next newest."""
    pool = new_pool(10 * BLOCK)
    scheduler = new_scheduler(8, 1000)
    sequences = [sequence(BLOCK, pool=pool, max_new_tokens=9 * BLOCK + 1) for _ in range(3)]
    for s in sequences:
        s.cache.reserve(3 * BLOCK)
        scheduler.add(s)

    for s in reversed(sequences[1:]):
        assert scheduler.admit() is s
        assert scheduler.running == []
        scheduler.remove(s)
        s.cache.drop()
    assert scheduler.admit() is None
    assert scheduler.running == sequences[:1]


# Pace


def measured(step_s: float, token_s: float, max_chunk: int = 512, max_stretch: float = 3.0) -> Pace:
    """Return a pace that has measured step_s per step and token_s per prompt token for a long time."""
    pace = Pace(max_chunk, max_stretch)
    for _ in range(60):
        pace.note(4, 0, step_s)
        pace.note(4, 100, step_s + 100 * token_s)
    return pace


def test_prompts_get_whole_chunks_where_nothing_streams_or_nothing_is_known() -> None:
    """Chunks are whole while no answer streams or before a measurement."""
    assert Pace(512, 3.0).chunk(4) == 512
    assert measured(0.01, 0.001).chunk(0) == 512


def test_chunk_fills_what_the_stretch_leaves() -> None:
    """A step with prompts takes max_stretch times one without."""
    assert measured(0.0105, 0.001, max_stretch=3.0).chunk(4) == 21
    assert measured(0.0505, 0.001, max_stretch=2.0).chunk(4) == 50


def test_launches_that_cost_the_same_for_any_prompt_do_not_shrink_chunks() -> None:
    """A minimum step time keeps chunks large where a step with any prompt costs the same, as 27 ms on an H100."""
    chunks = []
    for least_s in (0.0, 0.05):
        pace = Pace(2048, 1.7, least_s)
        for _ in range(200):
            pace.note(8, 0, 0.0095)
            number = pace.chunk(8)
            pace.note(8, number, 0.027 + number * 30e-6)
        chunks.append(pace.chunk(8))

    assert chunks[0] == MIN_CHUNK
    assert 600 < chunks[1] < 900  # 0.05 s


@pytest.mark.parametrize(
    ("settings", "on_gpu", "chunk"), [({}, False, 512), ({}, True, 2048), ({"prefill_chunk": 100}, True, 100)]
)
def test_chunk_depends_on_the_device(settings: dict[str, int], on_gpu: bool, chunk: int) -> None:
    """The default chunk depends on the device."""
    assert make_pace(EngineSettings(**settings), on_gpu=on_gpu).max_chunk == chunk


def test_chunk_follows_the_device() -> None:
    """Both costs are running means that forget old values."""
    pace = measured(0.01, 0.001)
    for _ in range(60):
        pace.note(4, 0, 0.0501)
        pace.note(4, 50, 0.0501 + 50 * 0.002)

    assert pace.chunk(4) == 50


def test_first_measurement_may_be_a_prompt_alone() -> None:
    """Before any stream, a large prompt's step measures the cost of tokens; a small one's would not."""
    pace = Pace(512, 2.0)
    pace.note(0, MIN_CHUNK - 1, 5.0)
    pace.note(1, 0, 0.1)
    assert pace.chunk(1) == 512

    pace.note(0, 200, 0.2)
    assert pace.chunk(1) == 100


@given(
    steps=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 600), st.floats(0, 100)), max_size=20),
    max_chunk=st.integers(1, 600),
    max_stretch=st.floats(1, 100) | st.just(math.inf),
    num_decoding=st.integers(0, 8),
)
def test_chunk_is_always_within_its_limits(
    steps: list[tuple[int, int, float]], max_chunk: int, max_stretch: float, num_decoding: int
) -> None:
    """The chunk stays between its minimum and maximum, whatever was measured."""
    pace = Pace(max_chunk, max_stretch)
    for step in steps:
        pace.note(*step)

    assert min(MIN_CHUNK, max_chunk) <= pace.chunk(num_decoding) <= max_chunk


# Detokenizer


def pieces(ids: Sequence[int], stop: Sequence[str] = (), min_tokens: int = 0) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(TOKENIZER, stop, min_tokens)
    shown = []
    for token in ids:
        shown.append(detokenizer.push(token))
        if detokenizer.is_stopped:
            return shown, detokenizer
    shown.append(detokenizer.finish())
    return shown, detokenizer


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def test_pieces_add_up_to_the_text() -> None:
    """The streamed pieces equal the whole answer."""
    text = "The shape is a red circle, left of a blue square."

    shown, detokenizer = pieces(encode(text))

    assert "".join(shown) == detokenizer.text == text


def test_characters_are_never_halved() -> None:
    """A character of several byte tokens appears with its last byte."""
    text = "caf\u00e9 \u4f60\u597d \U0001f600!"
    ids = encode(text)
    assert len(ids) > len(text)  # several tokens per character

    shown, detokenizer = pieces(ids)

    assert all(REPLACEMENT not in piece for piece in shown)
    assert "".join(shown) == detokenizer.text == text


class CountingTokenizer:
    """The demo model's tokenizer, which counts the ids that it decodes."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: list[int], **options: bool) -> str:
        self.num_decoded += len(ids)
        return str(TOKENIZER.decode(ids, **options))


@pytest.mark.parametrize("token", [TOKENIZER.convert_tokens_to_ids("\u0122"), TOKENIZER.all_special_ids[0]])
def test_tokens_that_never_become_text_are_not_decoded_again_and_again(token: int) -> None:
    """Tokens that give no text, such as half of a character, are decoded a bounded number of times.

    Later text is whole.
    """
    tokenizer = CountingTokenizer()
    detokenizer = Detokenizer(tokenizer, ())

    shown = [detokenizer.push(each) for each in [token] * 1000 + encode("It is red.")]
    shown.append(detokenizer.finish())

    assert tokenizer.num_decoded < 1000 * 4 * MAX_HELD_TOKENS
    assert "".join(shown) == detokenizer.text
    assert detokenizer.text.endswith("It is red.")
    assert detokenizer.text.count(REPLACEMENT) in (0, 1000)


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    """An answer cut inside a character ends with the replacement character, as in a whole decode."""
    ids = encode("a\U0001f600")[:-1]

    shown, detokenizer = pieces(ids)

    assert "".join(shown) == detokenizer.text == TOKENIZER.decode(ids)
    assert REPLACEMENT in shown[-1]


def test_special_tokens_have_no_text() -> None:
    """End tokens are not shown."""
    shown, detokenizer = pieces([*encode("red"), TOKENIZER.eos_token_id])

    assert "".join(shown) == detokenizer.text == "red"


@pytest.mark.parametrize("stop", [["circle"], ["zzz", "d c"], ["."], ["red circle", "circle"], ["The"]])
def test_answer_ends_before_the_stop_string(stop: list[str]) -> None:
    """The text stops at the stop string that is complete first, across token borders."""
    text = "The red circle."

    shown, detokenizer = pieces(encode(text), stop)

    expected = text[: min((text.find(s) + len(s), text.find(s)) for s in stop if s in text)[1]]
    assert "".join(shown) == detokenizer.text == expected
    assert detokenizer.is_stopped
    assert detokenizer.push(encode("more")[0]) == ""
    assert detokenizer.finish() == ""


def test_text_that_turns_out_harmless_is_shown_in_the_end() -> None:
    """The beginning of a stop string that does not complete is delayed, not lost."""
    shown, detokenizer = pieces(encode("a red cir"), ["circle and more"])

    assert shown[-1]
    assert "".join(shown) == detokenizer.text == "a red cir"
    assert not detokenizer.is_stopped


def test_record_separator_never_appears() -> None:
    """0x1E announces an error in a plain stream, so it never appears in text."""
    shown, detokenizer = pieces(encode("a\x1eb"))

    assert "".join(shown) == detokenizer.text == "ab"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab\u00e9\u4f60\U0001f600 .", max_size=30),
    stop=st.lists(st.text(alphabet="ab\u00e9\u4f60 .", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_never_show_whatever_the_text(text: str, stop: list[str]) -> None:
    """Pieces equal the text before the first stop string, and never contain a part of a stop string."""
    whole = TOKENIZER.decode(encode(text), skip_special_tokens=True)
    cuts = [(whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole]
    expected = whole[: min(cuts)[1]] if cuts else whole

    shown, detokenizer = pieces(encode(text), stop)

    so_far = ""
    for piece in shown:
        so_far += piece
        assert expected.startswith(so_far)
    assert so_far == detokenizer.text == expected
    assert detokenizer.is_stopped is bool(cuts)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab\u00e9\u4f60\U0001f600 .", max_size=30),
    stop=st.lists(st.text(alphabet="ab\u00e9\u4f60 .", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_change_no_text_that_a_token_adds(text: str, stop: list[str]) -> None:
    """A token adds what it adds without stop strings, also if its character has several tokens."""
    plain, stopping = Detokenizer(TOKENIZER, ()), Detokenizer(TOKENIZER, stop)

    for token in encode(text):
        plain.push(token)
        stopping.push(token)
        assert stopping.added == plain.added

    plain.finish()
    stopping.finish()
    assert stopping.added == plain.added


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab\u00e9 .", max_size=20),
    stop=st.lists(st.text(alphabet="ab\u00e9 .", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 30),
)
def test_stop_strings_count_after_the_least_length(text: str, stop: list[str], min_tokens: int) -> None:
    """The text ends before the stop string that ends first, of those that end after the text of these tokens."""
    ids = encode(text)
    whole = pieces(ids)[1].text
    start = len(TOKENIZER.decode(ids[:min_tokens], clean_up_tokenization_spaces=False).rstrip("\ufffd"))
    ends = [end for end in range(start + 1, len(whole) + 1) if whole[:end].endswith(tuple(stop))]
    cuts = [ends[0] - max(len(each) for each in stop if whole[: ends[0]].endswith(each))] if stop and ends else []

    shown, detokenizer = pieces(ids, stop, min_tokens)

    expected = whole[: cuts[0]] if cuts else whole
    assert "".join(shown) == detokenizer.text == expected
    assert detokenizer.is_stopped is bool(cuts)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 507), max_size=30))
def test_any_tokens_stream_to_their_whole_decode(ids: list[int]) -> None:
    """The stream equals the whole decode, also for broken UTF-8 and special tokens in the middle."""
    shown, detokenizer = pieces(ids)

    expected = TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).replace("\x1e", "")
    assert "".join(shown) == detokenizer.text == expected


# Sampler


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 3


def new_sampler(context: tuple[int, ...] = (1, 2), **params: Any) -> Sampler:
    return Sampler(SamplingParams(max_new_tokens=1, **params), context, CPU)


def choose(sampler: Sampler, row: torch.Tensor) -> tuple[int, float]:
    [token], [logprob] = choose_tokens(row[None], [sampler])
    return token, logprob


def sampled(num: int = 20, **params: Any) -> list[int]:
    sampler = new_sampler(**params)
    return [choose(sampler, logits(i))[0] for i in range(num)]


GREEDY = [int(logits(i).argmax()) for i in range(20)]


def test_greedy_is_the_largest_logit() -> None:
    """Without sampling the token with the largest logit is chosen."""
    assert sampled() == GREEDY
    assert new_sampler().is_plain_greedy
    assert not new_sampler(repetition_penalty=1.1).is_plain_greedy


def test_seed_reproduces() -> None:
    """A seed always draws the same tokens, another seed other ones, and no seed differs each time."""
    one = sampled(do_sample=True, seed=5)

    assert one == sampled(do_sample=True, seed=5)
    assert one != sampled(do_sample=True, seed=6)
    assert sampled(200, do_sample=True) != sampled(200, do_sample=True)


@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-4}, {"min_p": 1.0}, {"typical_p": 0.9, "top_k": 1}]
)
def test_narrow_sampling_is_greedy(params: dict[str, Any]) -> None:
    """Settings that leave one candidate choose the likeliest token."""
    assert sampled(do_sample=True, seed=1, **params) == GREEDY


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    """The smallest temperatures are greedy, with a finite probability."""
    token, logprob = choose(new_sampler(do_sample=True, temperature=temperature), logits() * 1000)

    assert token == int(logits().argmax())
    assert logprob == 0.0


def test_top_k_and_top_p_bound_the_candidates() -> None:
    """Only the k likeliest tokens, and the smallest set with probability p, are drawn."""
    row = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]).log()  # 1/3, 4/15, 1/5, 2/15, 1/15

    def drawn(**params: Any) -> set[int]:
        sampler = new_sampler(do_sample=True, seed=3, **params)
        return {choose(sampler, row)[0] for _ in range(200)}

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_k=10**30) == {0, 1, 2, 3, 4}
    assert drawn(top_p=0.5) == {0, 1}
    assert drawn(top_p=1.0) == {0, 1, 2, 3, 4}


def test_min_p_is_a_share_of_the_likeliest_probability() -> None:
    """min_p applies after the temperature and top_p and before typical_p, as in transformers; 0 excludes nothing."""
    row = torch.tensor([8.0, 4.0, 2.0, 1.0]).log()

    def drawn(**params: Any) -> set[int]:
        sampler = new_sampler(do_sample=True, seed=3, **params)
        return {choose(sampler, row)[0] for _ in range(200)}

    assert drawn(min_p=0.0) == {0, 1, 2, 3}
    assert drawn(min_p=0.2) == drawn(min_p=0.2, top_k=3) == {0, 1, 2}
    assert drawn(min_p=0.2, temperature=0.5) == {0, 1}
    assert drawn(min_p=0.2, top_p=0.82) == {0, 1, 2}
    assert drawn(min_p=0.45, typical_p=0.4) == {0}
    assert drawn(min_p=1.0) == {0}


def test_repetition_penalty_weighs_down_what_was_said() -> None:
    """A token of the context is less likely than an equal one that is not."""
    row = torch.tensor([2.0, 1.9, -5.0])

    assert choose(new_sampler((0,), repetition_penalty=1.5), row)[0] == 1
    assert choose(new_sampler((1,), repetition_penalty=1.5), row)[0] == 0
    assert row.tolist() == pytest.approx([2.0, 1.9, -5.0])  # the engine's logits are not changed


def test_penalties_of_the_answer_count_its_tokens() -> None:
    """The presence penalty counts a token of the answer once, the frequency penalty each time; prompts do not count."""
    row = torch.tensor([3.0, 2.0, 1.0])
    never = new_sampler((0, 0, 0), presence_penalty=1.5)
    assert [choose(never, row)[0] for _ in range(5)] == [0, 1, 0, 0, 0]
    often = new_sampler((0, 0, 0), frequency_penalty=0.6)
    assert [choose(often, row)[0] for _ in range(5)] == [0, 0, 1, 0, 1]
    assert choose(new_sampler(frequency_penalty=-1.0), row)[0] == 0
    assert row.tolist() == [3.0, 2.0, 1.0]
    assert not often.is_plain_greedy


def test_a_continued_answer_is_penalized_as_a_whole() -> None:
    """Tokens of the answer that another worker has generated are penalized like its own."""
    params = SamplingParams(max_new_tokens=9, frequency_penalty=0.6, presence_penalty=0.3)
    whole, tokens = Sampler(params, (1, 2), CPU), []
    for step in range(12):
        tokens.append(choose(whole, logits(step))[0])
    rest = Sampler(params, (1, 2, *tokens[:6]), CPU, tokens[:6])

    assert [choose(rest, logits(step))[0] for step in range(6, 12)] == tokens[6:]


def test_a_continued_answer_is_penalized_to_the_bit() -> None:
    """The penalties of an answer do not depend on which of its tokens this worker has generated."""
    params = SamplingParams(max_new_tokens=9, frequency_penalty=0.1, presence_penalty=0.3)
    whole, rest = Sampler(params, (), CPU), Sampler(params, [5] * 7, CPU, [5] * 7)
    for token in [5] * 7:
        whole.note(token)
    rows = torch.zeros(2, 8)

    whole.weigh(rows[0])
    rest.weigh(rows[1])

    assert torch.equal(rows[0], rows[1])


def test_a_bias_moves_logits() -> None:
    """A large bias forces a token, and a large negative one forbids it."""
    row = torch.tensor([3.0, 2.0, 1.0])

    assert choose(new_sampler(logit_bias=((2, 100.0),)), row)[0] == 2
    assert choose(new_sampler(logit_bias=((0, -100.0),)), row)[0] == 1
    assert choose(new_sampler(logit_bias=((0, -0.5), (1, 0.6))), row)[0] == 1


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 0.1}, {"typical_p": 0.9}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e8])
def test_the_least_bias_bans_a_token_and_the_largest_excludes_all_others(
    params: dict[str, Any], temperature: float
) -> None:
    """Neither large logits nor a high temperature outweigh these biases; another bias is only added."""
    row = torch.tensor([300.0, 2.0, -300.0, 1.0])
    params = {**params, "temperature": temperature or 1.0, "do_sample": temperature > 0}

    def drawn(*biases: tuple[int, float]) -> set[int]:
        samplers = [new_sampler(logit_bias=biases, seed=seed, **params) for seed in range(40)]
        batched, logprobs = choose_tokens(row.repeat(40, 1), samplers)
        alone = [choose(new_sampler(logit_bias=biases, seed=seed, **params), row) for seed in range(40)]
        assert list(zip(batched, logprobs, strict=True)) == alone
        assert all(math.isfinite(logprob) for logprob in logprobs)
        return set(batched)

    assert drawn((0, -100.0)) <= {1, 2, 3}
    assert drawn((2, 100.0)) == {2}
    assert drawn((2, 100.0), (1, 100.0)) <= {1, 2}
    assert drawn((0, -100.0), (1, -100.0), (2, -100.0)) == {3}
    assert drawn((0, -99.0)) >= {0}


def test_an_excluded_token_is_chosen_if_no_other_is_allowed() -> None:
    """Then the likeliest of them is, as without the exclusion."""
    row = torch.tensor([1.0, 3.0, 2.0])

    assert choose(new_sampler(logit_bias=tuple((token, -100.0) for token in range(3))), row)[0] == 1
    ending = Sampler(SamplingParams(max_new_tokens=9, min_tokens=1, logit_bias=((0, 100.0),)), (), CPU, (), {0})
    assert [choose(ending, row)[0] for _ in range(2)] == [1, 0]


def test_penalties_and_biases_are_exact_while_a_model_is_made() -> None:
    """Meanwhile transformers sets another type of floats for the whole process."""
    params: dict[str, Any] = {"frequency_penalty": 0.3, "presence_penalty": 0.7, "logit_bias": ((2, 0.3),)}
    row = torch.tensor([1.001, 0.0005, -0.3])

    with local_torch_dtype(torch.bfloat16):
        sampler = new_sampler(**params)
        found = [choose(sampler, row)[0] for _ in range(4)]

    again = new_sampler(**params)
    assert found == [choose(again, row)[0] for _ in range(4)] == [0, 0, 1, 2]


@pytest.mark.parametrize("params", [{}, {"do_sample": True, "seed": 1}, {"repetition_penalty": 2.0}], ids=str)
def test_end_tokens_are_excluded_for_the_least_length(params: dict[str, Any]) -> None:
    """The end tokens are chosen after that many tokens of the answer, with those that another worker has generated."""
    row = torch.tensor([1.0, 90.0, 0.0, 99.0])

    def chosen(answer: tuple[int, ...], number: int) -> list[bool]:
        sampler = Sampler(SamplingParams(max_new_tokens=9, min_tokens=3, **params), answer, CPU, answer, {1, 3})
        return [choose(sampler, row)[0] in (1, 3) for _ in range(number)]

    assert chosen((), 5) == [False, False, False, True, True]
    assert chosen((0, 2), 3) == [False, True, True]
    assert row.tolist() == [1.0, 90.0, 0.0, 99.0]
    assert new_sampler(min_tokens=0).is_plain_greedy


def test_logprob_is_that_of_the_warped_distribution() -> None:
    """The reported probability is the one that the token was drawn with."""
    row = torch.tensor([1.0, 1.0, 0.0])

    _, logprob = choose(new_sampler(do_sample=True, top_k=2, seed=0), row)

    assert logprob == pytest.approx(-0.6931, abs=1e-3)


class Numbers:
    """Stands in for a row's random numbers: the middles of `count` equal parts of 0 to 1."""

    def __init__(self, count: int) -> None:
        self._numbers = iter([(i + 0.5) / count for i in range(count)])

    def random(self) -> float:
        return next(self._numbers)


def warp(row: torch.Tensor, context: list[int], params: SamplingParams) -> torch.Tensor:
    """Return the probabilities by transformers' processors."""
    processors = LogitsProcessorList()
    if params.repetition_penalty is not None:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k is not None:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p is not None:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p is not None:
        processors.append(MinPLogitsWarper(params.min_p))
    if params.typical_p is not None:
        processors.append(TypicalLogitsWarper(params.typical_p))
    ids: Any = torch.tensor([context])
    warped: torch.Tensor = processors(ids, row[None].double()).softmax(dim=-1)[0]
    return warped


ROWS = st.lists(
    st.builds(
        SamplingParams,
        max_new_tokens=st.just(9),
        do_sample=st.booleans(),
        temperature=st.sampled_from([0.3, 0.7, 1.0, 9.0]),
        top_k=st.sampled_from([None, 1, 5, 40, 1000]),
        top_p=st.sampled_from([None, 0.1, 0.9, 0.99]),
        min_p=st.sampled_from([None, None, 0.0, 0.05, 0.3]),
        typical_p=st.sampled_from([None, None, 0.5]),
        repetition_penalty=st.sampled_from([None, 0.8, 1.3]),
        frequency_penalty=st.sampled_from([None, None, 0.7]),
        presence_penalty=st.sampled_from([None, None, -1.2]),
        logit_bias=st.sampled_from([(), (), ((7, 3.0), (8, -100.0))]),
        seed=st.integers(0, 99),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, logits_seed=st.integers(0, 2**31))
def test_tokens_are_drawn_with_the_probabilities_of_transformers(rows: list[SamplingParams], logits_seed: int) -> None:
    """Evenly spread numbers choose each token as often as transformers' warpers make it likely."""
    params = dataclasses.replace(rows[0], do_sample=True, frequency_penalty=None, presence_penalty=None, logit_bias=())
    row = torch.randn(60, generator=torch.Generator().manual_seed(logits_seed)) * 3
    expected = warp(row, [3, 3, 59], params)
    count = 500
    numbers: Any = Numbers(count)
    samplers = [Sampler(params, (-1, 3, 3, 59), CPU) for _ in range(count)]
    for sampler in samplers:
        sampler.random = numbers

    tokens, logprobs = choose_tokens(row.repeat(count, 1), samplers)

    drawn = Counter(tokens)
    for token, logprob in set(zip(tokens, logprobs, strict=True)):
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-3)
    assert all(abs(drawn[token] - count * float(expected[token])) <= 2 for token in range(60))


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the number of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("vocabulary", [480, 50_257])
@settings(max_examples=20, deadline=None)
@given(rows=ROWS, logits_seed=st.integers(0, 2**31), spread=st.sampled_from([0.1, 3.0, 9.0]))
def test_rows_sampled_together_are_sampled_as_alone(
    vocabulary: int, rows: list[SamplingParams], logits_seed: int, spread: float
) -> None:
    """Tokens and log probabilities of a seed do not depend on the other rows, step after step."""
    noise = torch.Generator().manual_seed(logits_seed)
    contexts = [(-1, row, 7, 7, vocabulary - 1) for row in range(len(rows))]
    together = [Sampler(params, context, CPU) for params, context in zip(rows, contexts, strict=True)]
    alone = [Sampler(params, context, CPU) for params, context in zip(rows, contexts, strict=True)]
    for _ in range(3):
        step = torch.randn(len(rows), vocabulary, generator=noise) * spread
        before = step.clone()

        tokens, logprobs = choose_tokens(step, together)

        chosen = [choose(sampler, row) for sampler, row in zip(alone, step, strict=True)]
        assert list(zip(tokens, logprobs, strict=True)) == chosen
        assert torch.equal(step, before)


@given(st.text("abx", max_size=12), st.text("abx", min_size=1, max_size=6))
def test_the_longest_beginning_of_a_mark_is_held(text: str, mark: str) -> None:
    """The longest possible beginning of a mark is held back, but never a whole mark, which is found before."""
    assert num_held(text, mark) == max(n for n in range(len(mark)) if text.endswith(mark[:n]))
