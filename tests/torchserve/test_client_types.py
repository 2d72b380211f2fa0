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

from tests.torchserve.conftest import Fleet
from tests.torchserve.openai_client import gpt

__all__ = ["gpt"]  # a fixture
pytestmark = pytest.mark.torchserve
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
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
    assert first.details is not None
    assert first.details.seed is not None
    assert ask(first.details.seed).generated_text == first.generated_text
