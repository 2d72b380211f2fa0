"""What errors of settings say: the key, the value, and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

Group = TypeVar("Group", bound=BaseModel)

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "string": "text",
    "bytes": "bytes",
    "bool": "true or false",
    "tuple": "a list",
    "model": "keys and values",
    "dict": "keys and values",
    "mapping": "keys and values",
}


def describe(group: type[BaseModel], error: ValidationError, where: str) -> str:
    """Return one sentence about the first thing that is wrong."""
    details = error.errors(include_url=False)[0]
    path: Sequence[int | str] = details["loc"]
    kind = details["type"]
    if kind == "refused":
        return f"{_join(where, (*path, details['ctx']['key']))} {details['ctx']['text']}"
    if kind == "extra_forbidden":
        _, known = _find(group, path[:-1])
        return f"{_join(where, path[:-1]) or 'the settings'}: {unknown_key(path[-1], known.model_fields)}"
    field, _ = _find(group, path)
    name = _join(where, path if field is None or field.alias is None else (*path[:-1], field.alias))
    if kind == "missing":
        return f"{name} is missing"
    if kind == "value_error":
        return f"{name} {details['ctx']['error']}"
    return f"{name} must be {_allowed(details, field)}"


def _allowed(details: ErrorDetails, field: FieldInfo | None) -> str:
    """Return what a value must be and, unless it is a secret, what it is."""
    value = details["input"]
    kind = details["type"]
    if kind == "literal_error":
        expected = f"one of {', '.join(map(str, get_args(field.annotation)))}" if field else details["ctx"]["expected"]
    elif kind.endswith("_type") or kind == "finite_number":
        expected = _EXPECTED.get(kind.partition("_")[0], kind)
        if field is not None and field.annotation == tuple[str, ...]:
            expected = "a list of texts"
    else:
        expected = (allowed_range(field) if field else "") or details["msg"]
    return expected if field is not None and _has_secret(field) else f"{expected}, not {value!r}"


def _has_secret(field: FieldInfo) -> bool:
    """Return True if a field, or a field of a group in it, must not be shown."""
    groups = groups_of(field.annotation, BaseModel)
    return not field.repr or any(_has_secret(each) for group in groups for each in group.model_fields.values())


def _find(group: type[BaseModel], path: Sequence[int | str]) -> tuple[FieldInfo | None, type[BaseModel]]:
    """Return the last field and the last group on the path of an error: its end may be inside a value of a field."""
    found = None
    for part in path:
        fields = group.model_fields
        field = next((each for name, each in fields.items() if part in (name, each.alias)), None)
        if field is not None:
            found, group = field, next(groups_of(field.annotation, BaseModel), group)
    return found, group


def _join(where: str, path: Sequence[int | str]) -> str:
    """Return a path as `access.keys[0].id`."""
    for part in path:
        if isinstance(part, int):
            where += f"[{part}]"
        else:
            where += f".{part}" if where else part
    return where


def unknown_key(key: object, known: Mapping[str, Any] | set[str]) -> str:
    """Return what is wrong with a key, which keys are known, and which of them looks like it."""
    close = get_close_matches(str(key), known, n=1)
    question = f". Did you mean {close[0]!r}?" if close else ""
    return f"unknown key {key!r}; known are {', '.join(sorted(known))}{question}"


def limits_of(field: FieldInfo) -> dict[str, Any]:
    """Return the numeric limits of a field by their names: gt, ge, le."""
    return {
        name: getattr(each, name)
        for each in field.metadata
        for name, kind in (("gt", Gt), ("ge", Ge), ("le", Le))
        if isinstance(each, kind)
    }


def allowed_range(field: FieldInfo) -> str:
    """Return the numbers that a field allows, as in "must be ...". Empty if it has no limits."""
    match limits_of(field):
        case {"ge": least, "le": most}:
            return f"from {least} to {most}"
        case {"gt": least, "le": most}:
            return f"above {least} and at most {most}"
        case {"ge": least}:
            return f"{least} or more"
        case {"gt": _}:
            return "positive"
    return ""


def groups_of(annotation: object, base: type[Group]) -> Iterator[type[Group]]:
    """Yield the groups that a field's type names. base: what all of them are."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, base):
            yield each
