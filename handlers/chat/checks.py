"""Checks of single values, used by the parsers of all dialects."""

from collections.abc import Iterable
from heapq import nsmallest
from typing import Any


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def is_unicode(text: str) -> bool:
    """Return False for lone surrogates, which JSON can escape and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def names(given: Iterable[object]) -> str:
    """Format names from a client for a message: at most eight, each cut at 40 characters."""
    shown = [repr(name if len(name) <= 40 else name[:40] + "...") for name in nsmallest(9, map(str, given))]
    return ", ".join(shown[:8] + ["..."] * (len(shown) > 8))
