"""The grammars that clients ask for: TGI's `grammar`, and OpenAI's `response_format` and `text.format`."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from handlers.chat.checks import check_unicode
from handlers.engine.contract import GrammarText
from handlers.errors import InvalidRequest

ANY_OBJECT = '{"type":"object"}'
MAX_CLOSED_CHARS = 65_536  # of a schema; the pump's thread, which parses requests, must not take long over a longer one
_NAMED = ("properties", "$defs", "definitions")  # an object whose values are schemas
_OF_PARTS = {"properties", "items", "prefixItems", "additionalProperties", "contains"}  # schemas of a value's parts
_OF_WHOLE = {"$ref", "anyOf", "allOf"}  # schemas of the value itself
_OWN_RULES = {"additionalProperties", "propertyNames", "minProperties"}
# With any of these in a schema, its objects stay as they are: whether a value is valid may depend on other properties.
_UNSAFE = {"oneOf", "not", "if", "dependentSchemas", "dependencies", "patternProperties", "unevaluatedProperties"}
_UNSAFE |= {"$dynamicRef"}


def read_tgi_grammar(given: Mapping[str, Any], field: str = "parameters.grammar") -> GrammarText:
    """Read TGI's {"type", "value"}. The type `lark` is valid, too. Raises InvalidRequest."""
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _TGI_KINDS:
        raise InvalidRequest(f"{field}.type must be one of {', '.join(_TGI_KINDS)}", param=f"{field}.type")
    return _TGI_KINDS[kind](given.get("value"), f"{field}.value")


def read_response_format(given: Any) -> GrammarText | None:
    """Read chat completions' `response_format`, OpenAI's or TGI's; None for text. Raises InvalidRequest."""
    if isinstance(given, Mapping) and given.get("value") is not None:
        kind = given.get("type")
        return read_tgi_grammar({**given, "type": "json" if kind == "json_object" else kind}, "response_format")
    if isinstance(given, Mapping) and given.get("type") == "json_schema":
        return _read_named_schema(given.get("json_schema"), "response_format.json_schema")
    return _read_other_format(given, "response_format")


def read_text_format(given: Any) -> GrammarText | None:
    """Read responses' `text.format`, where the schema is not nested; None for text. Raises InvalidRequest."""
    if isinstance(given, Mapping) and given.get("type") == "json_schema":
        return _read_named_schema(given, "text.format")
    return _read_other_format(given, "text.format")


def _read_other_format(given: Any, field: str) -> GrammarText | None:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        if given.get("schema") is not None or given.get("json_schema") is not None:
            raise InvalidRequest(f"'{field}' of type json_object has no schema; use the type json_schema", param=field)
        return GrammarText("json_schema", ANY_OBJECT, field)
    raise InvalidRequest(f"'{field}' must be an object of type text, json_object or json_schema", param=field)


def _read_named_schema(given: Any, field: str) -> GrammarText:
    """Read OpenAI's {"name", "schema", "strict"}: answers follow the schema, strict or not."""
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise InvalidRequest(f"{field} must be an object with 'name' and 'schema'", param=field)
    if not isinstance(given.get("strict"), bool | None):
        raise InvalidRequest(f"{field}.strict must be true or false", param=f"{field}.strict")
    schema = given.get("schema")
    return read_schema({"type": "object"} if schema is None else schema, f"{field}.schema")


def read_schema(given: Any, field: str) -> GrammarText:
    """Read a JSON schema: an object, or text with one. Raises InvalidRequest."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{field} is not valid JSON", param=field) from None
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{field} must be a JSON schema, which is an object", param=field)
    try:
        text = _write(given)
        if len(text) <= MAX_CLOSED_CHARS:
            text = _write(close_objects(given))
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deeply", param=field) from None
    return _grammar("json_schema", text, field)


def _write(schema: Mapping[str, Any]) -> str:
    """Return a schema as JSON. Not sorted: an answer has its properties in the schema's order."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _read_tgi_schema(given: Any, field: str) -> GrammarText:
    """Read a schema, or {"name", "schema"} with one inside."""
    if isinstance(given, Mapping) and isinstance(given.get("schema"), Mapping):
        return read_schema(given["schema"], f"{field}.schema")
    return read_schema(given, field)


def _read_text(kind: Any, given: Any, field: str) -> GrammarText:
    if not isinstance(given, str) or not given:
        raise InvalidRequest(f"{field} must be a text that is not empty", param=field)
    return _grammar(kind, given, field)


def _grammar(kind: Any, text: str, field: str) -> GrammarText:
    check_unicode(text, field, field)
    return GrammarText(kind, text, field)


_TGI_KINDS: dict[str, Callable[[Any, str], GrammarText]] = {
    "json": _read_tgi_schema,
    "json_schema": _read_tgi_schema,
    "regex": partial(_read_text, "regex"),
    "lark": partial(_read_text, "lark"),
}


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with `additionalProperties` false in objects that declare `properties` and no other rule.

    The result allows only values that the given schema allows. A schema in which one value must follow two schemas that
    may declare properties, or must equal a given object, is returned unchanged, because no value might be left.
    """
    closed: dict[str, Any] = json.loads(json.dumps(schema))
    waiting: list[Any] = [closed]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        if not _UNSAFE.isdisjoint(each) or _is_combined(each):
            return dict(schema)
        for name in _NAMED:
            waiting += each[name].values() if isinstance(each.get(name), dict) else ()
        for name in (_OF_PARTS | _OF_WHOLE) - {"properties"}:
            waiting += _as_list(each.get(name)) or [each.get(name)]
        if "properties" in each:
            declared, required = each["properties"], _as_list(each.get("required"))
            is_open = _OWN_RULES.isdisjoint(each) and isinstance(declared, dict)
            if is_open and all(isinstance(name, str) and name in declared for name in required):
                each["additionalProperties"] = False
        elif "required" in each or "minProperties" in each:  # of properties that a schema elsewhere declares
            return dict(schema)
    return closed


def _is_combined(schema: dict[str, Any]) -> bool:
    """Return whether a value must follow two of the schemas in this one, or equal an object or a list in it."""
    num_whole = len(_OF_WHOLE & schema.keys()) + max(0, len(_as_list(schema.get("allOf"))) - 1)
    if num_whole > 1 or (num_whole and not _OF_PARTS.isdisjoint(schema)):
        return True
    return any(isinstance(value, dict | list) for value in [*_as_list(schema.get("enum")), schema.get("const")])


def _as_list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []
