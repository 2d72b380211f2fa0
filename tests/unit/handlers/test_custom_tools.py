"""Custom tools, whose input is a text: their fields, their grammar, and their calls in both of OpenAI's APIs."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handlers.chat.answer_parts import AnswerMessage, AnswerReader
from handlers.chat.custom_input import CustomInput
from handlers.chat.tools import constrain, read_tools
from handlers.engine.contract import GrammarText
from handlers.engine.grammar import GrammarCompiler, GrammarFailed
from handlers.errors import InvalidRequest
from handlers.journal.directory import DirectoryJournal
from handlers.models.answer_style import AnswerStyle
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.conftest import Client, ServiceFactory
from tests.unit.handlers.test_chat_completion import chat, events, user
from tests.unit.handlers.test_response_form import read
from tests.unit.handlers.test_response_tools import TOOLS as FUNCTIONS
from tests.unit.handlers.test_response_tools import respond
from tests.unit.handlers.test_tools import HERMES, SAMPLED, THINKING, tool
from torchmoor.wire import headers as wire

PATTERN = r"^(SELECT|COUNT) \w{1,4}\n?$"
REGEX: dict[str, Any] = {"type": "grammar", "grammar": {"syntax": "regex", "definition": PATTERN}}
LARK: dict[str, Any] = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
ONCE: dict[str, Any] = {"parallel_tool_calls": False}


def custom(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **fields}}


def flat(each: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of chat completions in the form of the Responses API."""
    own = dict(each[each["type"]])
    if "grammar" in own.get("format", {}):
        own["format"] = {"type": "grammar", **own["format"]["grammar"]}
    return {"type": each["type"], **own}


QUERY = custom("query", description="Query the table", format=REGEX)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(), is_ascii=st.booleans(), space=st.sampled_from(["", " ", "\n"]), cuts=st.lists(st.integers(0, 60))
)
def test_input_is_read_piece_by_piece(text: str, is_ascii: bool, space: str, cuts: list[int]) -> None:
    """The pieces together are the text, wherever its JSON is cut, with characters written as escapes or not."""
    written = json.dumps(text, ensure_ascii=is_ascii)
    arguments = f'{{{space}"input"{space}:{space}{written}{space}}}'
    reader, start, found = CustomInput(), 0, ""

    for end in [*sorted(each for each in cuts if 0 < each < len(arguments)), len(arguments)]:
        found += reader.read(arguments[start:end]) if end > start else ""
        start = max(start, end)

    assert found == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a", "more": "b"}', "a"),
        ('{"code": "a\\n"}', '{"code": "a\\n"}'),  # not what was asked for: the client gets what the model wrote
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ("{}", "{}"),
        (r'{"input": "\ud800x\udc00"}', "\ufffdx\ufffd"),
        (r'{"input": "\ud83d\ude00"}', "\U0001f600"),
        (r'{"input": "\q\uzz"}', r"\q\uzz"),
        (r'{"input": "a\ud83d\uzz b"}', "a\ufffd\\uzz b"),
        ('{"input": "cut \\u00', "cut "),
    ],
)
def test_other_arguments_stay_as_they_are(arguments: str, text: str) -> None:
    whole, pieces = CustomInput(), CustomInput()

    assert whole.read(arguments) == text
    assert "".join(map(pieces.read, arguments)) == text


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>\n{"name": "run", "arguments": {"input": "a\\"}"}}\n</tool_call>', [("run", 'a"}', True)]),
        ('<tool_call>{"name": "run", "arguments": "ls -l"}</tool_call>', [("run", "ls -l", True)]),
        ('<tool_call>{"name": "other", "arguments": {"input": "a"}}</tool_call>', [("other", '{"input": "a"}', False)]),
        ('<tool_call>{"name": "run"}</tool_call>', [("run", "{}", True)]),
    ],
)
def test_calls_of_custom_tools_have_their_input(text: str, calls: list[tuple[str, str, bool]]) -> None:
    """Only the calls of custom tools have an input; their arguments may also be a text itself."""
    reader, message = AnswerReader(HERMES, has_tools=True, name="x", custom={"run"}), AnswerMessage()

    for part in [*(part for char in text for part in reader.read(char)), *reader.finish()]:
        message.add(part)

    assert [(call.name, call.arguments, call.is_custom) for call in message.calls] == calls
    assert message == reader.message


@pytest.mark.parametrize("is_flat", [False, True])
def test_the_model_reads_a_custom_tool_as_a_function(is_flat: bool) -> None:
    """The function has one text, which must match the pattern."""
    tools = [custom("note"), QUERY, custom("text", format={"type": "text"})]

    use = read_tools({"tools": list(map(flat, tools)) if is_flat else tools}, is_flat=is_flat)

    assert use is not None
    functions = {each["function"]["name"]: each["function"] for each in use.definitions}
    assert use.custom == set(functions) == {"note", "query", "text"}
    assert use.strict == {"query"}
    assert functions["query"]["description"] == "Query the table"
    assert functions["query"]["parameters"]["properties"] == {
        "input": {"type": "string", "pattern": f"^(?:{PATTERN})$"}
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0]"),
        ({"tools": [custom("a b")]}, "tools[0].custom.name"),
        ({"tools": [custom("x", description=1)]}, "tools[0].custom.description"),
        ({"tools": [custom("x", format="text")]}, "tools[0].custom.format"),
        ({"tools": [custom("x", format=LARK)]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [custom("x", format={"type": "grammar"})]}, "tools[0].custom.format.grammar"),
        ({"tools": [custom("x", format={**REGEX, "grammar": {"syntax": "regex"}})]}, "tools[0].custom.format.grammar"),
        ({"tools": [custom("x"), tool("x")]}, "tools[1].function.name"),
        ({"tools": [tool("x"), custom("x")]}, "tools[1].custom.name"),
        ({"tools": [custom("x")], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [tool("x")], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
    ],
)
def test_wrong_custom_tools_name_their_field(client: Client, fields: dict[str, Any], param: str) -> None:
    answer = client.call(chat(user("Hello"), **fields))

    assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_a_pattern_that_cannot_be_enforced_is_refused(client: Client) -> None:
    """The reason is the library's, whether the model must call the tool or may."""
    tools = [custom("x", format={"type": "grammar", "grammar": {"syntax": "regex", "definition": "a(?=b)"}})]

    for choice in ("auto", "required"):
        answer = client.call(chat(user("Hello"), tools=tools, tool_choice=choice))

        assert (answer.status, answer.json["error"]["param"]) == (400, "tools"), answer.body


BEGUN = replace(THINKING, begins_in_thought=True)
CALL = '<tool_call>\n{{"name": "query", "arguments": {{"input":"{}"}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("Just text, <tool_ is not a call", True),
        (CALL.format("SELECT abc"), True),
        ("<think>\nHm\n</think>\n\nI look.\n" + CALL.format("COUNT a\\n") + "\n" + CALL.format("COUNT b") + "\n", True),
        ('Other: <tool_call>\n{"name": "weather", "arguments": {"any": [1]}}\n</tool_call>', True),
        (CALL.format("DROP abc"), False),
        ('<tool_call>\n{"name": "query", "arguments": {"text":"SELECT abc"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "query", "arguments": {"input":"COUNT', False),
        ("", True),
        ("No <think> at the beginning", True),
        ("<thin <think> is text: <tool_call>", False),
        ("<think>I may use <tool_call> here.</think> ok", True),
        (" \n<think>No <tool_call> now</think>\n\n\n" + CALL.format("COUNT a") + " </think> ok", True),
        ("<think>\n<tool_call></think>" + CALL.format("DROP abc"), False),
        ("<think>\nHm</think> Other: <tool_call>", False),
    ],
)
def test_an_answer_that_may_call_follows_the_pattern(
    compiler: GrammarCompiler, tiny_llava: Any, text: str, is_allowed: bool
) -> None:
    """The model may write any text, but a call of the custom tool only with an input that matches its pattern."""
    assert may_be_whole(compiler, tiny_llava, THINKING, text) == is_allowed


@pytest.mark.parametrize(
    ("style", "text", "is_allowed"),
    [
        (BEGUN, "I may use <tool_call> here.\n</think>\n\n" + CALL.format("COUNT a") + " <tool_", True),
        (BEGUN, "<tool_call></think>" + CALL.format("DROP abc"), False),
        (HERMES, "<think>\n" + CALL.format("COUNT a"), True),
        (HERMES, "<think>I may use <tool_call> here.</think>", False),
    ],
)
def test_only_reasoning_may_have_the_mark_of_a_call(
    compiler: GrammarCompiler, tiny_llava: Any, style: AnswerStyle, text: str, is_allowed: bool
) -> None:
    """The prompt may begin the reasoning. An answer of a model without reasoning has none."""
    assert may_be_whole(compiler, tiny_llava, style, text) == is_allowed


def may_be_whole(compiler: GrammarCompiler, model: Any, style: AnswerStyle, text: str) -> bool:
    """Return whether the grammar of an answer that may call allows this text as a whole answer."""
    return is_whole(compiler, model, constrain(read_tools({"tools": [tool("weather"), QUERY]}), None, style), text)


def is_whole(compiler: GrammarCompiler, model: Any, source: GrammarText | None, text: str) -> bool:
    """Return whether a grammar allows this text as a whole answer."""
    assert source is not None
    grammar = compiler.compile(source)
    try:
        state = grammar.begin(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    except GrammarFailed:
        return False
    return may_end(state.mask(), model)


def may_end(mask: bytes, model: Any) -> bool:
    [token] = model.eos_token_ids
    return bool(mask[token // 8] >> token % 8 & 1)


def test_without_a_pattern_an_answer_is_free() -> None:
    """A custom tool of any text needs no grammar, so requests that work without grammars work with it."""
    assert constrain(read_tools({"tools": [custom("note")]}), None, HERMES) is None


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "custom": {"name": "query"}}, "query"])
def test_chat_completions_call_a_custom_tool(client: Client, choice: Any) -> None:
    """The call has the input as text, whole and in the stream's deltas; the result continues the conversation."""
    body = chat(user("How many?"), tools=[QUERY], tool_choice=choice, **ONCE, **SAMPLED)

    [whole] = client.call(body).json["choices"]
    streamed = [event["choices"][0] for event in events(client.call({**body, "stream": True}).body)]
    [call] = whole["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Three"}
    answer = client.call(chat(user("How many?"), whole["message"], result, tools=[QUERY]))

    assert (whole["finish_reason"], call["type"], call["custom"]["name"]) == ("tool_calls", "custom", "query")
    assert re.fullmatch(PATTERN, call["custom"]["input"])
    deltas = [piece["delta"]["tool_calls"][0] for piece in streamed if "tool_calls" in piece["delta"]]
    assert (deltas[0]["type"], deltas[0]["custom"]) == ("custom", {"name": "query", "input": ""})
    assert "".join(each["custom"]["input"] for each in deltas) == call["custom"]["input"]
    assert len(deltas) > 2
    assert streamed[-1]["finish_reason"] == "tool_calls"
    assert answer.status == 200, answer.body


@pytest.mark.parametrize(
    "call", [{"type": "custom", "custom": {"name": "x"}}, {"id": "c", "type": "custom", "custom": {"name": "x"}}]
)
def test_a_wrong_call_of_a_custom_tool_is_refused(client: Client, call: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [call]}

    answer = client.call(chat(user("Hello"), said, tools=[QUERY]))

    assert answer.status == 400
    assert answer.json["error"]["param"].startswith("messages[1].tool_calls[0]")


def test_a_session_calls_a_custom_tool(client: Client) -> None:
    """A turn of the session API has the input beside the name."""
    session = client.call({"requestType": "NEW_SESSION"}).json["session_id"]
    turn = {"type": "send_text_prompt", "session_id": session, "tools": [QUERY], "tool_choice": "required", **ONCE}

    [call] = client.call({**turn, "prompt_text": "How many?"}).json["tool_calls"]
    answer = client.call(
        {
            "type": "send_text_prompt",
            "session_id": session,
            "tool_results": [{"tool_call_id": call["id"], "content": "3"}],
        }
    )

    assert set(call) == {"id", "name", "input"}
    assert re.fullmatch(PATTERN, call["input"])
    assert answer.status == 200, answer.body


def test_responses_call_a_custom_tool(make_client: ServiceFactory, tmp_path: Path) -> None:
    """The item, its events and its result are OpenAI's; the chain continues from memory and from the journal."""

    def make() -> Client:
        return make_client(journal=DirectoryJournal(tmp_path, JournalSettings()))

    client, tools = make(), [flat(QUERY), *FUNCTIONS]
    choice = {"type": "custom", "name": "query"}
    first = respond(client, "Hello", tools=tools, tool_choice=choice).json
    streamed = read(respond(client, "Hello", tools=tools, tool_choice=choice, stream=True).body)
    [call] = first["output"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done"}
    sent = respond(client, [{"role": "user", "content": "Hello"}, call, result], store=False, tools=tools).json

    assert (call["type"], call["status"], call["name"]) == ("custom_tool_call", "completed", "query")
    assert call["id"].startswith("ctc_")
    assert re.fullmatch(PATTERN, call["input"])
    assert first["tools"][0] == flat(QUERY)
    kinds = [event["type"] for event in streamed]
    assert kinds[2] == "response.output_item.added"
    assert streamed[2]["item"]["input"] == ""
    deltas = [each["delta"] for each in streamed if each["type"] == "response.custom_tool_call_input.delta"]
    [done] = [each for each in streamed if each["type"] == "response.custom_tool_call_input.done"]
    assert ("".join(deltas), len(deltas) > 1) == (call["input"], True)
    assert done["input"] == call["input"]
    assert streamed[-1]["response"]["output"][0]["input"] == call["input"]
    for each in (client, make()):
        chained = respond(each, [result], previous_response_id=first["id"], tools=tools).json
        assert chained["usage"]["input_tokens"] == sent["usage"]["input_tokens"]
        assert chained["output"][0]["content"] == sent["output"][0]["content"]
    again = client.call(None, {wire.RESOURCE: f"GET responses/{streamed[-1]['response']['id']}?stream=true"})
    assert [each["type"] for each in read(again.body)] == kinds


def test_responses_show_the_model_no_lark_grammar() -> None:
    """Codex sends one with each request. Its tool is left out there, as are tools that OpenAI's servers run."""
    patch = flat(custom("apply_patch", format=LARK))

    assert read_tools({"tools": [patch]}, is_flat=True) is None
    with pytest.raises(InvalidRequest, match="lark") as refused:
        read_tools(
            {"tools": [patch, FUNCTIONS[0]], "tool_choice": {"type": "custom", "name": "apply_patch"}}, is_flat=True
        )
    assert refused.value.param == "tool_choice"
