"""`torchmoor sessions`: the open sessions, named by the hashes that the access log shows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import click

from torchmoor.cli.options import admin_options, json_option, show
from torchmoor.cli.running_fleets import complete_endpoints, complete_instances
from torchmoor.cli.tables import format_table, in_bytes, in_time, terminal_width
from torchmoor.clients.admin import AdminClient
from torchmoor.wire.session_query import MAX_PAGE
from torchmoor.wire.session_row import BYTES, FUTURE, PAST, SESSION_FIELDS

ACTION_TIMEOUT_S = 60.0  # a close waits for the journal, for half of this at most
COLUMNS = [field for field in SESSION_FIELDS if field.column]
HEADS = ("SESSION", "ENDPOINT", "INSTANCE", *(field.column for field in COLUMNS), "")


@click.group()
def sessions() -> None:
    """List, close, pin or unpin open sessions.

    A session is named by a hash, as in the access log: its id is a credential and never shown.

    \b
    Examples:
      torchmoor sessions list --instance llava-0
      torchmoor sessions close da68e24be4b32f04
    """


@sessions.command("list")
@click.option(
    "--endpoint", metavar="NAME", shell_complete=complete_endpoints, help="List only this endpoint's sessions."
)
@click.option(
    "--instance", metavar="NAME", shell_complete=complete_instances, help="List only this instance's sessions."
)
@click.option(
    "--limit",
    default=100,
    show_default=True,
    type=click.IntRange(1, MAX_PAGE),
    help="Maximum number of listed sessions.",
)
@click.option("--after", metavar="PLACE", help="Continue a list after this hash, its `next`.")
@json_option
@admin_options
def list_(
    admin: AdminClient, endpoint: str | None, instance: str | None, limit: int, after: str | None, as_json: bool
) -> None:
    """List open sessions: their instances, memory and expiry.

    \b
    Examples:
      torchmoor sessions list
      torchmoor sessions list --endpoint llava --limit 1000 --json | jq -r '.sessions[].session'
    """
    query = {"endpoint": endpoint, "instance": instance, "limit": limit, "after": after}
    found = admin.get("/sessions", query)
    show(found, lambda: describe(found, time.time(), terminal_width()), as_json=as_json)


def describe(found: Mapping[str, Any], now: float, width: int | None) -> Iterator[str]:
    """Yield the table's lines."""
    for instance in found["instances"]:
        name, num_evicted = instance["instance"], instance.get("evicted")
        if not instance["answered"]:
            yield f"{name} reports no sessions."
        elif num_evicted:
            yield f"Evicted by {name}: {num_evicted}. An evicted session continues when it is used."
    if not found["sessions"]:
        yield "No session is open."
        return
    rows = [
        (
            row["session"],
            row["endpoint"],
            row["instance"],
            *(_format(field.kind, row.get(field.name), now) for field in COLUMNS),
            "running" * bool(row["is_running"]) or "pinned" * bool(row["is_pinned"]),
        )
        for row in found["sessions"]
    ]
    yield from format_table(HEADS, rows, width)
    if found.get("next"):
        yield f"There are more: --after {found['next']}"


def _format(kind: str, value: float | None, now: float) -> str:
    """Return a field's text; empty if the instance does not report it."""
    if value is None:
        return ""
    if kind == BYTES:
        return in_bytes(value)
    if kind == PAST:
        return f"{in_time(now - value)} ago"
    return f"in {in_time(value - now)}" if kind == FUTURE else str(value)


def _add(action: str, summary: str, done: str) -> None:
    @sessions.command(action, help=f"{summary}\n\n\b\nExamples:\n  torchmoor sessions {action} da68e24be4b32f04")
    @click.argument("session", metavar="HASH")
    @json_option
    @admin_options
    def act(admin: AdminClient, session: str, as_json: bool) -> None:
        found = admin.post(f"/sessions/{quote(session, safe='')}/{action}", timeout_s=ACTION_TIMEOUT_S)
        name = found["session"]
        show(found, lambda: [f"{name}: {done}"], as_json=as_json)


_add("close", "Close a session, even an evicted one: free its memory, and refuse its next turn.", "closed")
_add("pin", "Keep a session in memory until it is unpinned or expires.", "pinned")
_add("unpin", "Allow a session's memory to be evicted again.", "unpinned")
