"""Bodies of JSON: a bound on their values, each of which takes many times its bytes of memory once it is parsed."""

import json
from typing import Any

from handlers.errors import InvalidRequest


def load_json(text: bytes | str, max_values: int) -> Any:
    """Parse JSON. Raises InvalidRequest, without parsing it, if it may have more values; ValueError, RecursionError.

    Each value follows a bracket, a brace or a comma. Those within texts count as well, so the number is an upper bound.
    """
    marks: tuple[Any, ...] = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
    number = sum(map(text.count, marks))
    if number > max_values:
        raise InvalidRequest(f"the body has up to {number} JSON values, and it may have {max_values}")
    return json.loads(text)
