"""Answers that follow a schema, and calls of tools, on real TorchServe instances, by OpenAI's client and others."""

import json
import re
from typing import Any, Literal

import openai
import pytest
import requests
from openai.types.chat import ChatCompletionMessageCustomToolCall
from openai.types.responses import ResponseCustomToolCall
from pydantic import BaseModel, Field

from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.openai_client import at_both_bases, gpt

__all__ = ["gpt"]  # a fixture
pytestmark = pytest.mark.torchserve

QUESTION = "What color is the circle?"
COLOUR = {"type": "regex", "value": "(red|green|blue)"}


class Shape(BaseModel):
    """The answer's properties of an image."""

    kind: Literal["circle", "square"]
    colour: Literal["red", "green", "blue"]
    corners: int = Field(ge=0, le=9)


def test_openai_client_parses_its_own_model(gpt: openai.OpenAI) -> None:
    """`parse` sends a pydantic model as a strict schema; whole and streamed answers have the same fields."""
    picture = {"type": "image_url", "image_url": {"url": data_url(draw("circle", "red"))}}
    messages = [{"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}]
    request = {"model": "llava", "messages": messages, "response_format": Shape, "seed": 4, "temperature": 0.7}

    whole = gpt.chat.completions.parse(**request)
    with gpt.chat.completions.stream(**request) as stream:
        last = stream.get_final_completion()

    assert isinstance(whole.choices[0].message.parsed, Shape)
    assert last.choices[0].message.parsed == whole.choices[0].message.parsed
    with pytest.raises(openai.LengthFinishReasonError):
        gpt.chat.completions.parse(**request, max_tokens=3)


def test_openai_client_learns_why_a_schema_is_refused(gpt: openai.OpenAI) -> None:
    """The library's reason and the field reach the exception; json_object needs no schema."""
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    messages = [{"role": "user", "content": "Hello"}]

    with pytest.raises(openai.BadRequestError, match="not") as caught:
        gpt.chat.completions.create(model="llava", messages=messages, response_format=named)
    answer = gpt.chat.completions.create(
        model="llava",
        messages=messages,
        response_format={"type": "json_object"},
        max_tokens=8,
    )

    assert caught.value.param == "response_format.json_schema.schema"
    assert str(answer.choices[0].message.content).lstrip().startswith("{")


def test_grammars_of_tgi_and_session_bodies(fleet: Fleet) -> None:
    """TGI's `grammar` applies to a raw prompt and to one turn of a session, but not to its next turn."""
    parameters = {"grammar": COLOUR, "max_new_tokens": 20}
    client = fleet.client()
    prompt = {"inputs": f"<s><|user|>{QUESTION}<|end|><|assistant|>", "parameters": parameters}

    [raw] = requests.post(f"{fleet.runtime}/invocations", json=prompt, timeout=90).json()
    opened = client.invoke_endpoint(
        EndpointName="llava", SessionId="NEW_SESSION", Body=json.dumps({"requestType": "NEW_SESSION"})
    )
    session = opened["NewSessionId"].partition(";")[0]
    said = []
    for own in (parameters, {"max_new_tokens": 20}):
        turn = {"type": "send_text_prompt", "prompt_text": QUESTION, "parameters": own}
        body = client.invoke_endpoint(EndpointName="llava", SessionId=session, Body=json.dumps(turn))["Body"]
        said.append(json.loads(body.read())["response_text"])

    assert re.fullmatch(COLOUR["value"], raw["generated_text"])
    assert re.fullmatch(COLOUR["value"], said[0])
    assert not re.fullmatch(COLOUR["value"], said[1])


class Forecast(BaseModel):
    """Look up the weather of a city."""

    city: Literal["Ulm", "Rome"]
    days: int = Field(ge=1, le=7)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Forecast"}}])
def test_openai_client_calls_a_tool(gpt: openai.OpenAI, choice: Any) -> None:
    """A call is parsed as the client's own model, whole and streamed; its result continues the conversation."""
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    request: Any = {
        "model": "llava",
        "tools": [openai.pydantic_function_tool(Forecast)],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }

    whole = gpt.chat.completions.parse(messages=messages, **request)
    with gpt.chat.completions.stream(messages=messages, **request) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion()
    said = whole.choices[0].message
    [call] = said.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    answer = gpt.chat.completions.create(
        model="llava", messages=[*messages, said, result], tools=request["tools"], max_tokens=8
    )

    assert isinstance(call.function.parsed_arguments, Forecast)
    assert whole.choices[0].finish_reason == streamed.choices[0].finish_reason == "tool_calls"
    assert [c.function.parsed_arguments for c in streamed.choices[0].message.tool_calls or []] == [
        call.function.parsed_arguments
    ]
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    assert answer.choices[0].message.content is not None


COUNTED = r"[0-9]{1,3} rows"


@at_both_bases
def test_openai_client_calls_a_custom_tool(gpt: openai.OpenAI) -> None:
    """The input is a text that matches the tool's pattern, in both APIs, whole and streamed; a result continues."""
    grammar = {"syntax": "regex", "definition": COUNTED}
    custom: Any = {"name": "query", "description": "Query the table"}
    tool: Any = {"type": "custom", "custom": {**custom, "format": {"type": "grammar", "grammar": grammar}}}
    messages: list[Any] = [{"role": "user", "content": "How many?"}]
    request: Any = {"model": "llava", "tools": [tool], "tool_choice": {"type": "custom", "custom": {"name": "query"}}}

    said = gpt.chat.completions.create(messages=messages, **request).choices[0].message
    chunks = [chunk.choices[0] for chunk in gpt.chat.completions.create(messages=messages, stream=True, **request)]
    [call] = said.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "Three"}
    answer = gpt.chat.completions.create(model="llava", messages=[*messages, said, result], tools=[tool], max_tokens=8)

    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    assert re.fullmatch(COUNTED, call.custom.input)
    parts: list[Any] = [part.to_dict() for chunk in chunks for part in chunk.delta.tool_calls or []]
    assert (parts[0]["type"], parts[0]["custom"]["name"], chunks[-1].finish_reason) == ("custom", "query", "tool_calls")
    assert "".join(part["custom"]["input"] for part in parts) == call.custom.input
    assert answer.choices[0].message.content is not None

    flat: Any = {"type": "custom", **custom, "format": {"type": "grammar", **grammar}}
    named: Any = {"model": "llava", "tools": [flat], "tool_choice": {"type": "custom", "name": "query"}}
    with gpt.responses.stream(input="How many?", **named) as events:
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        first = events.get_final_response()
    [item] = first.output
    assert isinstance(item, ResponseCustomToolCall)
    output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "Three"}
    second = gpt.responses.create(
        model="llava", input=[output], previous_response_id=first.id, tools=[flat], max_output_tokens=8
    )

    assert re.fullmatch(COUNTED, item.input)
    assert "".join(deltas) == item.input
    assert [each.type for each in first.tools] == ["custom"]
    assert second.output[0].type == "message"


def test_openai_client_learns_why_a_custom_tool_is_refused(gpt: openai.OpenAI) -> None:
    """A lark grammar cannot be enforced inside a call; the error names the field and what works."""
    grammar: Any = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    tool: Any = {"type": "custom", "custom": {"name": "query", "format": grammar}}

    with pytest.raises(openai.BadRequestError, match="use regex, or the format text") as caught:
        gpt.chat.completions.create(model="llava", messages=[{"role": "user", "content": "Hello"}], tools=[tool])

    assert caught.value.param == "tools[0].custom.format.grammar.syntax"


@at_both_bases
def test_openai_client_calls_a_function_of_a_namespace(gpt: openai.OpenAI) -> None:
    """The Codex CLI offers functions, namespaces of functions and other tools; a call has namespace and name apart."""
    function: Any = {"name": "Forecast", "strict": False, "parameters": Forecast.model_json_schema()}
    namespace: Any = {"type": "namespace", "name": "mcp__weather", "description": "Weather", "tools": []}
    namespace["tools"] = [{"type": "function", "description": "Look up", **function}]
    others: Any = [
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search", "external_web_access": True},
    ]
    request: Any = {"model": "llava", "tools": [*others, namespace], "store": False, "parallel_tool_calls": False}
    asked: list[Any] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]

    choice: Any = {"type": "function", "name": "mcp__weather__Forecast"}
    with gpt.responses.stream(input=asked, tool_choice=choice, **request) as stream:
        called = [event.item for event in stream if event.type == "response.output_item.done"]
        whole = stream.get_final_response()
    [call] = called
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    said = [*asked, call.model_dump(exclude_none=True), result]
    answer = gpt.responses.create(input=said, tool_choice="auto", max_output_tokens=8, **request)

    assert (call.namespace, call.name) == ("mcp__weather", "Forecast")
    assert Forecast.model_validate_json(call.arguments)
    assert [tool.type for tool in whole.tools] == ["namespace"]
    assert answer.output[0].type == "message"


def test_session_calls_a_tool(fleet: Fleet) -> None:
    """A turn of the session API calls, and the next turn sends the result."""
    client = fleet.client()
    opened = client.invoke_endpoint(
        EndpointName="llava", SessionId="NEW_SESSION", Body=b'{"requestType": "NEW_SESSION"}'
    )
    session = opened["NewSessionId"].partition(";")[0]
    turn = {"type": "send_text_prompt", "tools": [openai.pydantic_function_tool(Forecast)]}

    def ask(**fields: Any) -> Any:
        answer = client.invoke_endpoint(EndpointName="llava", SessionId=session, Body=json.dumps({**turn, **fields}))
        return json.loads(answer["Body"].read())

    [call] = ask(prompt_text="How is the weather?", tool_choice="required", parallel_tool_calls=False)["tool_calls"]
    answer = ask(tool_results=[{"tool_call_id": call["id"], "content": "Sunny"}], parameters={"max_new_tokens": 8})

    assert call["name"] == "Forecast"
    assert Forecast.model_validate_json(call["arguments"])
    assert "response_text" in answer
