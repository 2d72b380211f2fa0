"""Excludes properties that a JSON schema does not declare, which a weak model would add without end."""

import json
from collections.abc import Mapping
from typing import Any

_NAMED = ("properties", "$defs", "definitions")  # an object whose values are schemas
_OF_PARTS = {"properties", "items", "prefixItems", "additionalProperties", "contains"}  # schemas of a value's parts
_OF_WHOLE = {"$ref", "anyOf", "allOf"}  # schemas of the value itself
_OWN_RULES = {"additionalProperties", "propertyNames", "minProperties"}
# With any of these in a schema, its objects stay as they are: whether a value is valid may depend on other properties.
_UNSAFE = {"oneOf", "not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties", "$dynamicRef"}
_UNSAFE |= {"patternProperties"}


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
