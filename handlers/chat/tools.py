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
# Tools of the Responses API that are not functions. The model is not offered them, as in llama.cpp and vLLM:
_NOT_OFFERED = {"custom", "local_shell", "shell", "apply_patch", "computer", "computer_use_preview", "tool_search"}
_NOT_OFFERED |= {"code_interpreter", "file_search", "image_generation", "mcp", "programmatic_tool_calling"}
_NOT_OFFERED |= {"web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"}
_NAMESPACE = "namespace"  # the type of a tool that has functions of its own
_THINKING = r"""
thinking: thought GAP
thought[lazy]: /(.|\n)*<\/think>/
GAP: /\n{0,2}/
"""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call.

    definitions: in OpenAI's form, for the template. must_call: the answer must be a call. is_parallel: it may
    contain several calls.
    """

    definitions: tuple[dict[str, Any], ...]
    must_call: bool
    is_parallel: bool

    @property
    def num_chars(self) -> int:
        return len(json.dumps(self.definitions, ensure_ascii=False))


def read_tools(given: Mapping[str, Any], *, is_flat: bool = False) -> ToolUse | None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`; None if the answer may call no tool.

    is_flat: as in the Responses API, a function's fields are not nested in `function`, functions may be in a namespace,
    and OpenAI's other kinds of tools are left out. Raises InvalidRequest.
    """
    tools = given.get("tools", [])
    functions = list(_list_functions(tools, is_flat)) if isinstance(tools, list) else None
    if functions is None or len(functions) > MAX_TOOLS:
        raise InvalidRequest(f"'tools' must be a list with at most {MAX_TOOLS} functions", param="tools")
    definitions: dict[str, dict[str, Any]] = {}
    for where, tool, namespace in functions:
        definition = _read_tool(tool, where, is_flat)
        name = definition["function"]["name"] = join_name(namespace, definition["function"]["name"])
        if name in definitions:
            where += ".name" if is_flat else ".function.name"
            raise InvalidRequest(f"{where}: another tool has the name {name!r}, too", param=where)
        definitions[name] = definition
    is_parallel = read_flag(given, "parallel_tool_calls", default=True)
    choice = given.get("tool_choice", "auto")
    if not is_flat:
        choice = _in_openais_form(choice, definitions)
    if choice == "none" or (choice == "auto" and not definitions):
        return None
    chosen, must_call = _read_choice(choice, list(definitions), is_flat)
    is_one = isinstance(choice, dict) and choice["type"] == "function"  # a named function is called once
    return ToolUse(tuple(definitions[name] for name in chosen), must_call, is_parallel and not is_one)


def _list_functions(
    tools: Sequence[Any], is_flat: bool, at: str = "tools", namespace: str = ""
) -> Iterator[tuple[str, Any, str]]:
    """Yield each tool that must be a function: its place in the request, the tool, and its namespace, "" without one.

    Raises InvalidRequest for a wrong namespace.
    """
    for index, tool in enumerate(tools):
        where, kind = f"{at}[{index}]", _find_type(tool) if is_flat else ""
        if kind == _NAMESPACE and not namespace:
            name = _read_name(tool, where)
            if not isinstance(tool.get("tools"), list):
                raise InvalidRequest(f"{where}.tools must be a list of functions", param=f"{where}.tools")
            yield from _list_functions(tool["tools"], is_flat, f"{where}.tools", name)
        elif kind not in _NOT_OFFERED:
            yield where, tool, namespace


def _find_type(tool: Any) -> str:
    """Return the type of a tool; "" without one."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) else ""


def join_name(namespace: str, name: str) -> str:
    """Return the name by which the model calls a function. namespace: "" if the function is in none."""
    return f"{namespace}__{name}" if namespace else name


def list_offered(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return those of a response's tools that are offered to the model. tools: of a request that has been read."""
    offered = []
    for tool in tools:
        if tool["type"] == _NAMESPACE:
            tool = {**tool, "tools": list_offered(tool["tools"])}
        if tool["type"] == "function" or (tool["type"] == _NAMESPACE and tool["tools"]):
            offered.append(tool)
    return offered


def find_namespaced(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the namespace and the name of each function in a namespace, by the name that the model calls."""
    spaces = [tool for tool in tools if tool["type"] == _NAMESPACE]
    owned = [(space["name"], function["name"]) for space in spaces for function in space["tools"]]
    return {join_name(*names): names for names in owned}


def _in_openais_form(choice: Any, names: Collection[str]) -> Any:
    """Return a choice in OpenAI's form. TGI also takes a function's name, and an object without a type."""
    if isinstance(choice, str) and choice in names and choice not in ("none", "auto", "required"):
        return {"type": "function", "function": {"name": choice}}
    if isinstance(choice, dict) and choice.keys() == {"function"}:
        return {"type": "function", **choice}
    return choice


def _read_tool(given: Any, where: str, is_flat: bool) -> dict[str, Any]:
    function = _member(given, "function", is_flat)
    if function is None or given.get("type") != "function":
        wanted = "" if is_flat else " with 'function'"
        kind = given.get("type") if isinstance(given, dict) else None
        other = f", not {names([kind])}" if isinstance(kind, str) and kind != "function" else ""
        raise InvalidRequest(f"{where} must be an object of type function{wanted}{other}", param=where)
    where += "" if is_flat else ".function"
    name, about = _read_name(function, where), function.get("description")
    if not isinstance(about, str | None):
        raise InvalidRequest(f"{where}.description must be a text", param=f"{where}.description")
    schema = function.get("parameters")
    if not isinstance(schema, dict | None):
        raise InvalidRequest(f"{where}.parameters must be a JSON schema", param=f"{where}.parameters")
    check_texts(function, where, where)
    known = {"name": name, "description": about or "", "parameters": schema or NO_PARAMETERS}
    return {"type": "function", "function": known}


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


def _read_choice(given: Any, names: Sequence[str], is_flat: bool) -> tuple[list[str], bool]:
    """Return the names that may be called, and whether one must be."""
    if given in ("auto", "required"):
        if not names:
            raise InvalidRequest("'tool_choice' is required, but no function is among the 'tools'", param="tool_choice")
        return list(names), given == "required"
    kind = _find_type(given)
    if kind == "function" or kind in _NOT_OFFERED:
        return [_named(given, names, is_flat)], True
    allowed = _member(given, "allowed_tools", is_flat) if kind == "allowed_tools" else None
    if allowed is None or allowed.get("mode") not in ("auto", "required"):
        raise InvalidRequest(
            "'tool_choice' must be none, auto, required, a function or allowed_tools", param="tool_choice"
        )
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest("the tools of 'allowed_tools' must be a list of functions", param="tool_choice")
    wanted = {_named(tool, names, is_flat) for tool in tools}
    return [name for name in names if name in wanted], allowed["mode"] == "required"


def _named(given: Any, names: Sequence[str], is_flat: bool) -> str:
    if (kind := _find_type(given)) in _NOT_OFFERED:
        raise InvalidRequest(
            f"'tool_choice' names a tool of type {kind}, but this server offers only functions to the model",
            param="tool_choice",
        )
    function = _member(given, "function", is_flat)
    name = None if function is None else function.get("name")
    if not isinstance(name, str) or name not in names:
        raise InvalidRequest("'tool_choice' names a function that is not among the 'tools'", param="tool_choice")
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
    begin, end = json.dumps(f"{marks[0]}\n"), json.dumps(f"\n{marks[1]}")
    more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if tools.is_parallel else ""
    bodies = " | ".join(f"body{number}" for number in range(len(tools.definitions)))
    lines = [f"calls: call{more}", f"call: {begin} ({bodies}) {end}"]
    for number, definition in enumerate(tools.definitions):
        function = definition["function"]
        head, tail = map(json.dumps, forced_call(function["name"]))
        lines.append(f"body{number}: {head} {_json_lark(close_objects(function['parameters']))} {tail}")
    return "\n".join(lines) + "\n"


def _json_lark(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
