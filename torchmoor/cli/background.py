"""`torchmoor up -d`: the fleet runs in a process of its own, and the command ends when the fleet is ready."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click

from torchmoor.cli.exit_status import ExitStatus
from torchmoor.cli.running_fleets import is_unlocked, state_folder
from torchmoor.errors import TorchmoorError
from torchmoor.fleet.instance_log import describe_exit
from torchmoor.run.hangups import obey_hangups

POLL_S = 0.1
NUM_LOGS = 5  # logs kept of fleets that have ended


def detach() -> None:
    """Continue in a new background process. This process ends when the new one has announced that it is ready.

    Until then this process passes the fleet's messages on, and Ctrl-C or SIGTERM ends both. The messages are kept in a
    log. Must run before any thread or event loop starts. Raises TorchmoorError if the log cannot be written.
    """
    log, messages = make_log()
    announced, announcing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(announcing)
        _follow_start(pid, announced, log)
    os.setsid()
    os.close(announced)
    os.dup2(announcing, 1)
    os.close(announcing)
    _open_as(0, os.devnull, os.O_RDONLY)
    os.dup2(messages, 2)
    os.close(messages)


def announce(line: str) -> None:
    """Tell the foreground command that the fleet is ready, and close the pipe to it.

    The fleet serves even if the command has ended meanwhile, as it does when its terminal is closed.
    """
    with suppress(BrokenPipeError):
        click.echo(line)
    _open_as(1, os.devnull, os.O_WRONLY)


def _open_as(number: int, path: str | Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    os.dup2(descriptor, number)
    os.close(descriptor)


def make_log() -> tuple[Path, int]:
    """Return a new, empty log and its descriptor; only the newest of earlier fleets are kept.

    The log is locked as long as its fleet runs, also before the fleet has a record. On a file system without locks,
    where `torchmoor logs` finds no fleet, the newest of all logs are kept.
    """
    folder = state_folder()
    path = folder / f"up-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path.with_suffix(".new"), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            has_locks = True
        except OSError:
            has_locks = False
        ended = sorted(each for each in folder.glob("up-*.log") if not has_locks or is_unlocked(each))
        for each in ended[: 1 - NUM_LOGS]:
            each.unlink(missing_ok=True)
        path.with_suffix(".new").rename(path)  # locked before others can see it
    except OSError as error:
        raise TorchmoorError(f"cannot write the fleet's log in {folder}: {error.strerror or error}") from error
    return path, descriptor


def _follow_start(pid: int, announced: int, log: Path) -> NoReturn:
    """Copy the fleet's messages and its announcement until it is ready, or has ended; then exit."""
    obey_hangups()  # the fleet goes on
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` and service managers send it
    line, has_ended = b"", False
    with log.open("rb") as messages:
        try:
            while not has_ended and not line.endswith(b"\n"):
                if select.select([announced], [], [], POLL_S)[0]:
                    part = os.read(announced, 65536)
                    line, has_ended = line + part, not part
                click.echo(messages.read(), nl=False, err=True)
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            raise
        if has_ended:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            click.echo(messages.read(), nl=False, err=True)
            if status < 0:
                raise click.ClickException(f"the fleet {describe_exit(status)} while it started; its log: {log}")
            raise click.exceptions.Exit(status or ExitStatus.FAILED)
    click.echo(line, nl=False)
    raise click.exceptions.Exit(0)
