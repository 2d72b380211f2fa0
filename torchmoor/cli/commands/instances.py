"""`torchmoor instances`: the table of instances."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click

from torchmoor.cli.options import Number, admin_options, json_option
from torchmoor.cli.running_fleets import complete_endpoints
from torchmoor.cli.tables import format_table, in_bytes, terminal_width
from torchmoor.clients.admin import AdminClient

HEADS = ("NAME", "ENDPOINT", "STATE", "LOAD", "SESSIONS", "KV", "FEATURES", "HOST")
COLORS = {"ready": "green", "draining": "yellow", "starting": "yellow", "down": "red"}


@click.command()
@click.option(
    "--endpoint", metavar="NAME", shell_complete=complete_endpoints, help="List only this endpoint's instances."
)
@click.option(
    "--watch", metavar="SECONDS", type=Number(min=0.1), help="Repeat the list at this interval, until Ctrl-C."
)
@json_option
@admin_options
def instances(admin: AdminClient, endpoint: str | None, watch: float | None, as_json: bool) -> None:
    """List the instances: state, load, sessions and memory.

    LOAD is outstanding requests / capacity. KV (the engine's cache) and FEATURES (of images) are device memory, HOST is
    images in host memory, each used / total. A value that an instance does not report is empty.

    \b
    Examples:
      torchmoor instances
      torchmoor instances --watch 2
      torchmoor instances --json | jq -r '.instances[] | select(.state != "ready") | .name'
    """
    while True:
        found = admin.get("/dashboard.json")["instances"]
        rows = [row for row in found if endpoint in (None, row["endpoint"])]
        rows.sort(key=lambda row: (row["endpoint"], row["name"]))  # the page has them in their order of start
        if as_json:
            click.echo(json.dumps({"instances": rows}))
        else:
            if watch is not None and terminal_width() is not None:
                click.clear()
            for line in describe(rows, terminal_width()):
                click.echo(line)
        if watch is None:
            return
        time.sleep(watch)


def describe(rows: list[dict[str, Any]], width: int | None) -> Iterator[str]:
    """Yield the table's lines."""
    if not rows:
        yield "There is no instance."
        return
    head, *lines = format_table(HEADS, [_cells(row) for row in rows], width)
    yield head
    for row, line in zip(rows, lines, strict=True):
        state = row["state"]
        yield line.replace(f" {state} ", f" {click.style(state, fg=COLORS.get(state))} ", 1)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    status = row.get("status") or {}
    sessions, memory = status.get("sessions", {}), status.get("memory", {})
    tiers = (_share(memory, f"{name}_bytes", f"{name}_capacity_bytes") for name in ("kv", "features", "host"))
    is_open = f"{sessions['open']}/{sessions['max']}" if "open" in sessions and "max" in sessions else ""
    load = f"{row['outstanding']}/{row['capacity']}"
    return (row["name"], row["endpoint"], row["state"], load, is_open, *tiers)


def _share(memory: Mapping[str, Any], used: str, most: str) -> str:
    return f"{in_bytes(memory[used])}/{in_bytes(memory[most])}" if used in memory and most in memory else ""
