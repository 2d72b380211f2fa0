"""Excludes properties that a JSON schema does not declare, which a weak model would add without end."""

import json
from collections.abc import Mapping
from typing import Any

_NAMED = ("properties", "$defs", "definitions")  # an object whose values are schemas
_LISTED = ("anyOf", "allOf", "prefixItems")  # a list of schemas
_SINGLE = ("items", "additionalProperties", "contains")  # a schema
_COMBINING = {"$ref", "$dynamicRef", "anyOf", "allOf"}  # beside `properties`: others may be declared there
_OWN_RULES = {"additionalProperties", "patternProperties", "propertyNames", "minProperties"}
# With any of these in a schema, its objects stay as they are: whether a value is valid may depend on other properties.
_UNSAFE = {"oneOf", "not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties", "$dynamicRef"}


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with `additionalProperties` false in objects that declare `properties` and no other rule.

    The result allows only values that the given schema allows. A schema that combines objects is returned unchanged.
    """
    closed: dict[str, Any] = json.loads(json.dumps(schema))
    waiting: list[Any] = [closed]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        if not _UNSAFE.isdisjoint(each) or len(_as_list(each.get("allOf"))) > 1:
            return dict(schema)
        for name in _NAMED:
            waiting += each[name].values() if isinstance(each.get(name), dict) else ()
        for name in _LISTED:
            waiting += _as_list(each.get(name))
        waiting += [each.get(name) for name in _SINGLE]
        if "properties" in each:
            if not _COMBINING.isdisjoint(each):
                return dict(schema)
            declared, required = each["properties"], _as_list(each.get("required"))
            is_open = _OWN_RULES.isdisjoint(each) and isinstance(declared, dict)
            if is_open and all(isinstance(name, str) and name in declared for name in required):
                each["additionalProperties"] = False
        elif "required" in each or "minProperties" in each:  # of properties that a schema elsewhere declares
            return dict(schema)
    return closed


def _as_list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []
