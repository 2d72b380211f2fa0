"""The messages and the log of a program on standard error, where systemd, Kubernetes and SageMaker collect them.

A fleet outlives its terminal: what cannot be written, to a closed pipe or a full disk, is lost.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO


def report(line: str) -> None:
    """Print a step that has begun or ended, or an error."""
    try:
        print(f"torchmoor: {line}", file=sys.stderr, flush=True)
    except OSError:
        discard_unwritten(sys.stderr)


def announcer() -> Callable[[str], None]:
    """Return a function that prints a line of JSON to standard output. A terminal that is closed loses it."""
    has_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: closed before the start

    def announce(line: str) -> None:
        try:
            print(line, flush=True)
        except OSError as error:
            if not (has_terminal and error.errno == errno.EIO):
                raise
            discard_unwritten(sys.stdout)

    return announce


def start_log(level: int | str, *, names_process: bool = False) -> None:
    """Log from a level on. names_process: each line has the process's id."""
    process = "[%(process)d]" if names_process else ""
    form = f"%(asctime)s %(levelname)s %(name)s{process} %(message)s"
    logging.basicConfig(level=level, handlers=[_LogHandler(sys.stderr)], format=form)
    # It warns of a certificate's host name at each attempt; the error of the attempt says the same.
    logging.getLogger("urllib3.connection").setLevel(logging.ERROR)


class _LogHandler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            discard_unwritten(self.stream)
        else:
            super().handleError(record)


def discard_unwritten(stream: TextIO) -> None:
    """Discard what a failed write has left in the stream's buffer, which would fail the program's end, too."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a file
        return
    saved = os.dup(descriptor)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)
    with suppress(OSError):
        stream.flush()
    os.dup2(saved, descriptor)
    os.close(saved)
