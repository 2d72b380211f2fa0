"""Describes why an instance's process ended: its exit status, and the end of its log."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torchmoor.fleet.torchserve import InstanceSpec
from torchmoor.proxy.instances.instance import InstanceEnd

TAKEN = "failed: Address already in use"  # in the console, as netty says it
NUM_LOG_LINES = 15
MAX_LINE = 500  # characters
MAX_TRACE_LINES = 200  # of Java's stack traces
_TAIL_BYTES = 16 << 10
_HEADING = "the end of its log:\n"


def describe_exit(status: int) -> str:
    """Describe the exit status of an instance's supervisor, which exits with the status of TorchServe's command."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:  # most real-time signals have no name
            return f"was killed by signal {-status}"
    return f"has ended with exit status {status}" if status else "has ended"


def read_end(spec: InstanceSpec, reason: str) -> InstanceEnd:
    """Return an instance's end. reason: a message, which may contain the log's end."""
    first = reason.partition("\n")[0].removesuffix(f"; {_HEADING.strip()}").removeprefix(f"{spec.name} ")
    return InstanceEnd(time.time(), first, _read_tail(spec))


def has_met_taken_port(spec: InstanceSpec) -> bool:
    """Return True if TorchServe has ended because another program listens on one of its ports."""
    return any(TAKEN in line for line in _last_lines(spec.console_file, num_lines=MAX_TRACE_LINES))


def quote_log(spec: InstanceSpec) -> str:
    """Return the end of the instance's log, for an error message."""
    return quote_lines(_read_tail(spec))


def quote_lines(lines: tuple[str, ...]) -> str:
    """Return lines of a log, for a message."""
    return _HEADING + "\n".join(lines) if lines else "it wrote no log"


def _read_tail(spec: InstanceSpec) -> tuple[str, ...]:
    """Return the last lines of the console, where the JVM writes why it cannot start, and of the log."""
    return (*_last_lines(spec.console_file), *_last_lines(spec.log_file))


def _last_lines(path: Path, num_lines: int = NUM_LOG_LINES) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(begin)
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ()
    lines = text.splitlines()
    return tuple(line[:MAX_LINE] for line in lines[1 if begin and len(lines) > 1 else 0 :][-num_lines:])
