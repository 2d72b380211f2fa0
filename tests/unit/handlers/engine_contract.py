"""Test the contract of engines: a class for each engine inherits these tests.

They use engines only through `handlers/engine/contract.py`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from handlers.engine.contract import (
    Adapter,
    AnswerRequest,
    Cancel,
    ChatEngine,
    FinishReason,
    GrammarText,
    ImageFeatures,
    PlacedImage,
    SamplingParams,
    TokenEvent,
)
from handlers.errors import HandlerError, InternalError, ModelBroken, TurnTimedOut
from handlers.models.prompt_format import PromptFormat
from scripts.make_adapters import make_adapters
from tests.torchserve.drawings import draw_image
from tests.unit.handlers.merged import add_adapter
from tests.waiting import DEADLINE_S, wait_until

QUESTION = "What do you see in this picture, and where is it? Please say its shape and its colour. " * 4

Question = str | Sequence[dict[str, Any]]  # the text of one question, or a conversation
Pictures = Image.Image | Sequence[Image.Image] | None


class Asked:
    """An answer in progress, with its events."""

    def __init__(self, is_enough: Callable[[int], bool]) -> None:
        self.events: list[TokenEvent] = []
        self.num_wakes = 0
        self.cancel: Cancel = lambda error: None
        self._is_enough = is_enough
        self._changed = threading.Condition()

    def on_event(self, event: TokenEvent) -> bool:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        return not self._is_enough(len(self.events))

    def wake(self) -> None:
        self.num_wakes += 1

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if event.token_id is not None]

    @property
    def is_over(self) -> bool:
        last = self.events[-1] if self.events else TokenEvent(0)
        return last.token_id is None or last.finish_reason is not None or self._is_enough(len(self.events))

    def wait(self, num_events: int = 1_000_000) -> "Asked":
        """Wait for the end, or for this many events."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.is_over or len(self.events) >= num_events, DEADLINE_S)
        return self


@dataclass(slots=True)
class Contender:
    """An engine under test.

    reference: transformers' own model of the same checkpoint, in float32. checkpoint: for which adapters are made.
    """

    engine: ChatEngine
    prompts: PromptFormat
    reference: Any
    processor: Any = None
    checkpoint: Path = Path()
    _keys: Any = field(default_factory=lambda: count(1))

    def ask(
        self,
        text: Question,
        picture: Pictures = None,
        *,
        scope: str = "",
        given: Sequence[int] = (),
        adapter: Adapter | None = None,
        within_s: float = DEADLINE_S,
        is_enough: Callable[[int], bool] = lambda number: False,
        **params: Any,
    ) -> Asked:
        """Begin an answer to a question. By default each question has a scope of its own."""
        cache = self.engine.pool.open(scope or f"scope-{next(self._keys)}")
        pictures = _listed(picture)
        encoded = [self.engine.encode(each) for each in pictures]
        keys, placed = place(self.prompts, _messages(text, pictures), encoded, self._keys)
        cache.match(keys, "" if adapter is None else adapter.version)
        asked = Asked(is_enough)
        asked.cancel = self.engine.submit(
            cache,
            AnswerRequest(
                prompt=keys,
                images=placed,
                params=SamplingParams(**{"max_new_tokens": 16, **params}),
                deadline=time.monotonic() + within_s,
                on_event=asked.on_event,
                wake=asked.wake,
                given=given,
                adapter=adapter,
            ),
        )
        return asked

    def answer(self, text: Question, picture: Pictures = None, **options: Any) -> list[int]:
        asked = self.ask(text, picture, **options).wait()
        assert asked.events[-1].error is None, asked.events[-1].error
        return asked.tokens

    def generate(self, text: Question, picture: Pictures, num: int, **options: Any) -> list[int]:
        """Return transformers' greedy answer."""
        inputs = self._inputs(text, picture)
        with torch.inference_mode():
            output = self.reference.generate(**inputs, do_sample=False, max_new_tokens=num, **options)
        return output[0, inputs["input_ids"].shape[1] :].tolist()

    def logprobs(self, text: str, picture: Image.Image | None) -> torch.Tensor:
        """Return transformers' log probabilities of the first token, (vocabulary,)."""
        with torch.inference_mode():
            return self.reference(**self._inputs(text, picture)).logits[0, -1].log_softmax(dim=-1)

    def _inputs(self, text: Question, picture: Pictures) -> Any:
        pictures = _listed(picture)
        if not pictures:
            ids = torch.tensor([self.prompts.render(_messages(text, []), [])])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        rendered = self.prompts.template.render(_messages(text, pictures), ())
        return self.processor(text=rendered, images=pictures, return_tensors="pt")


def place(
    prompts: PromptFormat, messages: Sequence[dict[str, Any]], pictures: Sequence[ImageFeatures], keys: Iterator[int]
) -> tuple[list[int], list[PlacedImage]]:
    """Return the keys of a conversation's positions, and its images; each image gets a key of its own."""
    prompt = prompts.render(messages, [len(features) for features in pictures])
    placed: list[PlacedImage] = []
    for features in pictures:
        assert prompts.image_token_id is not None
        start = prompt.index(prompts.image_token_id)
        prompt[start : start + len(features)] = [-next(keys)] * len(features)
        placed.append(PlacedImage(start, features))
    return prompt, placed


def _listed(picture: Pictures) -> list[Image.Image]:
    return [picture] if isinstance(picture, Image.Image) else list(picture or ())


def _messages(text: Question, pictures: Sequence[Image.Image]) -> list[dict[str, Any]]:
    if not isinstance(text, str):
        return list(text)
    return [{"role": "user", "content": [*[{"type": "image"}] * len(pictures), {"type": "text", "text": text}]}]


class EngineContract:
    """The tests. A subclass has the class-scoped fixture `contender`, and says whether its checkpoint can see."""

    can_see = True

    @pytest.fixture
    def red(self) -> Image.Image | None:
        return draw_image("ellipse", "red") if self.can_see else None

    @pytest.fixture
    def blue(self) -> Image.Image | None:
        return draw_image("rectangle", "blue") if self.can_see else None

    def test_greedy_answers_are_those_of_generate(self, contender: Contender, red: Any, blue: Any) -> None:
        """Greedy answers equal those of transformers, alone and beside others, with images and without."""
        questions = [("What colour is it?", red), ("Which shape is this?", blue), ("Hello there", None)]
        expected = [contender.generate(text, picture, 16) for text, picture in questions]

        alone = [contender.answer(text, picture) for text, picture in questions]
        together = [contender.ask(text, picture) for text, picture in [*questions, *questions]]

        assert alone == expected
        assert [asked.wait().tokens for asked in together] == [*expected, *expected]

    def test_tokens_arrive_one_by_one_and_the_last_says_why(self, contender: Contender) -> None:
        """An answer ends at its length or at an end token; the reader is woken."""
        short = contender.ask("Hello there", max_new_tokens=3).wait()
        assert [event.finish_reason for event in short.events[:-1]] == [None] * (len(short.events) - 1)
        assert (len(short.tokens), short.events[-1].finish_reason) == (3, FinishReason.LENGTH)

        eos = min(contender.prompts.eos_token_ids)
        ended = contender.ask("Hello there", logit_bias=((eos, 100.0),)).wait()
        assert [(event.token_id, event.finish_reason) for event in ended.events] == [(eos, FinishReason.EOS)]
        wait_until(lambda: ended.num_wakes, "the reader is woken after the step's last event")

    def test_an_answer_ends_where_its_reader_wants(self, contender: Contender) -> None:
        """A reader can end its answer, as at a stop sequence: no event follows, and the engine has no work left."""
        asked = contender.ask("Hello there", max_new_tokens=200, is_enough=lambda number: number == 4, **ENDLESS).wait()

        self.settle(contender)
        assert len(asked.events) == 4

    def test_a_cancelled_answer_ends_within_a_step(self, contender: Contender) -> None:
        """The last event of a cancelled answer has the error; answers beside it continue."""
        expected = contender.answer("Which shape is this?", max_new_tokens=40)
        tester, is_cancelled = threading.get_ident(), threading.Event()

        def pause(number: int) -> bool:
            if number == 2 and threading.get_ident() != tester:
                is_cancelled.wait(DEADLINE_S)
            return False

        asked = contender.ask("Hello there", max_new_tokens=200, is_enough=pause, **ENDLESS)
        beside = contender.ask("Which shape is this?", max_new_tokens=40)
        asked.wait(num_events=2)
        error = InternalError("cancelled by the test")

        asked.cancel(error)
        is_cancelled.set()
        asked.wait()

        assert asked.events[-1].error is error
        assert len(asked.tokens) < 100
        assert beside.wait().tokens == expected
        asked.cancel(InternalError("too late"))
        self.settle(contender)
        assert asked.events[-1].error is error

    def test_a_deadline_ends_an_answer(self, contender: Contender) -> None:
        asked = contender.ask("Hello there", max_new_tokens=200, within_s=0.0, **ENDLESS).wait()

        assert isinstance(asked.events[-1].error, TurnTimedOut)
        self.settle(contender)

    def test_log_probabilities_are_the_models(self, contender: Contender, red: Any) -> None:
        """An event has the log probabilities of the chosen token and, in order, of the likeliest ones."""
        expected = contender.logprobs("What colour is it?", red)
        asked = contender.ask("What colour is it?", red, max_new_tokens=2, top_n_tokens=4).wait()
        first = asked.events[0]

        values, ids = expected.topk(4)
        assert [token for token, _ in first.top] == ids.tolist()
        assert [logprob for _, logprob in first.top] == pytest.approx(values.tolist(), abs=2e-3)
        assert first.logprob == pytest.approx(float(values[0]), abs=2e-3)
        plain = contender.ask("What colour is it?", red, max_new_tokens=2).wait()
        assert plain.events[0].top == ()
        assert plain.events[0].logprob == pytest.approx(float(values[0]), abs=2e-3)

    def test_a_seed_decides_a_sampled_answer(self, contender: Contender) -> None:
        """A seed gives the same answer whatever runs beside it; other seeds give other answers."""
        sampled = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 12, **ENDLESS}
        first = contender.answer("Hello there", seed=7, **sampled)
        others = [contender.ask("Which shape is this?", seed=seed, **sampled) for seed in range(3)]
        again = contender.answer("Hello there", seed=7, **sampled)

        assert again == first
        assert contender.answer("Hello there", seed=8, **sampled) != first
        assert len({tuple(asked.wait().tokens) for asked in others}) > 1

    def test_min_p_excludes_unlikely_tokens(self, contender: Contender) -> None:
        """min_p 1 leaves only the likeliest token, whatever the seed; 0 excludes nothing."""
        options = {"max_new_tokens": 12, **ENDLESS}
        sampled = {"do_sample": True, "temperature": 2.0, **options}
        greedy = contender.answer("Hello there", **options)
        uncut, strict, off = (
            [contender.answer("Hello there", seed=seed, min_p=min_p, **sampled) for seed in range(4)]
            for min_p in (None, 1.0, 0.0)
        )

        assert strict == [greedy] * 4
        assert off == uncut != strict

    def test_an_ignored_end_token_is_a_token_like_others(self, contender: Contender) -> None:
        """An answer of end tokens has its maximum length, also if another worker has begun it."""
        eos = min(contender.prompts.eos_token_ids)
        often = {"logit_bias": ((eos, 100.0),), "ignore_eos": True}

        asked = contender.ask("Hello there", max_new_tokens=5, **often).wait()

        assert asked.tokens == [eos] * 5
        assert [event.finish_reason for event in asked.events] == [None] * 4 + [FinishReason.LENGTH]
        assert contender.answer("Hello there", max_new_tokens=5, given=[eos] * 3, **often) == [eos] * 2

    @pytest.mark.parametrize("options", [{}, {"ignore_eos": True}], ids=str)
    def test_no_end_token_is_chosen_before_the_least_length(self, contender: Contender, options: Any) -> None:
        """The end token comes right after that length, also in an answer that another worker has begun."""
        eos = min(contender.prompts.eos_token_ids)
        ending = {"logit_bias": ((eos, 100.0),), "max_new_tokens": 6, "min_tokens": 5, **options}

        asked = contender.ask("Hello there", **ending).wait()

        *before, last = asked.tokens
        assert (len(before), eos in before, last) == (5, False, eos)
        assert asked.events[-1].finish_reason is (FinishReason.LENGTH if options else FinishReason.EOS)
        assert contender.answer("Hello there", given=before[:3], **ending) == [*before[3:], eos]
        assert contender.answer("Hello there", given=before, **ending) == [eos]

    def test_answers_of_a_least_length_are_those_of_generate(self, contender: Contender, red: Any) -> None:
        questions = [("What colour is it?", red), ("Hello there", None)]

        for text, picture in questions:
            for least in (0, 1, 9, 24):
                expected = contender.generate(text, picture, 24, min_new_tokens=least)
                assert contender.answer(text, picture, max_new_tokens=24, min_tokens=least) == expected

    def test_scopes_share_nothing(self, contender: Contender) -> None:
        """A prompt's beginning is computed once within a scope, and again in another one."""
        text = QUESTION[: self.max_question]
        first = contender.ask(text, scope="tenant-a").wait()
        same = contender.ask(text, scope="tenant-a").wait()
        other = contender.ask(text, scope="tenant-b").wait()

        assert first.events[0].num_cached == 0
        assert same.events[0].num_cached > 0
        assert other.events[0].num_cached == 0
        assert first.tokens == same.tokens == other.tokens

    max_question = len(QUESTION)

    def test_an_answer_goes_on_from_given_tokens(self, contender: Contender, red: Any) -> None:
        whole = contender.answer("What colour is it?", red, max_new_tokens=12)

        assert contender.answer("What colour is it?", red, max_new_tokens=12, given=whole[:4]) == whole[4:]

    def test_an_answer_follows_its_grammar(self, contender: Contender) -> None:
        assert contender.engine.capabilities.has_grammars
        grammar = contender.engine.compile_grammar(GrammarText("regex", "[a-c]{5}", "grammar"))

        tokens = contender.answer("Hello there", max_new_tokens=30, grammar=grammar)

        text = contender.prompts.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        assert len(text) == 5
        assert set(text) <= set("abc")

    def test_a_grammar_that_cannot_be_followed_is_refused(self, contender: Contender) -> None:
        with pytest.raises(HandlerError, match="grammar"):
            contender.engine.compile_grammar(GrammarText("json_schema", '{"type": "nothing"}', "grammar"))

    def test_adapters_share_steps_but_no_beginnings(self, contender: Contender, tmp_path: Path) -> None:
        """Sequences with different adapters run in one step and each match the model with that adapter merged in."""
        text = QUESTION[: self.max_question]
        folders = make_adapters(contender.checkpoint, tmp_path, 2, strength=1.0)
        adapters = [None, *(contender.engine.load_adapter(folder) for folder in folders)]
        expected = [contender.generate(text, None, 16)]
        for folder in folders:
            add_adapter(contender.reference, folder)
            expected.append(contender.generate(text, None, 16))
            add_adapter(contender.reference, folder, sign=-1)

        together = [contender.ask(text, adapter=each, scope="adapted") for each in adapters]
        assert [asked.wait().tokens for asked in together] == expected
        assert [asked.events[0].num_cached for asked in together] == [0, 0, 0]
        again = [contender.ask(text, adapter=each, scope="adapted").wait() for each in adapters]
        assert [asked.tokens for asked in again] == expected
        assert all(asked.events[0].num_cached > 0 for asked in again)
        assert len({tuple(tokens) for tokens in expected}) == len(expected)
        for adapter in adapters[1:]:
            assert adapter.num_bytes > 0
            adapter.drop()
            assert adapter.num_bytes == 0

    def test_an_adapter_that_is_none_is_refused(self, contender: Contender, tmp_path: Path) -> None:
        [folder] = make_adapters(contender.checkpoint, tmp_path, 1)
        (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
        with pytest.raises(ModelBroken):
            contender.engine.load_adapter(folder)
        contender.answer("Hello there")

    def test_numbers_are_those_of_the_work(self, contender: Contender) -> None:
        """Counts of steps only grow, and the parts of the pool fit into its capacity."""
        before = contender.engine.numbers().steps
        contender.answer("Hello there")
        pool = contender.engine.pool

        assert contender.engine.numbers().steps > before
        assert 0 <= pool.used_bytes <= pool.capacity_bytes
        assert pool.num_tokens(pool.num_bytes(64)) >= 64
        assert pool.num_tokens(pool.capacity_bytes) >= contender.engine.capabilities.max_context

    def settle(self, contender: Contender) -> None:
        """Wait until the engine has no answer in its batch; an answer of one token shows the state after it."""
        limit = time.monotonic() + DEADLINE_S
        while contender.engine.numbers().rows:
            assert time.monotonic() < limit
            contender.answer("Hi", max_new_tokens=1)

    def test_stop_ends_answers_and_refuses_more(self, contender: Contender) -> None:
        """A stopped engine ends running answers with an error and refuses new ones. This test must run last."""
        asked = contender.ask("Hello there", max_new_tokens=200, **ENDLESS).wait(num_events=1)

        contender.engine.stop()

        error = asked.wait().events[-1].error
        assert isinstance(error, InternalError)
        asked.cancel(InternalError("too late"))
        assert asked.events[-1].error is error
        with pytest.raises(InternalError):
            contender.ask("Hello there")


# Without the end token an answer of the tiny checkpoints reaches its length.
ENDLESS: dict[str, Any] = {"logit_bias": ((2, -100.0),)}
