"""Finds fields in the beginning of a JSON body, such as OpenAI's `model`, without parsing all of it.

OpenAI's own client writes `model` after `messages`, so the body is searched for it up to a limit
(limits.max_unrouted_body_bytes).
"""

from __future__ import annotations

import json
import re

from torchmoor.errors import WrongModel
from torchmoor.wire.json_values import parse_json

MAX_VALUE_BYTES = 512  # of a value that is not a text
MAX_CHECKED_BYTES = 16_384
MAX_TOKENS = 20_000  # brackets and strings before `model`; three times as many as the most messages need

# The text between two tokens. Numbers and short strings in values are skipped by the pattern, not by Python's loop.
# No possessive quantifiers: Python before 3.11.5, such as Debian 12's, matches groups that have them wrongly.
_NESTED_GAP = re.compile(rb'(?:[^"{}\[\]]+|"[^"\\]{0,200}"){0,16}')
_GAP = re.compile(rb'[^"{}\[\]]*')
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_QUOTE, _BACKSLASH = b'"\\'
_OPENING = b"{["


def find_fields(body: bytes, names: frozenset[str]) -> dict[str, bytes]:
    """Find fields in the beginning of a JSON object: the bytes of a text, or the beginning of another value.

    A field whose value is incomplete counts as missing, as one behind MAX_TOKENS does.
    """
    return _search(body, names)[0]


def _search(body: bytes, names: frozenset[str]) -> tuple[dict[str, bytes], bool]:
    """Return the fields, and whether the search ended before MAX_TOKENS."""
    depth = at = 0
    found: dict[str, bytes] = {}
    longest = max(map(len, names)) * 6 + 2  # if each character of a key is an escape
    for _ in range(MAX_TOKENS):
        at = (_NESTED_GAP if depth > 1 else _GAP).match(body, at).end()  # type: ignore[union-attr]  # matches nothing, too
        if at == len(body) or len(found) == len(names):
            return found, True
        if body[at] != _QUOTE:
            depth += 1 if body[at] in _OPENING else -1
            at += 1
            continue
        start, at = at, _end_of_string(body, at)
        if not at:
            return found, True
        if depth != 1 or at - start > longest:
            continue
        colon = _COLON.match(body, at)
        if colon is not None and (name := _read_key(body[start:at])) in names:  # without a colon, it was a value
            value = _read_value(body, colon.end())
            if value:
                found[name] = value
    return found, False


def _read_key(text: bytes) -> str:
    return str(parse_json(text) or "") if _BACKSLASH in text else text[1:-1].decode("utf-8", "replace")


def find_model(body: bytes) -> str | None:
    """Find the value of `model`; None if it is not there.

    Raises WrongModel if it is not a string, or MAX_TOKENS come before it.
    """
    found, is_over = _search(body, frozenset(("model",)))
    value = found.get("model")
    if value is None:
        if not is_over:
            raise WrongModel(f"Give `model` before the first {MAX_TOKENS} brackets and strings of the body.")
        return None
    if value[0] != _QUOTE:
        raise WrongModel("`model` must be a text: the name of an endpoint.")
    model: str | None = parse_json(value)
    if model is None:
        raise WrongModel("`model` is not a valid JSON string.")
    return model


def describe_json_problem(body: bytes) -> str:
    """Return a sentence, after a space, if a short body is not valid JSON; else an empty text."""
    if not 0 < len(body) <= MAX_CHECKED_BYTES:
        return ""
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        return f" The body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}."
    except (ValueError, RecursionError):
        return " The body is not valid JSON."
    return ""


def _end_of_string(body: bytes, start: int) -> int:
    """Return the end of the string that begins at a quote; 0 if it does not end in this body."""
    end = body.find(b'"', start + 1)
    if end < 0:
        return 0
    if body[end - 1] != _BACKSLASH:  # true of most strings, images included
        return end + 1
    size = end - start
    while start + size < len(body):  # doubled each time, so linear in the string's length
        size *= 2
        text = body[start + 1 : start + 1 + size]
        end = text.replace(rb"\\", b"__").replace(rb"\"", b"__").find(b'"')  # the first quote that is not escaped
        if end >= 0:
            return start + end + 2
    return 0


def _read_value(body: bytes, start: int) -> bytes:
    """Return a string's bytes, empty if it does not end in this body; of another value, its beginning."""
    if body[start : start + 1] != b'"':
        return body[start : start + MAX_VALUE_BYTES]
    return body[start : _end_of_string(body, start) or start]
