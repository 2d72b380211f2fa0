"""llm-comply's cases of OpenAI's APIs, on real TorchServe instances with a scripted model.

The demo model cannot be relied on to call a tool, and never reasons; the scripted one does on request. Streams contain
no reasoning, because llm-comply 0.5.0 uses other names for its events than its own schema and OpenAI's client. The
cases of reasoning run for a model whose name contains gpt-5.
"""

from typing import Any

import openai
import pytest

from tests.torchserve.conftest import SCRIPTED_NAME as NAME
from tests.torchserve.conftest import Fleet
from tests.torchserve.test_sdk_clients import run

pytestmark = pytest.mark.torchserve
THOUGHT, ANSWER = "Ten times 37, and half of that.", "The circle is red."
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@pytest.mark.parametrize(("kind", "num_cases"), [("open-responses", 13), ("openai-chat", 9)])
def test_every_case_passes_without_a_warning(scripted: Fleet, kind: str, num_cases: int) -> None:
    told = run("llm_comply_cases.py", kind, f"{scripted.runtime}/v1", NAME)

    wrong = [case for case in told["results"] if case["status"] != "passed" or case.get("warnings")]
    assert wrong == [], wrong
    assert len(told["results"]) == num_cases


def test_openai_client_reads_reasoning_and_calls(scripted: Fleet) -> None:
    """OpenAI's helper accumulates the items of a stream, and the next response answers the results."""
    asked: Any = {"role": "user", "content": "Show your reasoning."}
    with openai.OpenAI(base_url=f"{scripted.runtime}/v1", api_key="any", timeout=90, max_retries=0) as gpt:
        with gpt.responses.stream(model=NAME, input=[asked], tools=[WEATHER], tool_choice="required") as stream:
            kinds = {event.type for event in stream}
            first = stream.get_final_response()
        thought, call = first.output
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
        second = gpt.responses.create(
            model=NAME,
            input=[result, asked],
            previous_response_id=first.id,
            tools=[WEATHER],
            reasoning={"effort": "low", "summary": "auto"},
        )
        with pytest.raises(openai.BadRequestError, match="No tool call found"):
            gpt.responses.create(model=NAME, input=[{**result, "call_id": "call_x"}], previous_response_id=second.id)

    assert {"response.reasoning_summary_text.delta", "response.function_call_arguments.delta"} < kinds
    assert thought.type == "reasoning"
    assert [part.text for part in thought.summary] == [THOUGHT]
    assert (call.name, call.arguments, call.status) == ("get_weather", '{"city":""}', "completed")
    assert second.output_text == ANSWER
    assert second.output[0].type == "reasoning"
    assert [part.text for part in second.output[0].summary] == [THOUGHT]
    assert second.usage.output_tokens_details.reasoning_tokens > 0


def test_openai_client_switches_reasoning_off(scripted: Fleet) -> None:
    """A template variable or the effort switches reasoning off for one request, whole and streamed."""
    asked: Any = {"role": "user", "content": "Show your reasoning."}
    off: Any = {"chat_template_kwargs": {"enable_thinking": False, "max_thinking_tokens": 64}}
    with openai.OpenAI(base_url=f"{scripted.runtime}/v1", api_key="any", timeout=90, max_retries=0) as gpt:
        for fields, thought in (({}, THOUGHT), ({"extra_body": off}, ""), ({"reasoning_effort": "none"}, "")):
            whole: Any = gpt.chat.completions.create(model=NAME, messages=[asked], **fields)
            stream: Any = gpt.chat.completions.create(model=NAME, messages=[asked], stream=True, **fields)
            deltas = [chunk.choices[0].delta for chunk in stream]
            message = whole.choices[0].message
            assert (getattr(message, "reasoning_content", ""), message.content) == (thought, ANSWER)
            assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == thought
            assert "".join(delta.content or "" for delta in deltas) == ANSWER
        first = gpt.responses.create(model=NAME, input=[asked], extra_body=off)
        second = gpt.responses.create(model=NAME, input=[asked], previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="cannot set 'bos_token'"):
            gpt.responses.create(model=NAME, input="x", extra_body={"chat_template_kwargs": {"bos_token": ""}})

    assert [item.type for item in first.output] == ["message"]
    assert [item.type for item in second.output] == ["reasoning", "message"]
    assert first.output_text == second.output_text == ANSWER
