"""`torchmoor logs`: the log of a fleet or of one of its instances."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

from torchmoor.cli.running_fleets import FleetRecord, complete_instances, find_fleet, port_option
from torchmoor.errors import TorchmoorError

POLL_S = 0.2


@click.command()
@click.argument("instance", required=False, shell_complete=complete_instances)
@click.option(
    "-f", "--follow", is_flag=True, help="Print new lines as they are written, until Ctrl-C or the fleet's end."
)
@click.option(
    "-n", "--lines", type=click.IntRange(0), default=100, show_default=True, help="Number of last lines to print first."
)
@port_option
def logs(instance: str | None, follow: bool, lines: int, port: int | None) -> None:
    """Print the last lines of a log: the fleet's own, or an INSTANCE's.

    An instance's log is TorchServe's, with the lines of its workers; it is deleted when the fleet ends. The fleet's own
    log exists if `torchmoor up` runs in the background or its standard error goes to a file.

    \b
    Examples:
      torchmoor logs
      torchmoor logs llava-0 -f
      torchmoor logs llava-0 -n 1000 | grep ERROR
    """
    fleet = find_fleet(port)
    for part in _read(_find_log(fleet, instance), lines, fleet if follow else None):
        click.echo(part, nl=False)


def _find_log(fleet: FleetRecord, instance: str | None) -> Path:
    """Return a log's path. Raises TorchmoorError if there is none."""
    names = fleet.instances()
    if instance is None:
        if not fleet.log:
            raise TorchmoorError(
                "the fleet's messages are on the terminal or in the pipe that it was started with; its instances: "
                f"{', '.join(names)}"
            )
        return Path(fleet.log)
    if instance not in names:
        raise TorchmoorError(f"the fleet has no log of an instance {instance!r}; its instances: {', '.join(names)}")
    return fleet.instance_log(instance)


def _read(path: Path, num_lines: int, followed: FleetRecord | None) -> Iterator[bytes]:
    """Yield the last lines of a log, and then what is added until the fleet has ended. Raises TorchmoorError."""
    try:
        with path.open("rb") as file:
            yield from deque(file, num_lines)
            offset = file.tell()
        if followed is not None:
            yield from _follow(path, offset, followed)
    except OSError as error:
        raise TorchmoorError(f"cannot read {path}: {error.strerror or error}") from error


def _follow(path: Path, offset: int, fleet: FleetRecord) -> Iterator[bytes]:
    """Yield new bytes of a log after an offset, also after a rotation, until the fleet has ended."""
    is_running = True
    while is_running:
        with path.open("rb") as file:
            file.seek(offset)
            offset = 0  # of the file that replaces this one
            is_replaced = False
            while is_running and not is_replaced:
                is_running, is_replaced = fleet.is_running(), _is_replaced(file, path)  # before the last read
                yield file.read()
                if is_running and not is_replaced:
                    time.sleep(POLL_S)


def _is_replaced(file: BinaryIO, path: Path) -> bool:
    """Return whether another file has the path; False while no file has it, as while an instance restarts."""
    try:
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False
