"""`torchmoor drain` and `undrain`: take instances out of service, and put them back."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any
from urllib.parse import quote

import click

from torchmoor.cli.options import Number, admin_options, json_option, show
from torchmoor.cli.running_fleets import complete_instances
from torchmoor.clients.admin import AdminClient
from torchmoor.clients.errors import AdminError

Row = dict[str, Any]  # an instance, as the admin API describes it

INTERVAL_S = 0.5
WAIT_S = 600.0


def _wait_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option(
            "--timeout",
            default=WAIT_S,
            show_default=True,
            type=Number(min=0),
            metavar="SECONDS",
            help="Time limit of --wait; after it the exit status is 1.",
        ),
        click.option("--wait", is_flag=True, help="Wait until it is done, and report progress on standard error."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="INSTANCE...", shell_complete=complete_instances)
@_wait_options
@json_option
@admin_options
def drain(admin: AdminClient, names: tuple[str, ...], wait: bool, timeout: float, as_json: bool) -> None:
    """Stop new requests to INSTANCE; running requests end normally. With a journal, other instances take its sessions.

    With --wait, return when no request runs there; then it can be stopped or replaced. A restarted instance of the same
    name stays drained.

    \b
    Examples:
      torchmoor drain llava-1 --wait
      torchmoor drain llava-1 --wait --timeout 120 && systemctl restart torchserve@1
    """
    _move(admin, names, "drain", lambda row: bool(row["outstanding"] == 0), wait, timeout, as_json)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="INSTANCE...", shell_complete=complete_instances)
@_wait_options
@json_option
@admin_options
def undrain(admin: AdminClient, names: tuple[str, ...], wait: bool, timeout: float, as_json: bool) -> None:
    """End the drain of INSTANCE: it takes requests, and its sessions' turns, again.

    With --wait, return when its probe reports that it is ready.

    \b
    Examples:
      torchmoor undrain llava-1
      torchmoor undrain llava-0 llava-1 --wait
    """
    _move(admin, names, "resume", lambda row: bool(row["state"] == "ready"), wait, timeout, as_json)


def _move(
    admin: AdminClient,
    names: tuple[str, ...],
    action: str,
    is_done: Callable[[Row], bool],
    wait: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    known = _read_rows(admin)
    if unknown := [name for name in names if name not in known]:
        raise AdminError(f"There is no instance {unknown[0]!r}; see torchmoor instances. Nothing was changed.")
    serving = [name for name in names if action == "resume" and not known[name]["is_drained"]]
    if serving and len(names) > 1:  # of a single one, the admin plane says why
        raise AdminError(f"Instance {serving[0]!r} is not drained: nothing to undrain. Nothing was changed.")
    rows = [admin.post(f"/instances/{quote(name, safe='')}/{action}") for name in dict.fromkeys(names)]
    if wait:
        rows = _wait(admin, rows, is_done, timeout_s)
    show(
        {"instances": rows},
        lambda: [f"{row['name']}: {row['state']}, {_running(row)}" for row in rows],
        as_json=as_json,
    )


def _wait(admin: AdminClient, rows: list[Row], is_done: Callable[[Row], bool], timeout_s: float) -> list[Row]:
    """Report progress until all instances are done; return their last rows. Raises AdminError after the time limit."""
    names = [row["name"] for row in rows]
    deadline, last = monotonic() + timeout_s, ""
    while late := [row for row in rows if not is_done(row)]:
        news = ", ".join(f"{row['name']} is {row['state']}, {_running(row)}" for row in late)
        if monotonic() >= deadline:
            raise AdminError(f"not done within {timeout_s:g} s: {news}")
        if news != last:
            click.echo(f"Waiting: {news}", err=True)
        last = news
        sleep(INTERVAL_S)
        found = _read_rows(admin)
        if gone := [name for name in names if name not in found]:
            raise AdminError(f"instance {gone[0]!r} no longer exists")
        rows = [{key: found[name][key] for key in ("name", "state", "outstanding")} for name in names]
    return rows


def _read_rows(admin: AdminClient) -> dict[str, Row]:
    """Return the fleet's instances, by name."""
    return {row["name"]: row for row in admin.get("/instances")["instances"]}


def _running(row: Row) -> str:
    number = row["outstanding"]
    return "1 request runs there" if number == 1 else f"{number or 'no'} requests run there"
