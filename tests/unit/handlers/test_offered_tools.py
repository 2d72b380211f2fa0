"""Tools of the Responses API that are not functions, and functions in namespaces, as the Codex CLI sends them."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from openai.types.responses import ResponseFunctionToolCall, Tool

from handlers.chat.dialects.response_form import ResponseForm
from handlers.chat.items import parse_input
from handlers.chat.messages import ToolCall
from handlers.chat.tools import ToolUse, read_tools
from handlers.errors import InvalidRequest
from tests.unit.handlers.conftest import make_incoming, parse
from tests.unit.handlers.test_response_form import read, split, summarize
from torchmoor.wire import headers as wire

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'}
COUNT: dict[str, Any] = {
    "type": "function",
    "name": "count",
    "description": "Count",
    "strict": False,
    "parameters": {"type": "object", "properties": {"value": {"type": "integer"}}},
}
PAINT = {**COUNT, "name": "paint"}
OTHERS: list[dict[str, Any]] = [
    {"type": "custom", "name": "apply_patch", "description": "Edit files", "format": GRAMMAR},
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation", "output_format": "png"},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "description": "Search", "parameters": {"type": "object"}},
]
NAMESPACE = {
    "type": "namespace",
    "name": "mcp__docs",
    "description": "Tools in the mcp__docs namespace.",
    "tools": [COUNT, OTHERS[0]],
}
MIXED = [OTHERS[0], PAINT, *OTHERS[1:], NAMESPACE, {**NAMESPACE, "name": "empty", "tools": OTHERS}]
CALL = '<tool_call>\n{"name": "mcp__docs__count", "arguments": {"value": 3}}\n</tool_call>'


def ask(**fields: Any) -> tuple[ToolUse | None, ResponseForm]:
    """Return what a response's request offers to the model, and the form of its answer."""
    body = {"model": "llava", "input": "Hello", "store": False, **fields}
    command = parse(make_incoming({wire.RESOURCE: "POST responses"}, body))
    command.form.place("ts-seq-a", 3)
    return command.parameters.tools, command.form


def types_of_openai() -> Iterator[str]:
    """Yield the type of each tool that OpenAI's client can send."""
    union, _ = get_args(Tool)
    for model in get_args(union):
        yield from get_args(model.model_fields["type"].annotation)


def names(tools: ToolUse | None) -> list[str]:
    return [] if tools is None else [definition["function"]["name"] for definition in tools.definitions]


@pytest.mark.parametrize("choice", [None, "auto", "none", "required"])
def test_tools_that_are_not_functions_are_not_offered(choice: str | None) -> None:
    """The model is offered the functions, also those in namespaces, and the response lists the same ones."""
    tools, form = ask(tools=MIXED, tool_choice=choice)

    assert names(tools) == ([] if choice == "none" else ["paint", "mcp__docs__count"])
    assert (tools is not None and tools.must_call) == (choice == "required")
    for event in read(form.begin()):
        assert event["response"]["tools"] == [PAINT, {**NAMESPACE, "tools": [COUNT]}]


def test_without_a_function_the_model_is_offered_no_tools() -> None:
    tools, form = ask(tools=OTHERS)

    assert tools is None
    assert read(form.begin())[0]["response"]["tools"] == []


def test_each_type_of_openais_client_is_known() -> None:
    """Only a type that OpenAI does not have is taken for a mistake."""
    kinds = set(types_of_openai())

    assert {"function", "namespace", "custom", "web_search"} < kinds
    for kind in kinds - {"function", "namespace", "custom"}:
        assert read_tools({"tools": [{"type": kind}]}, is_flat=True) is None


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "custom", "name": "apply_patch"}, "a custom tool that has a lark grammar or is not among"),
        ({"type": "web_search"}, "a tool of type web_search, but this server offers only functions and custom tools"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "paint"}, OTHERS[1]]},
            "a tool of type web_search, but this server offers only functions and custom tools",
        ),
    ],
)
def test_a_choice_of_a_tool_that_is_not_offered_is_refused(choice: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        ask(tools=MIXED, tool_choice=choice)

    assert refused.value.param == "tool_choice"


def test_a_required_call_needs_a_tool() -> None:
    with pytest.raises(InvalidRequest, match="no tool that the model can call is among the 'tools'") as refused:
        ask(tools=OTHERS, tool_choice="required")

    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"name": "f"}], "tools[0]"),
        ([{"type": ["custom"]}], "tools[0]"),
        ([{"type": "web_serch"}], "tools[0]"),
        ([*OTHERS, {"type": "function"}], "tools[5].name"),
        ([{**NAMESPACE, "name": "a b"}], "tools[0].name"),
        ([{**NAMESPACE, "tools": {}}], "tools[0].tools"),
        ([{**NAMESPACE, "tools": [{"name": "f"}]}], "tools[0].tools[0]"),
        ([{**NAMESPACE, "tools": [NAMESPACE]}], "tools[0].tools[0]"),
        ([NAMESPACE, {**COUNT, "name": "mcp__docs__count"}], "tools[1].name"),
    ],
)
def test_a_malformed_tool_names_its_field(tools: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ask(tools=tools)

    assert refused.value.param == param


def test_too_many_functions_are_refused() -> None:
    """Functions in namespaces count towards the limit; tools that are not offered do not."""
    functions = [{**COUNT, "name": f"f{number}"} for number in range(128)]
    namespace = {**NAMESPACE, "tools": functions}

    assert len(names(ask(tools=[*OTHERS, namespace])[0])) == 128
    with pytest.raises(InvalidRequest, match="at most 128 tools") as refused:
        ask(tools=[namespace, PAINT])
    assert refused.value.param == "tools"


def test_chat_completions_have_functions_and_custom_tools_only() -> None:
    """A client of chat completions sends no other tools unasked."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "tools": [{"type": "web_search"}]}

    with pytest.raises(InvalidRequest) as refused:
        parse(make_incoming({}, body))

    assert refused.value.param == "tools[0]"


def test_a_call_names_the_namespace_apart() -> None:
    """Clients find a function by its namespace and its name, which are apart wherever the call is shown."""
    _, form = ask(tools=MIXED)
    tokens, reader = split([CALL[:30], CALL[30:60], CALL[60:]])

    summary = summarize(tokens[-1:], reader)
    data = form.begin() + b"".join(form.token(token, None) for token in tokens[:-1])
    answer, response = form.record(summary)
    events = read(data + form.token(tokens[-1], summary))
    repeated = read(ask()[1].repeat(answer, response, -1))

    shown = [event["item"] for event in events if "item" in event] + events[-1]["response"]["output"]
    calls = [ResponseFunctionToolCall.model_validate(item) for item in shown]
    assert [(call.namespace, call.name) for call in calls] == [("mcp__docs", "count")] * 3
    assert [event["name"] for event in events if event["type"].endswith("arguments.done")] == ["count"]
    assert json.loads(calls[-1].arguments) == {"value": 3}
    assert [event.get("item") for event in repeated] == [event.get("item") for event in events]
    assert repeated[-1]["response"]["output"] == events[-1]["response"]["output"]


def test_a_call_in_another_namespace_is_another_answer() -> None:
    """A stream that began with a call does not continue with a stored call of a namesake, which has the same id."""
    tools = [NAMESPACE, {**NAMESPACE, "name": "mcp__other"}]
    stored, begun = ask(tools=tools)[1], ask(tools=tools)[1]
    tokens, reader = split([CALL.replace("docs", "other")])
    answer, response = stored.record(summarize(tokens, reader))
    begun.token(split([CALL[:60], CALL[60:]])[0][0], None)

    begun.restore(answer, response)

    assert not begun.has_begun_as_restored()


def test_the_model_reads_the_name_that_it_called() -> None:
    """In a later prompt a call has the name by which the model called the function; the item keeps both names."""
    call = {"type": "function_call", "call_id": "c", "name": "count", "namespace": "mcp__docs", "arguments": "{}"}

    [item] = parse_input([call], 1)

    assert item.message.calls == (ToolCall("c", "mcp__docs__count", {}),)
    assert item.value == {**call, "status": "completed"}
    with pytest.raises(InvalidRequest):
        parse_input([{**call, "namespace": 7}], 1)
