"""Requests made of the types that the clients' own libraries define, on real TorchServe instances."""

import typing
from typing import Any

import openai
import pytest
from huggingface_hub import (
    ChatCompletionInputFunctionName,
    ChatCompletionInputToolChoiceClass,
    InferenceClient,
    TextGenerationOutput,
)
from openai.types.responses import ResponseIncludable
from pydantic import BaseModel

from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.openai_client import gpt

__all__ = ["gpt"]  # a fixture
pytestmark = pytest.mark.torchserve
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
SESSION = "X-Amzn-SageMaker-Session-Id"
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "traffic")]


@pytest.mark.parametrize(
    "choice", [ChatCompletionInputToolChoiceClass(function=ChatCompletionInputFunctionName(name="traffic")), "traffic"]
)
def test_huggingface_client_chooses_a_function(fleet: Fleet, choice: Any) -> None:
    """The type of its library has no `type`; TGI's documentation shows the function's name alone."""
    client = InferenceClient(base_url=fleet.runtime, timeout=90)

    answer = client.chat_completion([{"role": "user", "content": "Hello"}], tools=TOOLS, tool_choice=choice)

    assert [call.function.name for call in answer.choices[0].message.tool_calls or ()] == ["traffic"]


def test_openai_client_may_include_whatever_its_types_name(gpt: openai.OpenAI) -> None:
    included: Any = list(typing.get_args(ResponseIncludable))

    response = gpt.responses.create(model="llava", input="Hello", include=included)

    assert response.output[0].type == "message"
    assert response.output[0].content[0].logprobs


def test_huggingface_client_repeats_a_sampled_answer_by_its_seed(fleet: Fleet) -> None:
    """The details have the seed of an answer whose request has none, as TGI's."""
    client = InferenceClient(fleet.runtime, timeout=90)

    def ask(seed: int | None) -> TextGenerationOutput:
        return client.text_generation("<s><|user|>", temperature=1.5, max_new_tokens=12, details=True, seed=seed)

    first = ask(None)
    assert first.details.seed is not None
    assert ask(first.details.seed).generated_text == first.generated_text


@pytest.mark.parametrize("colour", ["red", "blue"])
def test_the_result_of_a_tool_in_a_session_may_have_an_image(gpt: openai.OpenAI, colour: str) -> None:
    """The model sees it."""
    asked: Any = {"model": "llava", "tools": TOOLS}
    question: Any = {"role": "user", "content": "What color is the circle?"}
    opened = gpt.chat.completions.with_raw_response.create(
        **asked, messages=[question], tool_choice="traffic", extra_headers={SESSION: "NEW_SESSION"}
    )
    session = opened.headers["x-amzn-sagemaker-new-session-id"].partition(";")[0]
    said = opened.parse().choices[0].message
    image: Any = {"type": "image_url", "image_url": {"url": data_url(draw("circle", colour))}}
    content: Any = [image, {"type": "text", "text": "What color is the circle?"}]
    result: Any = {"role": "tool", "tool_call_id": (said.tool_calls or [])[0].id, "content": content}

    answer = gpt.chat.completions.create(**asked, messages=[result], extra_headers={SESSION: session})

    assert colour in str(answer.choices[0].message.content)


class Shape(BaseModel):
    is_round: bool


@pytest.mark.filterwarnings("ignore:Pydantic serializer:UserWarning")  # of the client's own type with `parsed`
def test_openai_client_sends_again_what_parse_returns(gpt: openai.OpenAI) -> None:
    """Its objects have the parsed values, too."""
    hello: Any = {"role": "user", "content": "Hello"}
    function: Any = openai.pydantic_function_tool(Shape)["function"]
    offered: Any = [{"type": "function", **function}]

    said = gpt.chat.completions.parse(model="llava", messages=[hello], response_format=Shape).choices[0].message
    called = gpt.responses.parse(model="llava", input=[hello], tools=offered, tool_choice="required").output
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "yes"}
        for item in called
        if item.type == "function_call"
    ]
    chat = gpt.chat.completions.create(model="llava", messages=[hello, said.model_dump(), hello])
    response = gpt.responses.create(model="llava", input=[hello, *[item.model_dump() for item in called], *results])

    assert said.parsed is not None
    assert results
    assert chat.choices[0].message.content
    assert response.output_text


def test_openai_client_deletes_items_while_it_lists_them(gpt: openai.OpenAI) -> None:
    """The item after which the next page begins is gone by then."""
    talk = gpt.conversations.create(items=[{"role": "user", "content": str(number)} for number in range(5)]).id

    for order in ("asc", "desc"):
        items: Any = gpt.conversations.items
        gone = []
        for item in items.list(talk, limit=2, order=order):
            gone.append(item.content[0].text)
            items.delete(item.id, conversation_id=talk)
        assert gone == (["0", "1", "2", "3", "4"] if order == "asc" else ["9", "8"])
        assert list(items.list(talk)) == []
        items.create(talk, items=[{"role": "user", "content": text} for text in ("8", "9")])
