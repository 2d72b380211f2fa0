"""Parses JSON from clients without raising, and counts its values, each of which takes many bytes."""

from __future__ import annotations

import json
from typing import Any

MAX_SKIPS = 1000  # from mark to mark; a text with more marks is counted by `count`
BYTES_PER_VALUE = 80  # of memory, about: an empty object and its place in a list


def parse_json(text: bytes | str) -> Any:
    """Return a JSON text's value; None if it is not valid, or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def count_values(text: bytes | bytearray | str) -> int:
    """Return the most values that a JSON text may have.

    Each value follows a bracket, a brace or a comma. Those within texts count as well, so the number is an upper bound.
    """
    marks: tuple[Any, ...] = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    return sum(_count(text, mark) for mark in marks)


def _count(text: Any, mark: Any) -> int:
    """Count a mark. With few marks, such as in 6 MB of base64, `find` takes 0.3 ms and `count` 4 ms."""
    at = text.find(mark)
    for number in range(MAX_SKIPS):
        if at < 0:
            return number
        at = text.find(mark, at + 1)
    return MAX_SKIPS if at < 0 else MAX_SKIPS + int(text.count(mark, at))
