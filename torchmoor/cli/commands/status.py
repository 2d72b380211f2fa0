"""`torchmoor status`: the fleets that this user runs on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from torchmoor.cli.exit_status import ExitStatus
from torchmoor.cli.options import admin_keys_option, find_admin_token, json_option, show
from torchmoor.cli.running_fleets import FleetRecord, running_fleets
from torchmoor.cli.tables import format_table, in_time, terminal_width
from torchmoor.clients.admin import AdminClient
from torchmoor.clients.errors import AdminError

HEADS = ("PID", "UP", "RUNTIME", "ADMIN", "ENDPOINTS", "READY")


@click.command()
@admin_keys_option
@json_option
def status(keys_file: Path | None, as_json: bool) -> None:
    """List the fleets of `torchmoor up` that this user runs on this machine.

    READY is the number of ready instances of all instances; `?` if the admin plane does not answer or requires another
    token. The exit status is 3 if no fleet runs.

    \b
    Examples:
      torchmoor status
      torchmoor status --json | jq -r '.fleets[].runtime'
    """
    token = find_admin_token(keys_file)
    found = [{**asdict(fleet), **_ask(fleet, token)} for fleet in running_fleets()]
    show({"fleets": found}, lambda: _describe(found), as_json=as_json)
    if not found:
        raise click.exceptions.Exit(ExitStatus.UNREACHABLE)


def _ask(fleet: FleetRecord, token: str) -> dict[str, Any]:
    """Return the endpoints, also those that were created later, and the state of each instance.

    The states are None if the admin plane does not answer or wants another token.
    """
    try:
        answer = AdminClient(fleet.admin, token).get("/instances")
        states = {row["name"]: row["state"] for row in answer["instances"]}
    except AdminError:
        return {"instances": None}
    return {"endpoints": list(dict.fromkeys((*fleet.endpoints, *answer["endpoints"]))), "instances": states}


def _describe(fleets: list[dict[str, Any]]) -> Iterator[str]:
    if not fleets:
        yield "No fleet runs. Start one: torchmoor up -d"
        return
    rows = [
        (
            str(fleet["pid"]),
            in_time(time.time() - fleet["started"]),
            fleet["runtime"],
            fleet["admin"],
            ", ".join(fleet["endpoints"]),
            _num_ready(fleet["instances"]),
        )
        for fleet in fleets
    ]
    yield from format_table(HEADS, rows, terminal_width())


def _num_ready(states: dict[str, str] | None) -> str:
    return "?" if states is None else f"{sum(state == 'ready' for state in states.values())}/{len(states)}"
