"""Checks of single values, used by the parsers of all dialects."""

import json
from collections.abc import Iterable, Mapping
from heapq import nsmallest
from typing import Any, TypeGuard

from handlers.errors import InvalidRequest


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def read_flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return the value of a field that is true or false. Raises InvalidRequest."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"'{name}' must be true or false", param=name)
    return value


def is_unicode(text: str) -> bool:
    """Return False if the text has lone surrogates, which JSON can escape but UTF-8 cannot encode."""
    if text.isascii():  # Python knows this without reading the text
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_unicode(text: str, where: str, param: str | None) -> None:
    """Raise InvalidRequest unless the text is valid Unicode. where: names it in the message; param: its field."""
    if not is_unicode(text):
        raise InvalidRequest(f"{where} must be valid Unicode: it has one half of a surrogate pair", param=param)


def check_texts(value: Any, where: str, param: str | None) -> None:
    """Raise InvalidRequest unless all texts of a JSON value are valid Unicode, or if it is nested too deeply."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{where} is nested too deeply", param=param) from None
    check_unicode(text, where, param)


def names(given: Iterable[object]) -> str:
    """Format names from a client for a message: at most eight, each cut at 40 characters."""
    shown = [repr(name if len(name) <= 40 else name[:40] + "...") for name in nsmallest(9, map(str, given))]
    return ", ".join(shown[:8] + ["..."] * (len(shown) > 8))
