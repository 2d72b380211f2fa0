"""Groups of the configuration file: mappings and lists checked key by key, every error with its key and value."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, TypeVar

from torchmoor.config.objects import Webhook
from torchmoor.errors import ConfigError

T = TypeVar("T")

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
    "bool": ((bool,), "true or false"),
    "tuple[str, ...]": ((list,), "a list of texts"),
    "tuple[Webhook, ...]": ((list,), "a list of webhooks"),
}


def read_group(kind: type[T], value: object, where: str) -> T:
    """A settings group from a mapping of its fields. Raises ConfigError for unknown keys and wrong types."""
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    values = read_mapping(value, where, set(known))
    for key, given in values.items():
        types, expected = _TYPES[str(known[key].type)]
        is_stray_bool = isinstance(given, bool) and bool not in types
        if not isinstance(given, types) or is_stray_bool or given in (math.inf, -math.inf) or given != given:
            raise ConfigError(f"{where}.{key} must be {expected}, not {given!r}")
        if isinstance(given, list):
            values = {**values, key: _read_items(str(known[key].type), given, f"{where}.{key}")}
    try:
        return kind(**values)
    except TypeError as error:  # a field without a default
        missing = [name for name in known if f"'{name}'" in str(error)]
        raise ConfigError(f"{where}.{missing[0] if missing else '?'} is missing") from error


def _read_items(kind: str, given: list[Any], where: str) -> tuple[Any, ...]:
    """The items of a list by its declared type."""
    if "Webhook" in kind:
        return tuple(read_group(Webhook, each, f"{where}[{number}]") for number, each in enumerate(given))
    for each in given:
        if not isinstance(each, str):
            raise ConfigError(f"{where} must be a list of texts, not {each!r}")
    return tuple(given)


def read_mapping(value: object, where: str, known: set[str]) -> dict[str, Any]:
    """Keys and values with known keys only. Raises ConfigError."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be keys and values, not {value!r}")
    for key in value:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; known are {', '.join(sorted(known))}")
    return value


def read_list(value: object, where: str) -> list[Any]:
    """One item or more. Raises ConfigError."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} must be a list of one or more, not {value!r}")
    return value
