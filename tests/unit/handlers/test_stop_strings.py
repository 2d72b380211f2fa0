"""Stop strings beside log probabilities and within tool calls, by the chat service with the demo model."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.handlers.conftest import Client
from tests.unit.handlers.test_response_form import read
from torchmoor.wire import headers as wire

NEVER = "zzzzzzzz"  # no answer has it
MESSAGES = [{"role": "user", "content": "What color is the circle?"}]
CHAT = {"model": "llava", "messages": MESSAGES, "max_tokens": 12, "seed": 5, "temperature": 1.0}
COMPLETION = {"model": "llava", "prompt": "The circle", "max_tokens": 12, "seed": 5, "temperature": 1.0}
TGI = {"inputs": "The circle", "parameters": {"max_new_tokens": 12, "details": True, "top_n_tokens": 1}}
SCHEMA = {
    "type": "object",
    "properties": {"value": {"enum": ["red", "blue"]}},
    "required": ["value"],
    "additionalProperties": False,
}
PAINT = {"name": "paint", "parameters": SCHEMA}
CUTS = ['"value"', "}"]  # within the arguments


def events(body: bytes) -> list[Any]:
    """Return the values of a stream of `data:` events."""
    lines = [line.removeprefix(b"data:").strip() for line in body.splitlines() if line.startswith(b"data:")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def chat_logprobs(client: Client, **fields: Any) -> tuple[Any, Any]:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, **fields}
    whole = client.call(body).json["choices"][0]["logprobs"]["content"]
    chunks = [each["choices"][0]["logprobs"] for each in events(client.call({**body, "stream": True}).body)]
    return whole, [entry for each in chunks if each for entry in each["content"]]


def completion_logprobs(client: Client, **fields: Any) -> tuple[Any, Any]:
    body = {**COMPLETION, "logprobs": 2, **fields}
    whole = client.call(body).json["choices"][0]["logprobs"]
    parts = [each["choices"][0]["logprobs"] for each in events(client.call({**body, "stream": True}).body)]
    return whole, {name: [value for each in parts if each for value in each[name]] for name in whole}


def tgi_tokens(client: Client, **fields: Any) -> tuple[Any, Any]:
    parameters = {**TGI["parameters"], **fields}  # type: ignore[dict-item]
    body = {**TGI, "parameters": parameters}
    streamed = events(client.call({**body, "stream": True}).body)
    return client.call(body).json[0]["details"]["tokens"], [each["token"] for each in streamed]


@pytest.mark.parametrize("ask", [chat_logprobs, completion_logprobs, tgi_tokens])
def test_a_stop_string_that_never_comes_changes_no_token(client: Client, ask: Callable[..., Any]) -> None:
    """Each token has its own text, whole and streamed, as without a stop string."""
    whole, streamed = ask(client)
    assert whole

    assert ask(client, stop=[NEVER]) == (whole, streamed)


def test_tokens_of_a_stop_string_have_their_own_texts(client: Client) -> None:
    """The text ends before the stop string; the tokens are those that were generated, with texts that add up."""
    full = client.call({**COMPLETION, "logprobs": 1}).json["choices"][0]
    stop = full["text"].strip()[3:6]

    found = client.call({**COMPLETION, "logprobs": 1, "stop": [stop]}).json["choices"][0]

    assert found["text"] == full["text"][: full["text"].index(stop)]
    tokens = found["logprobs"]["tokens"]
    assert tokens == full["logprobs"]["tokens"][: len(tokens)]
    assert "".join(tokens).startswith(found["text"] + stop[0])
    ends = [offset + len(token) for offset, token in zip(found["logprobs"]["text_offset"], tokens, strict=True)]
    assert found["logprobs"]["text_offset"] == [0, *ends[:-1]]


def test_a_stream_waits_only_for_what_may_be_a_stop_string(client: Client) -> None:
    """Pieces of text come as early as without one."""
    streamed = [
        [each["token"]["text"] for each in events(client.call({**TGI, "stream": True, "parameters": parameters}).body)]
        for parameters in ({"max_new_tokens": 12}, {"max_new_tokens": 12, "stop": [NEVER]})
    ]

    assert streamed[0] == streamed[1]


@pytest.mark.parametrize("stop", CUTS)
def test_a_call_that_a_stop_string_cuts_does_not_count_as_one(client: Client, stop: str) -> None:
    """Clients parse the arguments of an answer that ends with tool_calls."""
    tool = {"type": "function", "function": PAINT}
    body = {**CHAT, "max_tokens": 100, "tools": [tool], "tool_choice": "required", "stop": [stop]}

    whole = client.call(body).json["choices"][0]
    streamed = events(client.call({**body, "stream": True}).body)

    with pytest.raises(json.JSONDecodeError):
        json.loads(whole["message"]["tool_calls"][0]["function"]["arguments"])
    assert whole["finish_reason"] == "stop"
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stop", CUTS)
def test_a_response_with_a_cut_call_is_incomplete(client: Client, stop: str) -> None:
    """The session goes on without a result of the call."""
    create = {wire.RESOURCE: "POST responses"}
    tool = {"type": "function", **PAINT}
    body = {"model": "llava", "input": "Hello", "seed": 5, "tools": [tool], "tool_choice": "required", "stop": [stop]}

    whole = client.call(body, create).json
    streamed = read(client.call({**body, "stream": True}, create).body)[-1]
    following = client.call({"model": "llava", "input": "And now?", "previous_response_id": whole["id"]}, create)

    for response in (whole, streamed["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "stop"})
        assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert streamed["type"] == "response.incomplete"
    assert following.json["status"] == "completed"


def test_a_call_before_the_stop_string_is_whole(client: Client) -> None:
    """A stop string that the answer does not have, or that comes after the call, changes nothing."""
    tool = {"type": "function", "function": PAINT}
    body = {**CHAT, "max_tokens": 100, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}

    found = [client.call({**body, **more}).json["choices"][0] for more in ({}, {"stop": [NEVER]})]

    assert found[0] == found[1]
    assert found[0]["finish_reason"] == "tool_calls"
