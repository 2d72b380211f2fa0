"""Strict functions: the grammar of an answer that may call them, and their field."""

from typing import Any

import pytest

from handlers.chat.tools import constrain, read_tools
from handlers.engine.grammar import GrammarCompiler
from tests.unit.handlers.conftest import Client
from tests.unit.handlers.test_chat_completion import chat, user
from tests.unit.handlers.test_custom_tools import is_whole
from tests.unit.handlers.test_tools import HERMES, WEATHER, tool


def strict(name: str, schema: Any, is_strict: Any = True) -> dict[str, Any]:
    function = tool(name, schema)["function"]
    return {"type": "function", "function": {**function, "strict": is_strict}}


FORECAST, PAINT = strict("forecast", WEATHER), strict("paint", WEATHER, False)
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("Just text", True),
        ("I look. " + CALL.format("forecast", '{"city":"Rome","days":2}') + "\n", True),
        (CALL.format("forecast", '{"city":"Rome","days":9}'), False),
        (CALL.format("forecast", '{"city":"Rome"}'), False),
        (CALL.format("paint", '{"city":"Rome","days":9}'), True),
        (CALL.format("other", "{}"), False),
    ],
)
def test_an_answer_that_may_call_follows_the_schema(
    compiler: GrammarCompiler, tiny_llava: Any, text: str, is_allowed: bool
) -> None:
    """The model may write any text, but a call of a strict function only with arguments that fit its schema."""
    source = constrain(read_tools({"tools": [FORECAST, PAINT]}), None, HERMES)

    assert is_whole(compiler, tiny_llava, source, text) == is_allowed


def test_a_strict_function_has_declared_arguments_only(compiler: GrammarCompiler, tiny_llava: Any) -> None:
    """As in calls that are required."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    source = constrain(read_tools({"tools": [strict("forecast", schema)]}), None, HERMES)

    found = [
        is_whole(compiler, tiny_llava, source, CALL.format("forecast", arguments))
        for arguments in ('{"city":"Rome"}', '{"days":2}')
    ]

    assert found == [True, False]


@pytest.mark.parametrize("is_strict", [None, False])
def test_an_answer_that_may_call_other_functions_is_free(is_strict: bool | None) -> None:
    assert constrain(read_tools({"tools": [strict("paint", WEATHER, is_strict)]}), None, HERMES) is None


def test_a_strict_function_that_is_not_allowed_has_no_effect() -> None:
    """`allowed_tools` leaves it out."""
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "paint"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}

    tools = read_tools({"tools": [FORECAST, PAINT], "tool_choice": choice})

    assert constrain(tools, None, HERMES) is None


@pytest.mark.parametrize(
    ("function", "param"),
    [
        (strict("x", WEATHER, "yes"), "tools[0].function.strict"),
        (strict("x", {"type": "object", "properties": {"y": {"not": {}}}}), "tools"),
    ],
)
def test_wrong_strict_functions_name_their_field(client: Client, function: dict[str, Any], param: str) -> None:
    """A schema that cannot be enforced is refused, as at OpenAI."""
    answer = client.call(chat(user("Hello"), tools=[function]))

    assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_the_refusal_names_the_function(client: Client) -> None:
    """Of several functions, the error quotes the one whose schema cannot be enforced."""
    wrong = strict("wrong", {"type": "object", "properties": {"y": {"not": {}}}})

    answer = client.call(chat(user("Hello"), tools=[FORECAST, wrong, PAINT]))

    message = answer.json["error"]["message"]
    assert 'Unimplemented keys: ["not"]' in message
    assert [name for name in ("forecast", "wrong", "paint") if name in message] == ["wrong"]
