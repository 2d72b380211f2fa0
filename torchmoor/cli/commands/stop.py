"""`torchmoor stop`: end a fleet that this user runs."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import click

from torchmoor.cli.options import Number
from torchmoor.cli.running_fleets import FleetNotFound, find_fleet, port_option, running_fleets
from torchmoor.errors import TorchmoorError

POLL_S = 0.1


@click.command()
@port_option
@click.option("--all", "is_all", is_flag=True, help="Stop every fleet of this user.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=Number(min=0),
    default=60.0,
    show_default=True,
    help="How long to wait until the fleet has ended.",
)
def stop(port: int | None, is_all: bool, timeout: float) -> None:
    """Stop a fleet of `torchmoor up`, as Ctrl-C does: running requests are answered first.

    \b
    Examples:
      torchmoor stop
      torchmoor stop --port 8080
      torchmoor stop --all
    """
    if is_all and port is not None:
        raise click.UsageError("give --port or --all, not both")
    fleets = running_fleets() if is_all else [find_fleet(port)]
    if not fleets:
        raise FleetNotFound("no fleet of this user runs")
    for fleet in fleets:
        with suppress(ProcessLookupError):
            os.kill(fleet.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    for fleet in fleets:
        while fleet.is_running():
            if time.monotonic() >= deadline:
                raise TorchmoorError(
                    f"the fleet at {fleet.runtime} has not ended within {timeout:g} s; it may still answer requests. "
                    f"Send SIGTERM to process {fleet.pid} to end it at once"
                )
            time.sleep(POLL_S)
        click.echo(f"{fleet.runtime}: stopped")
