"""Bounds the number of values in a JSON body."""

import json
from typing import Any

from handlers.errors import InvalidRequest
from torchmoor.wire.json_values import count_values


def load_json(text: bytes | str, max_values: int) -> Any:
    """Parse JSON. Raises InvalidRequest, without parsing it, if it may have more values; ValueError, RecursionError."""
    number = count_values(text)
    if number > max_values:
        raise InvalidRequest(f"the body has up to {number} JSON values, and it may have {max_values}")
    return json.loads(text)
