"""Tools that a request offers to the model: reads OpenAI's fields, and makes a grammar if a call is required."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handlers.chat.checks import check_texts, names, read_flag
from handlers.chat.grammar_fields import close_objects
from handlers.engine.contract import JSON_OPTIONS, GrammarText
from handlers.errors import InvalidRequest
from handlers.models.answer_style import AnswerStyle, forced_call

MAX_TOOLS = 128  # OpenAI's limit
MAX_CALLS = 16  # calls of an answer that must call: without a bound a weak model would not stop
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
# Other tools of the Responses API. The model is not offered them, as in llama.cpp and vLLM:
_NOT_OFFERED = {"local_shell", "shell", "apply_patch", "computer", "computer_use_preview", "tool_search"}
_NOT_OFFERED |= {"code_interpreter", "file_search", "image_generation", "mcp", "programmatic_tool_calling"}
_NOT_OFFERED |= {"web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"}
_NAMESPACE = "namespace"  # the type of a tool that has tools of its own
_FUNCTION, _CUSTOM = "function", "custom"
_LARK = "lark"  # the syntax of a custom tool's grammar that cannot be enforced within the JSON of a call
_THINKING = r"""
thinking: thought GAP
thought[lazy]: /(.|\n)*<\/think>/
GAP: /\n{0,2}/
"""
_TEXT_BEFORE_CALLS = r"""
lead[lazy]: TEXT CALL_MARK
TEXT: /(.|\n)*/
"""
_TEXT_WITHOUT_THOUGHT = r"""
OPENING: /\s*<think>/
first_lead[lazy]: FIRST_TEXT CALL_MARK
FIRST_TEXT: TEXT & ~/\s*<think>(.|\n)*/
"""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call.

    definitions: in OpenAI's form, for the template; a custom tool is a function with one text, its input. must_call:
    the answer must be a call. is_parallel: it may contain several calls. custom: the names of custom tools. strict: the
    names of tools whose calls match their schemas in every answer: strict functions, custom tools with an expression.
    """

    definitions: tuple[dict[str, Any], ...]
    must_call: bool
    is_parallel: bool
    custom: frozenset[str]
    strict: frozenset[str]

    @property
    def num_chars(self) -> int:
        return len(json.dumps(self.definitions, ensure_ascii=False))


def read_tools(given: Mapping[str, Any], *, is_flat: bool = False) -> ToolUse | None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`; None if the answer may call no tool.

    is_flat: as in the Responses API, a tool's fields are not nested in `function` or `custom`, tools may be in a
    namespace, and those that the model cannot be offered are left out. Raises InvalidRequest.
    """
    tools = given.get("tools", [])
    listed = list(_list_tools(tools, is_flat)) if isinstance(tools, list) else None
    if listed is None or len(listed) > MAX_TOOLS:
        raise InvalidRequest(f"'tools' must be a list with at most {MAX_TOOLS} tools", param="tools")
    definitions: dict[str, dict[str, Any]] = {}
    kinds: dict[str, str] = {}
    strict: set[str] = set()
    for where, tool, namespace in listed:
        kind, function, is_strict = _read_tool(tool, where, is_flat)
        name = function["name"] = join_name(namespace, function["name"])
        if name in definitions:
            where += ".name" if is_flat else f".{kind}.name"
            raise InvalidRequest(f"{where}: another tool has the name {name!r}, too", param=where)
        definitions[name], kinds[name] = {"type": _FUNCTION, "function": function}, kind
        strict |= {name} if is_strict else set()
    is_parallel = read_flag(given, "parallel_tool_calls", default=True)
    choice = given.get("tool_choice", "auto")
    if not is_flat:
        choice = _in_openais_form(choice, kinds)
    if choice == "none" or (choice == "auto" and not definitions):
        return None
    chosen, must_call = _read_choice(choice, kinds, is_flat)
    is_one = isinstance(choice, dict) and choice["type"] in (_FUNCTION, _CUSTOM)  # a named tool is called once
    custom = frozenset(name for name in chosen if kinds[name] == _CUSTOM)
    return ToolUse(
        tuple(definitions[name] for name in chosen),
        must_call,
        is_parallel and not is_one,
        custom,
        frozenset(strict.intersection(chosen)),
    )


def _list_tools(
    tools: Sequence[Any], is_flat: bool, at: str = "tools", namespace: str = ""
) -> Iterator[tuple[str, Any, str]]:
    """Yield each tool that is offered to the model: its place in the request, the tool, and its namespace, if any.

    Raises InvalidRequest for a wrong namespace.
    """
    for index, tool in enumerate(tools):
        where, kind = f"{at}[{index}]", _find_type(tool) if is_flat else ""
        if kind == _NAMESPACE and not namespace:
            name = _read_name(tool, where)
            if not isinstance(tool.get("tools"), list):
                raise InvalidRequest(f"{where}.tools must be a list of tools", param=f"{where}.tools")
            yield from _list_tools(tool["tools"], is_flat, f"{where}.tools", name)
        elif kind not in _NOT_OFFERED and not (kind == _CUSTOM and _has_lark(tool)):
            yield where, tool, namespace


def _has_lark(tool: Mapping[str, Any]) -> bool:
    """Return whether a custom tool of the Responses API has a lark grammar."""
    form = tool.get("format")
    return isinstance(form, dict) and form.get("syntax") == _LARK


def _find_type(tool: Any) -> str:
    """Return the type of a tool; "" without one."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) else ""


def join_name(namespace: str, name: str) -> str:
    """Return the name by which the model calls a tool. namespace: "" if the tool is in none."""
    return f"{namespace}__{name}" if namespace else name


def list_offered(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return those of a response's tools that are offered to the model. tools: of a request that has been read."""
    offered = []
    for tool in tools:
        if tool["type"] == _NAMESPACE:
            tool = {**tool, "tools": list_offered(tool["tools"])}
        is_custom = tool["type"] == _CUSTOM and not _has_lark(tool)
        if tool["type"] == _FUNCTION or is_custom or (tool["type"] == _NAMESPACE and tool["tools"]):
            offered.append(tool)
    return offered


def find_namespaced(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the namespace and the name of each tool in a namespace, by the name that the model calls."""
    spaces = [tool for tool in tools if tool["type"] == _NAMESPACE]
    owned = [(space["name"], each["name"]) for space in spaces for each in space["tools"]]
    return {join_name(*names): names for names in owned}


def _in_openais_form(choice: Any, kinds: Mapping[str, str]) -> Any:
    """Return a choice in OpenAI's form. TGI also takes a tool's name, and an object without a type."""
    if isinstance(choice, str) and choice in kinds and choice not in ("none", "auto", "required"):
        return {"type": kinds[choice], kinds[choice]: {"name": choice}}
    if isinstance(choice, dict) and choice.keys() == {_FUNCTION}:
        return {"type": _FUNCTION, **choice}
    return choice


def _read_tool(given: Any, where: str, is_flat: bool) -> tuple[str, dict[str, Any], bool]:
    """Return a tool's type, the tool as a function for the template, and whether it is strict.

    Raises InvalidRequest.
    """
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in (_FUNCTION, _CUSTOM):
        other = f", not {names([kind])}" if isinstance(kind, str) else ""
        raise InvalidRequest(f"{where} must be an object of type function or custom{other}", param=where)
    own = _member(given, kind, is_flat)
    if own is None:
        raise InvalidRequest(f"{where} must be an object of type {kind} with '{kind}'", param=where)
    where += "" if is_flat else f".{kind}"
    name, about = _read_name(own, where), own.get("description")
    if not isinstance(about, str | None):
        raise InvalidRequest(f"{where}.description must be a text", param=f"{where}.description")
    if kind == _FUNCTION:
        schema, is_strict = own.get("parameters"), own.get("strict")
    else:
        schema = _make_input_schema(own.get("format"), where, is_flat)
        is_strict = "pattern" in schema["properties"]["input"]
    if not isinstance(is_strict, bool | None):
        raise InvalidRequest(f"{where}.strict must be true or false", param=f"{where}.strict")
    if not isinstance(schema, dict | None):
        raise InvalidRequest(f"{where}.parameters must be a JSON schema", param=f"{where}.parameters")
    check_texts(own, where, where)
    return kind, {"name": name, "description": about or "", "parameters": schema or NO_PARAMETERS}, bool(is_strict)


def _make_input_schema(given: Any, where: str, is_flat: bool) -> dict[str, Any]:
    """Return the parameters of a custom tool: its input, as its format requires. Raises InvalidRequest."""
    text: dict[str, Any] = {"type": "string"}
    where += ".format"
    given = {"type": "text"} if given is None else given
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "grammar":
        grammar = _member(given, "grammar", is_flat) or {}
        where += "" if is_flat else ".grammar"
        expression = grammar.get("definition")
        if grammar.get("syntax") == _LARK:
            raise InvalidRequest(
                f"{where}.syntax: a lark grammar cannot be enforced within a call, which is JSON; use regex, or the "
                "format text",
                param=f"{where}.syntax",
            )
        if grammar.get("syntax") != "regex" or not isinstance(expression, str) or not expression:
            raise InvalidRequest(f"{where} must have the syntax regex and a definition", param=where)
        text["pattern"] = f"^(?:{expression})$"
    elif kind != "text":
        raise InvalidRequest(f"{where} must be an object of type text or grammar", param=where)
    return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


def _read_name(given: Mapping[str, Any], where: str) -> str:
    name = given.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.name must have 1 to 64 letters, digits, dots, hyphens or underscores", param=f"{where}.name"
        )
    return name


def _member(given: Any, name: str, is_flat: bool) -> dict[str, Any] | None:
    """Return the object nested under this name, or with is_flat the object itself; None if it is not an object."""
    value = given.get(name) if isinstance(given, dict) and not is_flat else given
    return value if isinstance(value, dict) else None


def _read_choice(given: Any, kinds: Mapping[str, str], is_flat: bool) -> tuple[list[str], bool]:
    """Return the names that may be called, and whether one must be. kinds: the type of each tool by its name."""
    if given in ("auto", "required"):
        if not kinds:
            raise InvalidRequest(
                "'tool_choice' is required, but no tool that the model can call is among the 'tools'",
                param="tool_choice",
            )
        return list(kinds), given == "required"
    kind = _find_type(given)
    if kind in (_FUNCTION, _CUSTOM) or kind in _NOT_OFFERED:
        return [_named(given, kinds, is_flat)], True
    allowed = _member(given, "allowed_tools", is_flat) if kind == "allowed_tools" else None
    if allowed is None or allowed.get("mode") not in ("auto", "required"):
        raise InvalidRequest(
            "'tool_choice' must be none, auto, required, a function, a custom tool or allowed_tools",
            param="tool_choice",
        )
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest(
            "the tools of 'allowed_tools' must be a list of tools that is not empty", param="tool_choice"
        )
    wanted = {_named(tool, kinds, is_flat) for tool in tools}
    return [name for name in kinds if name in wanted], allowed["mode"] == "required"


def _named(given: Any, kinds: Mapping[str, str], is_flat: bool) -> str:
    """Return the name of the tool that a choice names. Raises InvalidRequest if the model is not offered it."""
    kind = _find_type(given)
    if kind in _NOT_OFFERED:
        raise InvalidRequest(
            f"'tool_choice' names a tool of type {kind}, but this server offers only functions and custom tools to "
            "the model",
            param="tool_choice",
        )
    own = _member(given, kind or _FUNCTION, is_flat)
    name = None if own is None else own.get("name")
    if not isinstance(name, str) or kinds.get(name) != (kind or _FUNCTION):
        named = "a custom tool that has a lark grammar or" if kind == _CUSTOM else "a function that"
        raise InvalidRequest(f"'tool_choice' names {named} is not among the 'tools'", param="tool_choice")
    return name


def constrain(tools: ToolUse | None, grammar: GrammarText | None, style: AnswerStyle) -> GrammarText | None:
    """Return the grammar of an answer that must call a tool, follow a grammar, or either.

    grammar: with a JSON schema, the model may reason before the answer; any other grammar constrains the reasoning,
    too. Raises InvalidRequest if the model's template has no calls that this server reads, or if the grammar cannot be
    combined with calls.
    """
    if tools is None and (grammar is None or grammar.kind != "json_schema" or style.thought is None):
        return grammar
    rules: dict[str, str] = {}
    if tools is not None:
        if style.call is None:
            problem = "writes calls in a form that this server cannot read" if style.knows_tools else "knows no tools"
            raise InvalidRequest(f"this model's chat template {problem}, so it cannot be given any", param="tools")
        if grammar is not None and grammar.kind != "json_schema":
            raise InvalidRequest("an answer that may call tools can follow a JSON schema only", param=grammar.field)
        if tools.must_call or grammar is not None:
            rules["calls"] = _calls_lark(tools, style.call)
        elif tools.strict:
            return GrammarText("lark", _text_and_calls_lark(tools, style.call, style), "tools")
    if grammar is not None and (tools is None or not tools.must_call):
        rules["answer"] = f"answer: {_json_lark(json.loads(grammar.text))}\n"
    if not rules:
        return None
    start = f"start: {_thought_lark(style)} ({' | '.join(rules)})\n"
    field = "tools" if grammar is None or "answer" not in rules else grammar.field
    return GrammarText("lark", "".join([start, _THINKING if style.thought else "", *rules.values()]), field)


def _thought_lark(style: AnswerStyle) -> str:
    """Return the part of the grammar for reasoning before the answer."""
    if style.thought is None:
        return ""
    return "thinking" if style.begins_in_thought else f"({json.dumps(style.thought[0])} thinking)?"


def _calls_lark(tools: ToolUse, marks: tuple[str, str]) -> str:
    """Return the part of the grammar for one call or more."""
    more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if tools.is_parallel else ""
    names = {each["function"]["name"] for each in tools.definitions}
    return f"calls: call{more}\ncall: {json.dumps(marks[0])} {_body_lark(tools, names, marks[1])}"


def _text_and_calls_lark(tools: ToolUse, marks: tuple[str, str], style: AnswerStyle) -> str:
    """Return a grammar of text with calls, in which calls of strict tools match their schemas.

    marks: of a call. Reasoning before the text may contain them.
    """
    rules = [_TEXT_BEFORE_CALLS, f"call: lead body\nbody: {_body_lark(tools, tools.strict, marks[1])}"]
    start = "start: call* TEXT\n"
    if style.thought is not None:
        rules.append(_THINKING)
        start = "start: thinking call* TEXT\n"
        if not style.begins_in_thought:
            rules.append(_TEXT_WITHOUT_THOUGHT)
            start = "start: OPENING thinking call* TEXT | first_lead body call* TEXT | FIRST_TEXT\n"
    return start + "".join(rules).replace("CALL_MARK", json.dumps(marks[0]))


def _body_lark(tools: ToolUse, strict: Collection[str], end: str) -> str:
    """Return the rest of a call's rule, behind its first mark.

    strict: names of the tools whose arguments must match their schemas. Those of other tools are any object.
    """
    choices = " | ".join(f"body{number}" for number in range(len(tools.definitions)))
    lines = [f'"\\n" ({choices}) {json.dumps(chr(10) + end)}']
    for number, each in enumerate(tools.definitions):
        name, schema = each["function"]["name"], each["function"]["parameters"]
        head, tail = map(json.dumps, forced_call(name))
        arguments = close_objects(schema) if name in strict else ANY_ARGUMENTS
        lines.append(f"body{number}: {head} {_json_lark(arguments)} {tail}")
    return "\n".join(lines) + "\n"


def _json_lark(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
