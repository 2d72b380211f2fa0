"""`torchmoor instances`: the table of instances."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import click

from torchmoor.cli.options import Number, admin_options, json_option, show
from torchmoor.cli.running_fleets import complete_endpoints
from torchmoor.cli.tables import format_table, in_bytes, terminal_width
from torchmoor.clients.admin import AdminClient
from torchmoor.proxy.instances.instance import InstanceState

HEADS = ("NAME", "ENDPOINT", "STATE")  # the other columns are the proxy's `shown_values`
COLORS = {"ready": "green", "draining": "yellow", "starting": "yellow", "down": "red"}


@click.command()
@click.option(
    "--endpoint", metavar="NAME", shell_complete=complete_endpoints, help="List only this endpoint's instances."
)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([each.value for each in InstanceState], case_sensitive=False),
    help="List only instances in this state. Repeatable.",
)
@click.option(
    "--watch", metavar="SECONDS", type=Number(min=0.1), help="Repeat the list at this interval, until Ctrl-C."
)
@json_option
@admin_options
def instances(
    admin: AdminClient, endpoint: str | None, states: Sequence[str], watch: float | None, as_json: bool
) -> None:
    """List the instances: state, load, sessions and memory.

    LOAD is outstanding requests / capacity. KV (the engine's cache) and FEATURES (of images) are device memory, HOST is
    images in host memory, each used / total. A value that an instance does not report is empty.

    \b
    Examples:
      torchmoor instances
      torchmoor instances --watch 2
      torchmoor instances --state down --state starting --json | jq -r '.instances[].name'
    """
    while True:
        found = admin.get("/dashboard.json")
        columns = [each for each in found.get("shown_values", ()) if each["column"]]
        rows = [row for row in found["instances"] if endpoint in (None, row["endpoint"])]
        rows = [row for row in rows if not states or row["state"] in states]
        rows.sort(key=lambda row: (row["endpoint"], row["name"]))  # the page has them in their order of start
        if watch is not None and terminal_width() is not None and not as_json:
            click.clear()
        is_selection = endpoint is not None or bool(states)
        table = partial(describe, rows, columns, terminal_width(), is_selection=is_selection)
        show({"instances": rows}, table, as_json=as_json)
        if watch is None:
            return
        time.sleep(watch)


def describe(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Mapping[str, str]], width: int | None, *, is_selection: bool
) -> Iterator[str]:
    """Yield the table's lines. is_selection: there may be other instances."""
    if not rows:
        yield f"There is no {'such ' if is_selection else ''}instance."
        return
    cells = [
        (row["name"], row["endpoint"], row["state"], *(_format(row, column) for column in columns)) for row in rows
    ]
    head, *lines = format_table((*HEADS, *(column["column"] for column in columns)), cells, width)
    yield head
    for row, line in zip(rows, lines, strict=True):
        state = row["state"]
        yield line.replace(f" {state} ", f" {click.style(state, fg=COLORS.get(state))} ", 1)


def _format(row: Mapping[str, Any], column: Mapping[str, str]) -> str:
    """Return a value, with its limit if it has one; empty if the instance does not report it."""
    values = [_find(row, path) for path in (column["used"], column["most"]) if path]
    if None in values:
        return ""
    return "/".join(in_bytes(value) if column["unit"] == "bytes" else str(value) for value in values)


def _find(row: Mapping[str, Any], path: str) -> Any:
    found: Any = row
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found
