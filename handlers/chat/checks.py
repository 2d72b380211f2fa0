"""Checks of single values that every dialect's parser makes."""

from collections.abc import Iterable
from typing import Any


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def is_unicode(text: str) -> bool:
    """False for the lone surrogates that JSON's escapes can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def names(given: Iterable[object]) -> str:
    """Names from a client as a message may repeat them: a few, and none of them long."""
    shown = [repr(name if len(name) <= 40 else name[:40] + "...") for name in sorted(map(str, given))]
    return ", ".join(shown[:8] + ["..."] * (len(shown) > 8))
