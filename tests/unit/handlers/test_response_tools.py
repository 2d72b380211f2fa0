"""Tools and reasoning in OpenAI's Responses API, by the chat service with the demo model."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from handlers.journal.directory import DirectoryJournal
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.conftest import Client, Exchange, ServiceFactory
from tests.unit.handlers.test_response_form import read
from torchmoor.wire import headers as wire

CREATE = {wire.RESOURCE: "POST responses"}
SCHEMAS: dict[str, Any] = {
    name: {
        "type": "object",
        "properties": {"value": {"enum": values}},
        "required": ["value"],
        "additionalProperties": False,
    }
    for name, values in {"paint": ["red", "blue"], "count": [1, 2]}.items()
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()
]
TOOLS[0]["strict"] = True
SAMPLED = {"temperature": 1.0, "seed": 3, "max_output_tokens": 400}


def respond(client: Client, said: Any, **fields: Any) -> Exchange:
    return client.call({"model": "llava", "input": said, **SAMPLED, **fields}, CREATE)


def calls_of(response: Any) -> list[Any]:
    """Return the calls of a response, its arguments checked by the tools' schemas."""
    assert response["status"] == "completed", response
    for call in response["output"]:
        assert (call["type"], call["status"]) == ("function_call", "completed")
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    return list(response["output"])


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"paint", "count"}),
        ({"type": "function", "name": "count"}, {"count"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "paint"}]},
            {"paint"},
        ),
    ],
)
def test_answer_that_must_call_calls(client: Client, choice: Any, names: set[str]) -> None:
    """The answer is one call that fits the tool's schema; the stream has the same call in deltas."""
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}

    whole = respond(client, "Hello", **fields).json
    events = read(respond(client, "Hello", stream=True, **fields).body)

    [call], [streamed] = calls_of(whole), calls_of(events[-1]["response"])
    assert call["name"] in names
    assert [streamed[name] for name in ("name", "arguments")] == [call[name] for name in ("name", "arguments")]
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert ("".join(deltas), len(deltas) > 1) == (call["arguments"], True)
    assert whole["tool_choice"] == choice
    assert whole["tools"] == [{"description": None, "strict": False, **each} for each in TOOLS]


def test_ids_of_items_begin_as_openais(client: Client) -> None:
    """Ids of items have OpenAI's prefixes in responses, streams and lists.

    An earlier version's msg_ id names the same item.
    """
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = respond(client, "Hello", **fields).json
    events = read(respond(client, "Hello", stream=True, **fields).body)
    streamed = {event["item_id"] for event in events if "item_id" in event}
    streamed |= {event["item"]["id"] for event in events if "item" in event}
    stored = client.call(None, {wire.RESOURCE: f"GET responses/{whole['id']}"}).json

    assert whole["output"][0]["id"].startswith("fc_")
    assert stored["output"] == whole["output"]
    assert streamed == {events[-1]["response"]["output"][0]["id"]}
    assert streamed.pop().startswith("fc_")

    said = [{"type": "reasoning", "summary": []}, {"role": "user", "content": "Hello"}, *whole["output"]]
    talk = client.call({"items": said}, {wire.RESOURCE: "POST conversations"}).json["id"]
    items = client.call(None, {wire.RESOURCE: f"GET conversations/{talk}/items?order=asc"}).json["data"]
    assert [item["id"].partition("_")[0] for item in items] == ["rs", "msg", "fc"]
    for item in items:
        for name in (item["id"], "msg_" + item["id"].partition("_")[2]):
            assert client.call(None, {wire.RESOURCE: f"GET conversations/{talk}/items/{name}"}).json == item
            page = client.call(None, {wire.RESOURCE: f"GET conversations/{talk}/items?order=asc&after={name}"}).json
            assert page["data"] == items[items.index(item) + 1 :]
    assert client.call(None, {wire.RESOURCE: f"GET conversations/{talk}/items/msg_x"}).status == 404
    assert client.call(None, {wire.RESOURCE: f"GET conversations/{talk}/items?after=msg_x"}).status == 400


def test_a_function_that_is_named_is_called_once(client: Client) -> None:
    """The answer ends after the named function's call, although parallel calls are allowed; so do chat completions."""
    function = {"type": "function", "function": {"name": "paint", "parameters": SCHEMAS["paint"]}}
    for seed in range(3):
        sampled = {"temperature": 50.0, "seed": seed}
        response = respond(client, "Hello", tools=TOOLS, tool_choice={"type": "function", "name": "count"}, **sampled)
        body = {
            "messages": [{"role": "user", "content": "Hello"}],
            "tools": [function],
            "tool_choice": {"type": "function", "function": {"name": "paint"}},
        }
        chat = client.call({**body, **sampled, "max_tokens": 400}).json["choices"][0]

        assert len(calls_of(response.json)) == 1
        assert (len(chat["message"]["tool_calls"]), chat["finish_reason"]) == (1, "tool_calls")


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_results_continue_a_call(make_client: ServiceFactory, tmp_path: Path, is_rebuilt: bool) -> None:
    """A result continues its call by previous_response_id, also from the journal, as in the whole conversation."""

    def make() -> Client:
        return make_client(journal=DirectoryJournal(tmp_path, JournalSettings()))

    client = make()
    first = respond(client, "Hello", tools=TOOLS, tool_choice="required", parallel_tool_calls=False).json
    [call] = calls_of(first)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Done"}
    asked = [{"role": "user", "content": "Hello"}, *first["output"], result]
    whole = respond(client, asked, tools=TOOLS, store=False).json
    if is_rebuilt:
        client = make()

    second = respond(client, [result], tools=TOOLS, previous_response_id=first["id"]).json
    unstored = respond(client, [result], tools=TOOLS, previous_response_id=first["id"], store=False).json

    for response in (second, unstored):
        assert response["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        assert response["output"][0]["content"] == whole["output"][0]["content"]


def test_other_kinds_of_tools_change_no_prompt(client: Client) -> None:
    """The Codex CLI sends some with each request; the model reads the same prompt as without them."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    patch = {"type": "custom", "name": "apply_patch", "format": grammar}
    others = [patch, {"type": "web_search", "external_web_access": True}]

    plain = respond(client, "Hello", tools=TOOLS).json
    answer = respond(client, "Hello", tools=[others[0], *TOOLS, others[1]]).json

    assert answer["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    assert answer["tools"] == plain["tools"]
    assert answer["output"][0]["content"] == plain["output"][0]["content"]


def test_a_call_in_a_namespace_continues(make_client: ServiceFactory, tmp_path: Path) -> None:
    """The model reads the same prompt from memory, from the journal and in a conversation that is sent."""

    def make() -> Client:
        return make_client(journal=DirectoryJournal(tmp_path, JournalSettings()))

    client = make()
    fields = {"tools": [{"type": "namespace", "name": "mcp__docs", "description": "Docs", "tools": TOOLS}]}
    choice = {"type": "function", "name": "mcp__docs__count"}
    first = respond(client, "Hello", tool_choice=choice, **fields).json
    [call] = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Done"}
    sent = respond(client, [{"role": "user", "content": "Hello"}, call, result], store=False, **fields).json
    assert (call["namespace"], call["name"]) == ("mcp__docs", "count")
    jsonschema.validate(json.loads(call["arguments"]), SCHEMAS["count"])

    for each in (client, make()):
        chained = respond(each, [result], previous_response_id=first["id"], **fields).json
        assert chained["usage"]["input_tokens"] == sent["usage"]["input_tokens"]
        assert chained["output"][0]["content"] == sent["output"][0]["content"]


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_result_needs_its_call(client: Client, is_stored: bool) -> None:
    """A result without a matching call is refused, alone and in a chain."""
    first = respond(client, "Hello").json
    result = {"type": "function_call_output", "call_id": "call_x", "output": "Done"}

    for fields in ({}, {"previous_response_id": first["id"]}):
        answer = respond(client, [result], store=is_stored, **fields)
        assert (answer.status, answer.json["error"]["param"]) == (400, "input")
        assert "call_x" in answer.json["error"]["message"]


def test_a_result_that_is_added_to_a_conversation_needs_its_call(client: Client) -> None:
    """A result needs its call in the opening items, those added with it, or earlier ones; a refusal changes nothing."""
    call = {"type": "function_call", "call_id": "call_x", "name": "paint", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_x", "output": "Done"}
    opened = client.call({"items": [result]}, {wire.RESOURCE: "POST conversations"})
    assert (opened.status, opened.json["error"]["param"]) == (400, "items")
    talk = client.call({}, {wire.RESOURCE: "POST conversations"}).json["id"]
    add = {wire.RESOURCE: f"POST conversations/{talk}/items"}

    refused = client.call({"items": [result, call]}, add)
    assert (refused.status, refused.json["error"]["param"]) == (400, "items")
    assert "call_x" in refused.json["error"]["message"]
    assert client.call(None, {wire.RESOURCE: f"GET conversations/{talk}/items"}).json["data"] == []
    for items in ([call], [result], [{**call, "call_id": "call_y"}, {**result, "call_id": "call_y"}]):
        assert client.call({"items": items}, add).status == 200
    assert client.call({"items": [call, result]}, {wire.RESOURCE: "POST conversations"}).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_serch"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"reasoning": {"effort": "endless"}}, "reasoning"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 1}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": ["x"]}]}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "summary": [], "thought": "x"}]}, "input[0]"),
    ],
)
def test_bad_fields_are_named(client: Client, fields: dict[str, Any], param: str) -> None:
    """The error names each wrong field, also an effort for a model whose template marks no reasoning."""
    answer = respond(client, fields.pop("input", "Hello"), **fields)

    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    if fields.get("tools") == [{"type": "web_serch"}]:
        assert (
            answer.json["error"]["message"] == "tools[0] must be an object of type function or custom, not 'web_serch'"
        )
