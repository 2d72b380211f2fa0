"""Strict functions with OpenAI's client: the model would write arguments that the schema excludes."""

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.torchserve.conftest import SCRIPTED_NAME, Fleet
from tests.torchserve.scripted.scripted_model import ANSWER, ASKED

pytestmark = pytest.mark.torchserve
QUESTION = "What is 3 + 4?"  # the scripted model calls my_adder_tool with a=3 and b=4
SAID: Any = [{"role": "user", "content": QUESTION}]


class MyAdderTool(pydantic.BaseModel):
    """A function whose schema excludes what the model writes."""

    a: Literal[5, 6]
    b: int


TOOL = openai.pydantic_function_tool(MyAdderTool, name="my_adder_tool")  # this helper makes strict functions


@pytest.fixture
def gpt(scripted: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.runtime}/v1", api_key="any", timeout=90, max_retries=0) as client:
        yield client


def test_chat_completions_follow_the_schema(gpt: openai.OpenAI) -> None:
    """The model chooses to call; `parse` and `stream` of the client read the arguments as the schema's type."""
    whole = gpt.chat.completions.parse(model=SCRIPTED_NAME, messages=SAID, tools=[TOOL])
    with gpt.chat.completions.stream(model=SCRIPTED_NAME, messages=SAID, tools=[TOOL]) as stream:
        streamed = stream.get_final_completion()

    for completion in (whole, streamed):
        [choice] = completion.choices
        [call] = choice.message.tool_calls or []
        assert choice.finish_reason == "tool_calls"
        assert isinstance(call.function.parsed_arguments, MyAdderTool)


def test_a_strict_function_leaves_texts_and_reasoning_free(gpt: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": ASKED}]

    message = gpt.chat.completions.parse(model=SCRIPTED_NAME, messages=said, tools=[TOOL]).choices[0].message

    assert (message.content, message.tool_calls) == (ANSWER, None)
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"]


def test_responses_follow_the_schema(gpt: openai.OpenAI) -> None:
    response = gpt.responses.parse(model=SCRIPTED_NAME, input=QUESTION, tools=[TOOL])

    [call] = response.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, MyAdderTool)


def test_other_functions_have_what_the_model_writes(gpt: openai.OpenAI) -> None:
    function: Any = {**TOOL["function"], "strict": False}

    answer = gpt.chat.completions.create(
        model=SCRIPTED_NAME, messages=SAID, tools=[{"type": "function", "function": function}]
    )

    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == '{"a":3,"b":4}'
