"""What a command's exit status says. docs/command-line.md has the table."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import click

from torchmoor.errors import TorchmoorError


class Exit(IntEnum):
    """0 is success, 2 (by click) an option or argument that is wrong."""

    FAILED = 1
    UNREACHABLE = 3
    REFUSED = 4
    INTERRUPTED = 130
    BROKEN_PIPE = 141  # as of a program that SIGPIPE ends


@contextmanager
def told_by_exit_status() -> Iterator[None]:
    """Errors of ours become one sentence and a status; Ctrl-C and a reader that has gone end a command quietly."""
    try:
        yield
    except TorchmoorError as error:
        failure = click.ClickException(str(error))
        failure.exit_code = status_of(error)  # type: ignore[misc]  # click's own way
        raise failure from error
    except BrokenPipeError:
        _forget_output()
        raise click.exceptions.Exit(Exit.BROKEN_PIPE) from None
    except (KeyboardInterrupt, click.Abort):
        click.echo(err=True)  # the terminal has shown ^C
        raise click.exceptions.Exit(Exit.INTERRUPTED) from None


def status_of(error: TorchmoorError) -> Exit:
    """By what it is."""
    from torchmoor.clients.errors import AdminRefused, AdminUnreachable, CredentialsRefused, EndpointUnreachable

    if isinstance(error, (AdminUnreachable, EndpointUnreachable)):
        return Exit.UNREACHABLE
    if isinstance(error, (AdminRefused, CredentialsRefused)):
        return Exit.REFUSED
    return Exit.FAILED


def _forget_output() -> None:
    """What is still to be written goes nowhere, so that Python does not complain of it at its end."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # it is no file
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)
