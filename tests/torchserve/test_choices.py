"""Several answers to one request (`n`) through OpenAI's own client, on real TorchServe instances."""

from typing import Any

import openai
import pytest

from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.openai_client import at_both_bases, gpt
from tests.torchserve.test_faults import slowed_workers
from tests.waiting import wait_until

__all__ = ["gpt"]  # a fixture
pytestmark = pytest.mark.torchserve
PICTURE = {"type": "image_url", "image_url": {"url": data_url(draw("circle", "red"))}}
MESSAGES: Any = [{"role": "user", "content": [{"type": "text", "text": "What color is the circle?"}, PICTURE]}]
SAMPLED: Any = {"model": "llava", "messages": MESSAGES, "n": 3, "temperature": 1e6, "seed": 5, "max_tokens": 12}


def test_choices_share_their_prompt_and_its_image(fleet: Fleet, gpt: openai.OpenAI) -> None:
    """The usage and the engine count the prompt once, except for its last block in each further choice."""
    own = data_url(draw("circle", "red", (320 + len(str(gpt.base_url)), 240)))  # no cache has this image
    content = [{"type": "text", "text": f"{gpt.base_url} " * 20}, {"type": "image_url", "image_url": {"url": own}}]
    messages: Any = [{"role": "user", "content": content}]
    before, images = fleet.count("tokens", "prefilled"), fleet.count("images", "encoded")
    answer = gpt.chat.completions.create(**{**SAMPLED, "messages": messages, "n": 8})

    assert [choice.index for choice in answer.choices] == list(range(8))
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens <= 8 * 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    prefilled = fleet.count("tokens", "prefilled") - before
    assert answer.usage.prompt_tokens <= prefilled <= answer.usage.prompt_tokens + 7 * 17
    assert fleet.count("images", "encoded") - images == 1


@at_both_bases
def test_each_choice_has_its_own_seed_and_repeats_with_the_request(gpt: openai.OpenAI) -> None:
    """The first choice equals the answer without `n`, and choices are streamed concurrently.

    A repetition gives the same.
    """
    asked = {**SAMPLED, "max_tokens": 100}  # so long that a busy machine does not send each choice in one part
    whole = [choice.message.content for choice in gpt.chat.completions.create(**asked).choices]
    alone = gpt.chat.completions.create(**{**asked, "n": 1}).choices[0].message.content
    texts = ["", "", ""]
    order: list[int] = []
    usage = None
    for chunk in gpt.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            order.append(choice.index)
        usage = chunk.usage or usage

    assert texts == whole
    assert whole[0] == alone
    assert len(set(whole)) == 3
    assert order != sorted(order)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    with gpt.chat.completions.stream(**asked) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "chunk"]
    assert [choice.message.content for choice in snapshots[-1].choices] == whole


def test_greedy_choices_are_equal_and_have_their_log_probabilities(gpt: openai.OpenAI) -> None:
    answer = gpt.chat.completions.create(model="llava", messages=MESSAGES, n=2, temperature=0, logprobs=True)

    first, second = answer.choices
    assert "red" in (first.message.content or "")
    assert first.message.content == second.message.content
    for choice in answer.choices:
        assert "".join(each.token for each in choice.logprobs.content or ()) == choice.message.content


def test_completions_have_choices_too(gpt: openai.OpenAI) -> None:
    asked: Any = {"model": "llava", "prompt": "hello", "n": 2, "temperature": 1e6, "seed": 3, "max_tokens": 9}
    whole = [choice.text for choice in gpt.completions.create(**asked).choices]
    texts = ["", ""]
    for chunk in gpt.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert texts == whole
    assert whole[0] != whole[1]


def test_completions_of_several_prompts(gpt: openai.OpenAI) -> None:
    """Each prompt's choices are those of its own request, whole and streamed."""
    asked: Any = {"model": "llava", "n": 2, "temperature": 1e6, "seed": 3, "max_tokens": 9}
    prompts = [f"number {number}" for number in range(20)]
    alone = [gpt.completions.create(**asked, prompt=each) for each in prompts[:2]]

    whole = gpt.completions.create(**asked, prompt=prompts)
    texts = [""] * 40
    for chunk in gpt.completions.create(**asked, prompt=prompts, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert [choice.text for choice in whole.choices] == texts
    assert texts[:4] == [choice.text for each in alone for choice in each.choices]
    assert whole.usage.prompt_tokens >= 20
    with pytest.raises(openai.BadRequestError, match="tokens"):
        gpt.completions.create(**asked, prompt=[*prompts, "word " * 3000])


def test_a_client_that_leaves_stops_all_choices(fleet: Fleet, gpt: openai.OpenAI) -> None:
    long: Any = {**SAMPLED, "seed": 55, "max_tokens": 1500, "stream": True}  # each choice has 369 tokens or more
    with slowed_workers(fleet), gpt.chat.completions.create(**long) as stream:
        next(iter(stream))
        wait_until(lambda: fleet.count("turns", "in_progress") == 3, "all choices run")
    wait_until(lambda: fleet.count("turns", "in_progress") == 0, "no choice runs")


@pytest.mark.parametrize("number", [0, 9, 1.5, "2"])
def test_other_numbers_are_refused(gpt: openai.OpenAI, number: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="from 1 to 8") as caught:
        gpt.chat.completions.create(model="llava", messages=MESSAGES, n=number)
    assert caught.value.param == "n"


def test_answers_to_all_prompts_have_one_limit(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_answers") as caught:
        gpt.completions.create(model="llava", prompt=["hello"] * 20, n=4)
    assert caught.value.param == "n"


def test_a_request_fails_as_a_whole(gpt: openai.OpenAI) -> None:
    """A request fails as a whole, also before its first token."""
    with pytest.raises(openai.BadRequestError, match="tokens"):
        gpt.chat.completions.create(model="llava", messages=[{"role": "user", "content": "word " * 3000}], n=3)
