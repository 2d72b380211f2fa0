"""A query for a page of a worker's sessions: the body of the operation `sessions`, with its checks.

A worker refuses a field that it does not know, so that an older one does not ignore a filter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torchmoor.wire.session_ids import SESSION_HASH_PREFIX

MAX_PAGE = 1000
MAX_DIGITS = 9  # of a number as text, since int() raises an error of its own for thousands of digits


class SessionQueryError(ValueError):
    """A field's value is not valid."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionQuery:
    """Which sessions to list, in the order of their hashes. The fields are the keys of the operation's body.

    after: the hash that the page follows. prefix: the hashes begin with it. Raises SessionQueryError.
    """

    after: str = ""
    prefix: str = ""
    limit: int = MAX_PAGE

    def __post_init__(self) -> None:
        for name, value in (("after", self.after), ("prefix", self.prefix)):
            if not isinstance(value, str) or not SESSION_HASH_PREFIX.fullmatch(value):
                raise SessionQueryError(name, "A session's hash or its first digits must be at most 16 of 0-9 and a-f.")
        if type(self.limit) is not int or not 1 <= self.limit <= MAX_PAGE:
            raise SessionQueryError("limit", f"limit must be from 1 to {MAX_PAGE}.")

    @classmethod
    def from_text(cls, values: Mapping[str, str]) -> SessionQuery:
        """Read the fields among the parameters of a URL; others are ignored."""
        given: dict[str, Any] = {name: values[name] for name in SESSION_QUERY_FIELDS if name in values}
        if (limit := given.get("limit")) is not None:
            given["limit"] = int(limit) if limit.isdecimal() and len(limit) <= MAX_DIGITS else None
        return cls(**given)

    def to_body(self) -> dict[str, Any]:
        """Return the operation's body without the fields at their defaults, which an older worker may not know."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}


SESSION_QUERY_FIELDS = tuple(field.name for field in fields(SessionQuery))
