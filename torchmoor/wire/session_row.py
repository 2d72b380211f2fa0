"""A row of the list of sessions: a worker fills it, the proxy passes it on, the command and the dashboard show it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

COUNT, BYTES, PAST, FUTURE, FLAG, TEXT = "count", "bytes", "past", "future", "flag", "text"
MAX_TEXT_CHARS = 16


@dataclass(frozen=True, slots=True)
class RowField:
    """A value of a session. kind: PAST and FUTURE are seconds since 1970.

    column: its heading in `torchmoor sessions`; title: on the dashboard. Empty: not a column there.
    """

    name: str
    kind: str = COUNT
    column: str = ""
    title: str = ""


SESSION_FIELDS = (
    RowField("tier", TEXT, "TIER", "Tier"),
    RowField("bytes", BYTES, "SIZE", "Memory"),
    RowField("turns", COUNT, "TURNS", "Turns"),
    RowField("images"),
    RowField("waiting"),
    RowField("opened_at", PAST),
    RowField("last_used_at", PAST, "USED", "Last used"),
    RowField("expires_at", FUTURE, "EXPIRES", "Expires"),
    RowField("is_running", FLAG),
    RowField("is_pinned", FLAG),
)


def read_session_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields; None for a missing value and for a number of another type. Anything else is dropped."""
    found: dict[str, Any] = {}
    for field in SESSION_FIELDS:
        value = given.get(field.name)
        if field.kind == FLAG:
            found[field.name] = value is True
        elif field.kind == TEXT:
            found[field.name] = None if value is None else str(value)[:MAX_TEXT_CHARS]
        else:
            found[field.name] = value if type(value) in (int, float) else None
    return found


def make_script() -> str:
    """Return the module session_row.js of the dashboard: the table above as FIELDS."""
    return f"export const FIELDS = {json.dumps([asdict(each) for each in SESSION_FIELDS])};\n"
