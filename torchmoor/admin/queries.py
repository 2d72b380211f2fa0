"""What lists of the admin plane are asked with."""

from __future__ import annotations

from collections.abc import Mapping

from torchmoor.errors import ValidationError

MAX_DIGITS = 9  # Python refuses to read thousands of them, with an error of its own


def read_limit(query: Mapping[str, str], *, default: int, most: int) -> int:
    """How many rows are wanted. Raises ValidationError."""
    given = query.get("limit", str(default))
    if not given.isdecimal() or len(given) > MAX_DIGITS or not 1 <= int(given) <= most:
        raise ValidationError(f"limit must be from 1 to {most}.")
    return int(given)
