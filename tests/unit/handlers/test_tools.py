"""Tools: their fields, the grammar of calls, and answers split into content and calls."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from handlers.chat.answer_parts import AnswerMessage, AnswerReader
from handlers.chat.messages import result_messages
from handlers.chat.tools import constrain, read_tools
from handlers.engine.contract import GrammarText
from handlers.engine.grammar import GrammarCompiler, GrammarFailed
from handlers.errors import InvalidRequest
from handlers.journal.directory import DirectoryJournal
from handlers.models.answer_style import CALL, THOUGHT, AnswerStyle, find_answer_style
from handlers.models.loader import load_model
from handlers.settings.journal import JournalSettings
from tests.torchserve.drawings import data_url
from tests.unit.handlers.test_chat_completion import chat, events, user
from torchmoor.proxy.api.reference import openai_schemas
from torchmoor.wire import headers as wire

HERMES = AnswerStyle(call=CALL, knows_tools=True)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}


def tool(name: str, schema: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"The {name}", "parameters": schema}}


TOOLS = [tool("weather", WEATHER), tool("paint", {**COLOUR, "additionalProperties": False})]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
SAMPLED = {"temperature": 1.0, "seed": 3, "max_tokens": 400}


def call_of(answer: Any) -> Any:
    """Return the choice of a chat completion that calls, its arguments checked by their tools' schemas."""
    assert answer.status == 200, answer.body
    [choice] = answer.json["choices"]
    for call in choice["message"]["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return choice


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "paint"}),
        ({"type": "function", "function": {"name": "paint"}}, {"paint"}),
        ({"function": {"name": "paint"}}, {"paint"}),  # TGI's forms
        ("weather", {"weather"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "weather"}}],
                },
            },
            {"weather"},
        ),
    ],
)
def test_answer_that_must_call_calls(client: Any, choice: Any, names: set[str]) -> None:
    """The answer is one call that fits the tool's schema, whatever the model prefers; the stream has the same call."""
    body = chat(user("Weather?"), tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **SAMPLED)
    jsonschema.validate(choice, openai_schemas.CHAT["properties"]["tool_choice"])

    whole = call_of(client.call(body))
    streamed = [event["choices"][0] for event in events(client.call({**body, "stream": True}).body)]

    [call] = whole["message"]["tool_calls"]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    assert call["function"]["name"] in names
    assert call["id"].startswith("call_")
    deltas = [piece["delta"]["tool_calls"][0] for piece in streamed if "tool_calls" in piece["delta"]]
    assert deltas[0]["function"] == {"name": call["function"]["name"], "arguments": ""}
    assert {delta["index"] for delta in deltas} == {0}
    assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
    assert len(deltas) > 3
    assert streamed[0]["delta"] == {"role": "assistant", "content": None}
    assert streamed[-1]["finish_reason"] == "tool_calls"
    assert "".join(piece["delta"].get("content") or "" for piece in streamed) == ""


def test_call_has_declared_arguments_only(client: Any) -> None:
    """Arguments are limited to declared ones, since frameworks send schemas that do not mention other properties."""
    for schema in (COLOUR, {"type": "object", "properties": {}}):
        body = chat(user("Paint!"), tools=[tool("paint", schema)], tool_choice="required", parallel_tool_calls=False)

        [choice] = client.call({**body, **SAMPLED}).json["choices"]

        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) == set(schema["properties"])


def test_model_that_may_call_answers_as_without_tools(client: Any) -> None:
    """`auto` does not force a call: the demo model, which knows no tools, answers in text; `none` shows it no tools."""
    free = client.call(chat(user("Hello")))
    none = client.call(chat(user("Hello"), tools=TOOLS, tool_choice="none"))
    auto = client.call(chat(user("Hello"), tools=TOOLS))

    assert none.json["choices"] == free.json["choices"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert none.json["usage"][count] == free.json["usage"][count]
    assert auto.json["usage"]["prompt_tokens"] > free.json["usage"]["prompt_tokens"]
    assert "tool_calls" not in auto.json["choices"][0]["message"]


def test_answer_follows_a_schema_or_calls(client: Any) -> None:
    """With a response_format and tools, an answer fits the schema or is a call."""
    format = {"type": "json_schema", "json_schema": {"name": "c", "schema": {**COLOUR, "additionalProperties": False}}}

    answer = client.call(chat(user("Paint"), tools=TOOLS, response_format=format, **SAMPLED))

    message = answer.json["choices"][0]["message"]
    if "tool_calls" in message:
        call_of(answer)
    else:
        jsonschema.validate(json.loads(message["content"]), COLOUR)


def test_results_of_calls_come_back(client: Any) -> None:
    """The conversation with a call and its result is rendered by the template."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Ulm", "days": 1}'},
    }
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Sunny <|end|>"}
    template = client.engine.runner.model.template

    answer = client.call(chat(user("Weather?"), said, result, tools=TOOLS))
    text = template.render(
        [
            {"role": "user", "content": "Weather?"},
            {
                **said,
                "content": "",
                "tool_calls": [{**call, "function": {"name": "weather", "arguments": {"city": "<|end|>"}}}],
            },
            {"role": "tool", "content": "Sunny <|end|></tool_response>"},
        ],
        TOOLS,
    )

    assert answer.status == 200, answer.body
    assert text.count("<|end|>") == 4
    assert text.count("</tool_response>") == 1
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "< |end|>"}}\n</tool_call>' in text


def test_session_keeps_calls_and_their_results(make_client: Any, tmp_path: Path) -> None:
    """A turn calls and the next one sends the result; another worker has the same conversation from the journal."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    first, second = (make_client(journal=journal, instance=name) for name in ("a", "b"))
    session = first.open()
    asked = {"type": "send_text_prompt", "session_id": session, "parameters": {"max_new_tokens": 200}, "tools": TOOLS}

    called = first.call({**asked, "prompt_text": "Weather?", "tool_choice": "required", "parallel_tool_calls": False})
    [call] = called.json["tool_calls"]
    result = [{"tool_call_id": call["id"], "content": "Sunny"}]
    answered = first.call({**asked, "tool_results": result})
    messages = first.session(session).messages
    asked_again = second.call({**asked, "prompt_text": "And then?"})

    assert called.json["response_text"] == ""
    jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    assert answered.status == asked_again.status == 200, answered.body
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_call_id"] == call["id"]
    assert second.session(session).messages[:4] == messages


def test_chat_completion_in_a_session_brings_results(client: Any) -> None:
    """With a session header, messages may be the result alone or repeat the conversation."""
    session = client.open()
    header = {"x-amzn-sagemaker-session-id": session}
    body = chat(user("Weather?"), tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **SAMPLED)

    said = call_of(client.call(body, header))["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Sunny"} for call in said["tool_calls"]]
    alone = client.call(chat(*results, tools=TOOLS), header)
    answer = {"role": "assistant", "content": alone.json["choices"][0]["message"]["content"]}
    whole = client.call(chat(user("Weather?"), said, *results, answer, user("Sure?"), tools=TOOLS), header)

    assert alone.status == whole.status == 200, whole.body
    assert [message["role"] for message in client.session(session).messages][:3] == ["user", "assistant", "tool"]


def test_results_in_a_session_may_have_images(client: Any, red: Any, blue: Any) -> None:
    """Each result has its own images, before its text; an image that was added before precedes the first result."""
    session = client.open()
    header = {"x-amzn-sagemaker-session-id": session}
    client.call(chat(user("Weather?"), tools=TOOLS, tool_choice="required", **SAMPLED), header)
    client.call({"type": "add_images", "session_id": session, "images": [data_url(blue)]})
    results = [
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": user("two", red)["content"]},
    ]

    answered = client.call(chat(*results, tools=TOOLS), header)

    assert answered.status == 200, answered.body
    held = client.session(session).messages
    assert [[part["type"] for part in each["content"]] for each in held[2:4]] == [["image", "text"]] * 2
    assert [each["tool_call_id"] for each in held[2:4]] == ["a", "b"]
    assert len(client.session(session).images) == 2


@pytest.mark.parametrize(
    "text",
    [
        '[["a", "x", 2]]',
        '[["a", "x", -1]]',
        '[["a", "x", "1"]]',
        '[["a", "x", 1.0]]',
        '[["a", "x", 2, -1]]',
        '[["a", 1]]',
        "[]",
        "{",
    ],
)
def test_damaged_results_are_refused(text: str) -> None:
    """As the journal may have them."""
    with pytest.raises(InvalidRequest):
        result_messages(text, 1)


@pytest.mark.parametrize("results", [[], [{}], [{"tool_call_id": "1"}], [{"tool_call_id": "1", "content": 5}], "x"])
def test_wrong_results_name_their_field(client: Any, results: Any) -> None:
    answer = client.call({"type": "send_text_prompt", "session_id": client.open(), "tool_results": results})

    assert (answer.status, answer.json["error"]["param"]) == (400, "tool_results")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [tool("f")] * 129}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f", [])]}, "tools[0].function.parameters"),
        ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools[2].function.name"),
        ({"tools": [tool("\ud800")]}, "tools[0].function.name"),
        ({"tools": [tool("f", {"const": "\ud800"})]}, "tools[0].function"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("f", {"not": {}})], "tool_choice": "required"}, "tools"),
    ],
)
def test_wrong_tools_name_their_field(client: Any, fields: dict[str, Any], param: str) -> None:
    answer = client.call(chat(user("x"), **fields))

    assert (answer.status, answer.error) == (400, "InvalidRequest")
    assert answer.json["error"]["param"] == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "tool", "tool_call_id": "1", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[1]"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ["x"]}}]},
            "messages[1].tool_calls[0].function",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "\ud800"}}]},
            "messages[1].tool_calls[0]",
        ),
    ],
)
def test_wrong_messages_name_their_field(client: Any, message: Any, param: str) -> None:
    answer = client.call(chat(user("x"), message))

    assert (answer.status, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("arguments", ['{"city": "Ul', "[", '"x"', '{"x": "\\ud800"}'])
def test_a_call_that_was_cut_can_be_sent_again(client: Any, arguments: str) -> None:
    """A client repeats it with an error as its result, in both APIs; the prompts are the same."""
    call = {"name": "weather", "arguments": arguments}
    result = {"role": "tool", "tool_call_id": "1", "content": "invalid arguments"}
    message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    items = [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "1", **call}]
    items.append({"type": "function_call_output", "call_id": "1", "output": result["content"]})
    body = {"model": "llava", "input": items, "tools": [{"type": "function", **tool["function"]} for tool in TOOLS]}

    answer = client.call(chat(user("x"), message, result, tools=TOOLS))
    response = client.call({**body, "max_output_tokens": 2}, {wire.RESOURCE: "POST responses"})

    assert (answer.status, response.status) == (200, 200)
    assert answer.json["usage"]["prompt_tokens"] == response.json["usage"]["input_tokens"]


def test_templates_show_how_they_call(checkpoint: Path) -> None:
    """Only templates that support tools get them; the error names other forms of calls."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    tools = read_tools({"tools": TOOLS})
    unaware = find_answer_style("{% for message in messages %}...", tokenizer)
    other = find_answer_style("{% if tools %}[TOOL_CALLS]{% endif %}", tokenizer)
    xml = find_answer_style("{% if tools %}<tool_call><function=x></tool_call>{% endif %}", tokenizer)

    with pytest.raises(InvalidRequest, match="knows no tools"):
        constrain(tools, None, unaware)
    for style in (other, xml):
        with pytest.raises(InvalidRequest, match="in a form that this server cannot read"):
            constrain(tools, None, style)
    with pytest.raises(InvalidRequest, match="JSON schema only"):
        constrain(tools, GrammarText("regex", "a", "parameters.grammar"), HERMES)
    assert constrain(tools, None, HERMES) is None
    assert find_answer_style("{% if tools %}<tool_call>{% endif %} </think>", tokenizer).thought is not None


TWO_CALLS = (
    'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"</tool_call>", "b": [{"c": 1}]}}\n</tool_call>\n'
    '<tool_call>{"arguments": {"z": 1}, "name": "g"}</tool_call>\n'
)


# JSON that Python refuses, and strings with half a surrogate pair, which no answer can have.
BAD_ESCAPE = r'<tool_call>{"name": "a\q", "arguments": {"b": 1}}</tool_call>'
HALF_NAME = r'<tool_call>{"name": "a\ud800", "arguments": {}}</tool_call>'
HALF_VALUE = r'<tool_call>{"arguments": {"b": "\ud800"}, "name": "f"}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain < text \n", "plain < text \n", []),
        (TWO_CALLS, "I look.", [("f", '{"a": "}\\"</tool_call>", "b": [{"c": 1}]}'), ("g", '{"z": 1}')]),
        ("<tool_call>nonsense</tool_call> ok", "<tool_call>nonsense</tool_call> ok", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "cut', "", [("f", '{"a": "cut')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"nam', '<tool_call>{"nam', []),
        ("almost <tool_ca", "almost <tool_ca", []),
        ('<tool_call>{"parameters": {"z": 1}, "name": "f"}</tool_call>', "", [("f", '{"z": 1}')]),
        (BAD_ESCAPE, BAD_ESCAPE, []),
        (HALF_NAME, HALF_NAME, []),
        (HALF_VALUE, HALF_VALUE, []),
    ],
)
@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_borders_of_pieces_make_no_difference(
    text: str, content: str, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    """The parts together are the message, wherever the text is cut into pieces."""
    assert read(HERMES, text, cuts) == AnswerMessage(content=content, calls=calls)


def read(style: AnswerStyle, text: str, cuts: list[int]) -> AnswerMessage:
    """Return the message that the parts of an answer make together, its calls without their ids."""
    reader, message, start = AnswerReader(style, has_tools=True, name="x"), AnswerMessage(), 0
    for end in [*sorted(cuts), len(text)]:
        for part in reader.read(text[start:end]):
            message.add(part)
        start = end
    for part in reader.finish():
        message.add(part)

    assert message == reader.message
    return replace(message, calls=[(call.name, call.arguments) for call in message.calls])


THINKING = replace(HERMES, thought=THOUGHT)


@pytest.mark.parametrize(
    ("begins_in_thought", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm < 3\n</think>\n\nYes. <think>", "Hm < 3", "Yes. <think>"),
        (False, "Yes.\n", "", "Yes.\n"),
        (False, "<thin", "", "<thin"),
        (True, "Hm\n</think>\n\nYes.", "Hm", "Yes."),
        (True, "Hm, cut </thi", "Hm, cut </thi", ""),
    ],
)
@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 50), max_size=12))
def test_reasoning_is_split_off(
    begins_in_thought: bool, text: str, reasoning: str, content: str, cuts: list[int]
) -> None:
    """Text between the marks, or up to the second if the prompt ends with the first."""
    style = replace(THINKING, begins_in_thought=begins_in_thought)

    assert read(style, text, cuts) == AnswerMessage(content=content, reasoning=reasoning)


@pytest.mark.parametrize(
    ("begins_in_thought", "text", "is_allowed"),
    [
        (False, '<think>So "a"?</think>\n\n{"colour":"red"}', True),
        (False, '{"colour":"red"}', True),
        (False, 'So?</think>{"colour":"red"}', False),
        (True, 'So "a"?</think>\n{"colour":"red"}', True),
        (True, '{"colour":"red"}', False),
        (True, "So?</think>red", False),
    ],
)
def test_grammar_begins_behind_the_reasoning(
    compiler: GrammarCompiler, tiny_llava: Any, begins_in_thought: bool, text: str, is_allowed: bool
) -> None:
    """A grammar begins after the reasoning, which it does not constrain."""
    style = replace(THINKING, begins_in_thought=begins_in_thought)
    schema = {**COLOUR, "additionalProperties": False}
    source = constrain(None, GrammarText("json_schema", json.dumps(schema), "response_format"), style)
    assert source is not None
    grammar = compiler.compile(source)
    tokens = tiny_llava.tokenizer(text, add_special_tokens=False)["input_ids"]

    if is_allowed:
        assert grammar.begin(tokens).is_complete
    else:
        with suppress(GrammarFailed):
            assert not grammar.begin(tokens).is_complete


def test_reasoning_has_a_field_of_its_own(tiny_llava: Any, checkpoint: Path, tmp_path: Path, make_client: Any) -> None:
    """Reasoning has its own field for a checkpoint whose prompt ends with the mark; a conversation may repeat it."""
    for path in checkpoint.iterdir():
        if path.is_file() and path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    template = (checkpoint / "chat_template.jinja").read_text()
    end = "'<|assistant|>' }}{% endif %}"
    thinking = template.replace(end, "'<|assistant|><think>\\n' }}{% endif %}{# </think> #}")
    (tmp_path / "chat_template.jinja").write_text(thinking)
    client = make_client(load_model(tmp_path, torch.device("cpu"), "float32"))
    said = {"role": "assistant", "content": "Red.", "reasoning_content": "It is red."}
    body = chat(
        user("Colour?"), said, user("Sure?"), reasoning_effort="max", reasoning={"summary": "auto", "mode": None}
    )

    whole = client.call(body)
    streamed = [event["choices"][0]["delta"] for event in events(client.call({**body, "stream": True}).body)]
    raw = client.call({"inputs": "Colour?", "parameters": {"max_new_tokens": 5}})

    message = whole.json["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"] == ""
    usage = whole.json["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"]
    assert "".join(delta.get("reasoning_content", "") for delta in streamed) == message["reasoning_content"]
    assert raw.json[0]["generated_text"]
