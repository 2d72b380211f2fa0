"""The engine's parts without a model: cache, scheduler, detokenizer, sampler."""

from collections.abc import Sequence as ABCSequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from handlers.engine.detokenizer import REPLACEMENT, Detokenizer
from handlers.engine.kv_cache import BLOCK, CacheShape, SequenceCache
from handlers.engine.sampler import Sampler
from handlers.engine.scheduler import Scheduler
from handlers.engine.sequence import SamplingParams, Sequence

SHAPE = CacheShape(num_layers=3, num_kv_heads=2, head_size=4, dtype=torch.float16, device=torch.device("cpu"))
TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "models" / "tiny-llava", local_files_only=True)
CPU = torch.device("cpu")


# Cache


def filled(num_tokens: int) -> SequenceCache:
    """A cache in which each position's keys are its own number and its values the negative."""
    cache = SequenceCache(SHAPE)
    cache.reserve(num_tokens)
    numbers = torch.arange(num_tokens, dtype=torch.float16)[None, None, :, None].expand(1, 2, -1, 4)
    for layer in range(3):
        cache.append(layer, numbers, -numbers)
    cache.advance(list(range(num_tokens)))
    return cache


@pytest.mark.parametrize("num_tokens", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_cache_holds_exactly_the_bytes_of_the_formula(num_tokens: int) -> None:
    """Reserving n positions costs what num_bytes says, whole blocks at a time."""
    cache = SequenceCache(SHAPE)

    cache.reserve(num_tokens)

    blocks = -(-num_tokens // BLOCK)
    assert cache.num_bytes == SHAPE.num_bytes(num_tokens) == 2 * 3 * 2 * 4 * 2 * BLOCK * blocks
    assert cache.capacity == blocks * BLOCK


def test_growing_and_trimming_keep_what_is_stored() -> None:
    """Storage may move; the valid positions are the same afterwards."""
    cache = filled(70)
    expected = torch.arange(70, dtype=torch.float16)

    for resize in (lambda: cache.reserve(500), cache.trim, lambda: cache.reserve(10)):
        resize()
        new = torch.zeros(1, 2, 1, 4, dtype=torch.float16)
        keys, values = cache.append(1, new, new)
        assert torch.equal(keys[0, 0, :70, 0], expected)
        assert torch.equal(values[0, 1, :70, 3], -expected)

    assert cache.num_bytes == SHAPE.num_bytes(70)


def test_append_is_valid_only_after_advance() -> None:
    """A step that failed half way leaves the length as it was, and the next step writes over it."""
    cache = filled(3)
    cache.reserve(5)
    ones = torch.ones(1, 2, 2, 4, dtype=torch.float16)

    cache.append(0, ones, ones)
    assert cache.length == 3
    keys, _ = cache.append(0, ones * 7, ones)
    cache.advance([8, 9])

    assert cache.tokens == [0, 1, 2, 8, 9]
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 7, 7]


def test_truncate_trim_and_drop() -> None:
    """Truncation forgets positions but no memory; trim gives it back; drop gives back everything."""
    cache = filled(200)

    cache.truncate(10)
    assert (cache.length, cache.capacity) == (10, 4 * BLOCK)
    cache.trim()
    assert cache.num_bytes == SHAPE.num_bytes(10)
    cache.truncate(0)
    cache.trim()
    assert cache.num_bytes == 0
    cache.drop()
    assert (cache.length, cache.num_bytes) == (0, 0)


@given(held=st.lists(st.integers(0, 3), max_size=8), tokens=st.lists(st.integers(0, 3), max_size=8))
def test_common_prefix_is_the_longest_one(held: list[int], tokens: list[int]) -> None:
    """As counted one by one."""
    cache = SequenceCache(SHAPE)
    cache.advance(held)

    expected = 0
    while expected < min(len(held), len(tokens)) and held[expected] == tokens[expected]:
        expected += 1

    assert cache.common_prefix(tokens) == expected


# Scheduler


def sequence(num_prompt: int, num_output: int = 0) -> Sequence:
    """A sequence whose output, if any, has all but its last token in the cache."""
    cache = SequenceCache(SHAPE)
    params = SamplingParams(max_new_tokens=100)
    made = Sequence(list(range(num_prompt)), [], cache, params, float("inf"), lambda event: True)
    if num_output:
        made.output = list(range(1000, 1000 + num_output))
        cache.advance(made.prompt + made.output[:-1])
    return made


def run_step(scheduler: Scheduler) -> list[tuple[Sequence, list[int], bool]]:
    """The next batch, computed: prompts advance, and whoever gets a token has it."""
    batch = scheduler.next_batch()
    for work in batch:
        work.sequence.cache.advance(work.tokens)
        if work.is_last:
            work.sequence.output.append(7)
    return [(work.sequence, work.tokens, work.is_last) for work in batch]


def test_nothing_to_do_is_an_empty_batch() -> None:
    """No sequence, no work."""
    assert Scheduler(4, 8).next_batch() == []


def test_decoding_rows_come_first_and_never_wait() -> None:
    """A long prompt takes the prefill budget only; each decoding sequence gets its token in every step."""
    scheduler = Scheduler(8, 4)
    decoding = [sequence(3, 1), sequence(5, 2)]
    for s in (*decoding, sequence(100)):
        scheduler.add(s)

    for _ in range(3):
        step = run_step(scheduler)
        assert [s for s, *_ in step[:2]] == decoding
        assert [len(tokens) for _, tokens, _ in step] == [1, 1, 4]
        assert [is_last for *_, is_last in step] == [True, True, False]


def test_prompts_are_cut_into_chunks() -> None:
    """Chunks add up to the prompt, in order, and only the last one brings a token."""
    scheduler = Scheduler(8, 4)
    scheduler.add(sequence(10))

    steps = [run_step(scheduler)[0] for _ in range(4)]

    assert [tokens for _, tokens, _ in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [7]]
    assert [is_last for *_, is_last in steps] == [False, False, True, True]


def test_prefill_budget_is_shared_oldest_first() -> None:
    """What the oldest prompt leaves of the budget goes to the next."""
    scheduler = Scheduler(8, 8)
    prompts = [sequence(5), sequence(6), sequence(7)]
    for s in prompts:
        scheduler.add(s)

    assert [(s, len(tokens)) for s, tokens, _ in run_step(scheduler)] == [(prompts[0], 5), (prompts[1], 3)]
    assert [(s, len(tokens)) for s, tokens, _ in run_step(scheduler)] == [
        (prompts[0], 1),
        (prompts[1], 3),
        (prompts[2], 5),
    ]


def test_rows_are_limited_first_come_first_served() -> None:
    """Beyond max_rows sequences wait, and the longest waiting one takes a freed row."""
    scheduler = Scheduler(2, 100)
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
    """No token is skipped, none computed twice, and no step is larger than the limits."""
    scheduler = Scheduler(max_rows, chunk)
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


# Detokenizer


def pieces(ids: ABCSequence[int], stop: ABCSequence[str] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(TOKENIZER, stop)
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
    """What was streamed is what the whole answer says."""
    text = "The shape is a red circle, left of a blue square."

    shown, detokenizer = pieces(encode(text))

    assert "".join(shown) == detokenizer.text == text


def test_characters_are_never_halved() -> None:
    """A character of several byte tokens appears when its last byte has come."""
    text = "caf\u00e9 \u4f60\u597d \U0001f600!"
    ids = encode(text)
    assert len(ids) > len(text)  # several tokens to a character

    shown, detokenizer = pieces(ids)

    assert all(REPLACEMENT not in piece for piece in shown)
    assert "".join(shown) == detokenizer.text == text


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    """An answer cut by its length inside a character ends with the replacement character, as a whole decode does."""
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
    """The text stops at the stop string that is complete first, wherever token borders are."""
    text = "The red circle."

    shown, detokenizer = pieces(encode(text), stop)

    expected = text[: min((text.find(s) + len(s), text.find(s)) for s in stop if s in text)[1]]
    assert "".join(shown) == detokenizer.text == expected
    assert detokenizer.is_stopped
    assert detokenizer.push(encode("more")[0]) == ""
    assert detokenizer.finish() == ""


def test_text_that_turns_out_harmless_is_shown_in_the_end() -> None:
    """The beginning of a stop string that does not come is held back, not lost."""
    shown, detokenizer = pieces(encode("a red cir"), ["circle and more"])

    assert shown[-1]
    assert "".join(shown) == detokenizer.text == "a red cir"
    assert not detokenizer.is_stopped


def test_record_separator_never_appears() -> None:
    """0x1E announces an error in a plain stream, so no text may contain it."""
    shown, detokenizer = pieces(encode("a\x1eb"))

    assert "".join(shown) == detokenizer.text == "ab"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab\u00e9\u4f60\U0001f600 .", max_size=30),
    stop=st.lists(st.text(alphabet="ab\u00e9\u4f60 .", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_never_show_whatever_the_text(text: str, stop: list[str]) -> None:
    """Pieces add up to the text before the first stop string, and at no time is a part of a stop string shown."""
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
@given(ids=st.lists(st.integers(0, 507), max_size=30))
def test_any_tokens_stream_to_their_whole_decode(ids: list[int]) -> None:
    """Also broken UTF-8 and special tokens in the middle."""
    shown, detokenizer = pieces(ids)

    expected = TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).replace("\x1e", "")
    assert "".join(shown) == detokenizer.text == expected


# Sampler


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 3


def sampled(num: int = 20, context: tuple[int, ...] = (1, 2), **params: Any) -> list[int]:
    sampler = Sampler(SamplingParams(max_new_tokens=1, **params), CPU)
    return [sampler.choose(logits(i), list(context))[0] for i in range(num)]


GREEDY = [int(logits(i).argmax()) for i in range(20)]


def test_greedy_is_the_largest_logit() -> None:
    """Without sampling there is nothing to draw."""
    assert sampled() == GREEDY
    assert Sampler(SamplingParams(max_new_tokens=1), CPU).is_plain_greedy
    assert not Sampler(SamplingParams(max_new_tokens=1, repetition_penalty=1.1), CPU).is_plain_greedy


def test_seed_reproduces() -> None:
    """The same seed draws the same tokens, another seed other ones, no seed differs each time."""
    one = sampled(do_sample=True, seed=5)

    assert one == sampled(do_sample=True, seed=5)
    assert one != sampled(do_sample=True, seed=6)
    assert sampled(200, do_sample=True) != sampled(200, do_sample=True)


@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-4}, {"typical_p": 0.9, "top_k": 1}]
)
def test_narrow_sampling_is_greedy(params: dict[str, Any]) -> None:
    """Settings that leave one candidate choose the likeliest token."""
    assert sampled(do_sample=True, seed=1, **params) == GREEDY


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    """The smallest temperatures are greedy, with a finite probability."""
    sampler = Sampler(SamplingParams(max_new_tokens=1, do_sample=True, temperature=temperature), CPU)

    token, logprob = sampler.choose(logits() * 1000, [1])

    assert token == int(logits().argmax())
    assert logprob == 0.0


def test_top_k_and_top_p_bound_the_candidates() -> None:
    """Nothing outside the k likeliest, or outside the smallest set with probability p, is drawn."""
    row = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]).log()  # 1/3, 4/15, 1/5, 2/15, 1/15

    def drawn(**params: Any) -> set[int]:
        sampler = Sampler(SamplingParams(max_new_tokens=1, do_sample=True, seed=3, **params), CPU)
        return {sampler.choose(row, [0])[0] for _ in range(200)}

    assert drawn() == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_k=10**30) == {0, 1, 2, 3, 4}
    assert drawn(top_p=0.5) == {0, 1}
    assert drawn(top_p=1.0) == {0, 1, 2, 3, 4}


def test_repetition_penalty_weighs_down_what_was_said() -> None:
    """A token of the context loses against an equal one that is not."""
    row = torch.tensor([2.0, 1.9, -5.0])
    sampler = Sampler(SamplingParams(max_new_tokens=1, repetition_penalty=1.5), CPU)

    assert sampler.choose(row, [0])[0] == 1
    assert sampler.choose(row, [1])[0] == 0
    assert row.tolist() == pytest.approx([2.0, 1.9, -5.0])  # the engine's logits are not touched


def test_logprob_is_that_of_the_warped_distribution() -> None:
    """What is reported is the probability the token was drawn with."""
    row = torch.tensor([1.0, 1.0, 0.0])
    sampler = Sampler(SamplingParams(max_new_tokens=1, do_sample=True, top_k=2, seed=0), CPU)

    _, logprob = sampler.choose(row, [2])

    assert logprob == pytest.approx(-0.6931, abs=1e-3)
