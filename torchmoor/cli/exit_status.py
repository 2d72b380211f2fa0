"""Exit statuses of the commands. docs/command-line.md has the table."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import click

from torchmoor.cli.foreign_text import without_controls
from torchmoor.clients.errors import AdminRefused, AdminUnreachable, CallFailed, CredentialsRefused, EndpointUnreachable
from torchmoor.errors import TorchmoorError, VariableInvalid
from torchmoor.run.log import discard_unwritten


class ExitStatus(IntEnum):
    """Statuses besides 0, success. click itself returns 2 for a wrong option or argument."""

    FAILED = 1
    WRONG_USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    INTERRUPTED = 130
    BROKEN_PIPE = 141  # the status of a program that SIGPIPE ends


# Of a write to a disk that is full, or fails.
UNWRITABLE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))


MAX_SHOWN = 60  # characters of an argument

# Of errors in AWS's words, which do not name the options here. Those of a signature give their own reason.
CREDENTIALS_CODES = frozenset(("MissingAuthenticationTokenException", "UnrecognizedClientException"))
CREDENTIALS_REMEDY = " (give --keys FILE, or set TORCHMOOR_TOKEN: docs/access.md)"


@contextmanager
def reported_by_exit_status() -> Iterator[None]:
    """Turn our errors into one message and a status. Ctrl-C and a closed output end a command quietly."""
    try:
        yield
    except (TorchmoorError, CallFailed) as error:
        code = error.code if isinstance(error, CredentialsRefused) else ""
        remedy = CREDENTIALS_REMEDY if code in CREDENTIALS_CODES else ""
        failure = click.ClickException(without_controls(f"{error}{remedy}"))
        failure.exit_code = status_of(error)  # type: ignore[misc]  # click's own way
        raise failure from error
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("torchmoor"):
            raise
        raise click.ClickException(
            f"the package {error.name} is not installed, which this command needs: pip install 'torchmoor[serve]', or "
            "'torchmoor[proxy]' where no instance runs"
        ) from error
    except UnicodeEncodeError as error:
        raise click.ClickException(_explain(error)) from error
    except BrokenPipeError:
        discard_unwritten(sys.stdout)
        raise click.exceptions.Exit(ExitStatus.BROKEN_PIPE) from None
    except OSError as error:
        if not _is_explained(error):
            raise
        if error.errno not in UNWRITABLE:
            raise click.ClickException(f"cannot access {error.filename}: {error.strerror}") from error
        discard_unwritten(sys.stdout)
        raise click.ClickException(f"{error.filename or 'the output'} cannot be written: {error.strerror}") from error
    except (KeyboardInterrupt, click.Abort):
        click.echo(err=True)  # the terminal has shown ^C
        raise click.exceptions.Exit(ExitStatus.INTERRUPTED) from None


def _is_explained(error: OSError) -> bool:
    """Return whether `reported_by_exit_status` explains the error: a file's, or a failed write of the output."""
    return isinstance(error, BrokenPipeError) or error.errno in UNWRITABLE or error.filename is not None


def _explain(error: UnicodeEncodeError) -> str:
    """Return the reason: an argument whose bytes Python has decoded to lone surrogates, or the output's encoding."""
    if error.encoding == "utf-8":
        return f"{error.object[:MAX_SHOWN]!r} is not text in UTF-8"
    sign = error.object[error.start : error.end]
    return f"{sign!r} cannot be written in {error.encoding}: select a locale of UTF-8, or set PYTHONIOENCODING=utf-8"


def status_of(error: Exception) -> ExitStatus:
    """Return the status of an error's class."""
    if isinstance(error, (AdminUnreachable, EndpointUnreachable)):
        return ExitStatus.UNREACHABLE
    if isinstance(error, (AdminRefused, CredentialsRefused)):
        return ExitStatus.REFUSED
    if isinstance(error, VariableInvalid):
        return ExitStatus.WRONG_USAGE
    return ExitStatus.FAILED
