"""Parses JSON bodies, whose number of values is bounded.

The pump's thread must not take long, because all requests of a step wait for it. pydantic's parser makes fewer copies
of a long text than Python's (docs/decisions/0058-json-parser.md).
"""

import json
import re
from typing import Any

from pydantic_core import from_json

from handlers.errors import InvalidJson, InvalidRequest
from torchmoor.wire.json_values import count_values

_BEGINNING = re.compile(rb"\s*+[{\[]")


def load_json(text: bytes | bytearray, max_values: int, *, what: str = "the body", hint: str = "") -> Any:
    """Parse JSON. what: names the text in errors. hint: follows the error of text that is not JSON.

    Raises InvalidRequest, before parsing, if the text may have more than max_values; InvalidJson.
    """
    number = count_values(text)
    if number > max_values:
        raise InvalidRequest(f"{what} has up to {number} JSON values; the limit is {max_values}")
    try:
        return from_json(text, cache_strings="keys")
    except ValueError:
        return _load_slowly(text, what, hint)


def _load_slowly(text: bytes | bytearray, what: str, hint: str) -> Any:
    """Parse JSON that the other parser refuses: in UTF-16, nested deeply, or with half a surrogate pair.

    Raises InvalidJson, with nothing of the text in its message.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno} column {error.colno}"
    except UnicodeError:
        reason = "it is not UTF-8"
    except (ValueError, RecursionError):
        reason = "it cannot be parsed"
    raise InvalidJson(f"{what} is not valid JSON: {reason}{hint}")


def begins_as_json(body: bytes | bytearray) -> bool:
    """Return whether the first character is that of a JSON object or list."""
    return _BEGINNING.match(body) is not None
