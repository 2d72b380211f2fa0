"""Stop strings beside log probabilities and within tool calls, by the chat service with the demo model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handlers.journal.directory import DirectoryJournal
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.conftest import Client, EndlessModel, ServiceFactory
from tests.unit.handlers.test_background_responses import WRITE
from tests.unit.handlers.test_chat_service import Hold, stop
from tests.unit.handlers.test_response_form import read
from torchmoor.wire import background
from torchmoor.wire import headers as wire

NEVER = "zzzzzzzz"  # no answer has it
MESSAGES = [{"role": "user", "content": "What color is the circle?"}]
CHAT = {"model": "llava", "messages": MESSAGES, "max_tokens": 12, "seed": 5, "temperature": 1.0}
COMPLETION = {"model": "llava", "prompt": "The circle", "max_tokens": 12, "seed": 5, "temperature": 1.0}
DETAILED = {"max_new_tokens": 12, "details": True, "top_n_tokens": 1}
TGI = {"inputs": "The circle", "parameters": DETAILED}
SCHEMA = {
    "type": "object",
    "properties": {"value": {"enum": ["red", "blue"]}},
    "required": ["value"],
    "additionalProperties": False,
}
PAINT = {"name": "paint", "parameters": SCHEMA}
CUTS = ['"value"', "}"]  # within the arguments
CREATE = {wire.RESOURCE: "POST responses"}


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
    body = {**TGI, "parameters": {**DETAILED, **fields}}
    streamed = events(client.call({**body, "stream": True}).body)
    return client.call(body).json[0]["details"]["tokens"], [each["token"] for each in streamed]


@pytest.mark.parametrize("ask", [chat_logprobs, completion_logprobs, tgi_tokens])
def test_a_stop_string_that_never_comes_changes_no_token(client: Client, ask: Callable[..., Any]) -> None:
    """With a stop string that does not occur, each token has its own text as without one, whole and streamed."""
    whole, streamed = ask(client)
    assert whole

    assert ask(client, stop=[NEVER]) == (whole, streamed)


def test_tokens_of_a_stop_string_have_their_own_texts(client: Client) -> None:
    """The text ends before the stop string; the generated tokens have texts that add up."""
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
    """Text that cannot begin a stop string is streamed as early as without one."""
    streamed = [
        [each["token"]["text"] for each in events(client.call({**TGI, "stream": True, "parameters": parameters}).body)]
        for parameters in ({"max_new_tokens": 12}, {"max_new_tokens": 12, "stop": [NEVER]})
    ]

    assert streamed[0] == streamed[1]


@pytest.mark.parametrize("stop", CUTS)
def test_a_call_that_a_stop_string_cuts_does_not_count_as_one(client: Client, stop: str) -> None:
    """An answer whose call is cut does not end with tool_calls, since clients would parse the arguments."""
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
    """A response with a cut call is incomplete, and the session continues without a result of it."""
    tool = {"type": "function", **PAINT}
    body = {"model": "llava", "input": "Hello", "seed": 5, "tools": [tool], "tool_choice": "required", "stop": [stop]}

    whole = client.call(body, CREATE).json
    streamed = read(client.call({**body, "stream": True}, CREATE).body)[-1]
    following = client.call({"model": "llava", "input": "And now?", "previous_response_id": whole["id"]}, CREATE)

    for response in (whole, streamed["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "stop"})
        assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert streamed["type"] == "response.incomplete"
    assert following.json["status"] == "completed"


def test_a_call_before_the_stop_string_is_whole(client: Client) -> None:
    """A stop string that does not occur, or occurs after the call, does not change the call."""
    tool = {"type": "function", "function": PAINT}
    body = {**CHAT, "max_tokens": 100, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}

    found = [client.call({**body, **more}).json["choices"][0] for more in ({}, {"stop": [NEVER]})]

    assert found[0] == found[1]
    assert found[0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stop", CUTS)
def test_each_of_several_choices_with_a_cut_call_ends_with_stop(client: Client, stop: str) -> None:
    """Whole and streamed answers agree that each choice with a cut call ends with stop."""
    tool = {"type": "function", "function": PAINT}
    body = {**CHAT, "n": 2, "max_tokens": 100, "tools": [tool], "tool_choice": "required", "stop": [stop]}

    whole = client.call(body).json["choices"]
    streamed = [each["choices"][0] for each in events(client.call({**body, "stream": True}).body)]

    assert [choice["finish_reason"] for choice in whole] == ["stop"] * 2
    ends = {choice["index"]: choice["finish_reason"] for choice in streamed if choice["finish_reason"]}
    assert ends == {0: "stop", 1: "stop"}
    assert all(choice["message"]["tool_calls"] for choice in whole)


def test_a_background_response_with_a_cut_call_is_incomplete(client: Client) -> None:
    """The stored response and its item say so, and the chain goes on without a result of the call."""
    tool = {"type": "function", **PAINT}
    body = {"model": "llava", "input": "Hello", "background": True, "tools": [tool], "tool_choice": "required"}
    response_id = client.call({**body, "stop": ['"value"']}, CREATE).json["id"]

    assert client.call({}, {wire.RESOURCE: background.run_resource(response_id)}).status == 200

    response = client.call({}, {wire.RESOURCE: f"GET responses/{response_id}"}).json
    following = client.call({"model": "llava", "input": "And now?", "previous_response_id": response_id}, CREATE)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "stop"})
    assert [(item["type"], item["status"]) for item in response["output"]] == [("function_call", "incomplete")]
    assert following.json["status"] == "completed"


def test_a_call_that_stop_answer_cuts_ends_with_stop(make_client: ServiceFactory, endless_llava: EndlessModel) -> None:
    """A call cut by stop_answer or a stop string ends with stop; the session continues without a result of it."""
    client = make_client(endless_llava)
    sid = client.open()
    function = {name: WRITE[name] for name in ("name", "parameters")}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    hold = Hold(endless_llava, num_steps=60)
    asked = client.send({**CHAT, **tools, "max_tokens": 150, "stream": True}, {wire.SESSION_ID: sid})
    hold.wait()

    assert stop(client, sid)
    hold.release()

    choices = [each["choices"][0] for each in events(asked.wait().body)]
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert deltas
    with pytest.raises(json.JSONDecodeError):
        json.loads("".join(delta["function"]["arguments"] for delta in deltas))
    assert choices[-1]["finish_reason"] == "stop"
    following = client.call({**CHAT, "messages": [{"role": "user", "content": "And now?"}]}, {wire.SESSION_ID: sid})
    assert following.status == 200


def test_a_stored_answer_is_one_token_with_its_text(make_client: ServiceFactory, tmp_path: Path) -> None:
    """A repeated request gets the stored text as one token, also in the log probabilities of its stream."""
    client = make_client(journal=DirectoryJournal(tmp_path, JournalSettings()))
    headers = {wire.SESSION_ID: client.open(), wire.INVOCATION_ID: "first"}
    text = client.call(CHAT, headers).json["choices"][0]["message"]["content"]

    again = client.call({**CHAT, "logprobs": True, "stream": True}, headers)

    assert again.headers["x-torchmoor-cache-tier"] == "answer"
    chunks = [each["choices"][0]["logprobs"] for each in events(again.body)]
    assert [entry["token"] for each in chunks if each for entry in each["content"]] == [text]
