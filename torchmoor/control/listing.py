"""Pages of the List operations: filters, order and NextToken."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from botocore.utils import parse_to_aware_datetime

from torchmoor.errors import RequestInvalid

PAGE_SIZE = 10  # the service's own, where a request names none


@dataclass(frozen=True, slots=True)
class ListedResource:
    """A resource in a list. created, modified: in seconds since 1970. summary: what the list shows of it."""

    name: str
    created: float
    modified: float = 0.0
    status: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)


def list_page(rows: Iterable[ListedResource], values: Mapping[str, Any], member: str) -> dict[str, Any]:
    """Return the page that a request asks for, under its member's name. Raises RequestInvalid."""
    size = values.get("MaxResults", PAGE_SIZE)
    if size < 1:
        raise RequestInvalid(f"MaxResults must be 1 or more, not {size}.")
    order = values.get("SortBy", "CreationTime")
    is_descending = values.get("SortOrder", "Descending") == "Descending"

    def place(row: ListedResource) -> list[Any]:
        first = {"Name": row.name, "Status": row.status}.get(order, row.created)
        return [first, row.name]

    chosen = sorted((row for row in rows if _fits(row, values)), key=place, reverse=is_descending)
    if "NextToken" in values:
        last = read_token(values["NextToken"])
        if not isinstance(last, list) or len(last) != 2:
            raise _bad_token()
        try:
            chosen = [row for row in chosen if (place(row) < last if is_descending else place(row) > last)]
        except TypeError:
            raise _bad_token() from None
    page: dict[str, Any] = {member: [row.summary for row in chosen[:size]]}
    if len(chosen) > size:
        page["NextToken"] = write_token(place(chosen[size - 1]))
    return page


def _fits(row: ListedResource, values: Mapping[str, Any]) -> bool:
    for name, time in (("CreationTime", row.created), ("LastModifiedTime", row.modified)):
        before, after = values.get(f"{name}Before"), values.get(f"{name}After")
        if before is not None and time > parse_to_aware_datetime(before).timestamp():
            return False
        if after is not None and time < parse_to_aware_datetime(after).timestamp():
            return False
    wanted = values.get("NameContains", "").lower()
    return wanted in row.name.lower() and values.get("StatusEquals", row.status) == row.status


def _bad_token() -> RequestInvalid:
    return RequestInvalid("NextToken is not valid: use the one of the page before, with the same SortBy and SortOrder.")


def write_token(place: Any) -> str:
    """Return the token of a place in a list."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


def read_token(token: str) -> Any:
    """Return the place in a list, which is unchecked; None for any other text."""
    try:
        return json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        return None
