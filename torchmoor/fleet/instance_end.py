"""Why an instance's process ended: its exit, and the end of its log."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torchmoor.fleet.torchserve import InstanceSpec
from torchmoor.proxy.instances.instance import InstanceEnd

NUM_LOG_LINES = 15
MAX_LINE = 500  # characters
_TAIL_BYTES = 16 << 10
_HEADING = "the end of its log:\n"


def describe_exit(status: int) -> str:
    """Describe the exit status of an instance's supervisor, which has that of TorchServe's own command."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"has ended with exit status {status}" if status else "has ended"


def read_end(spec: InstanceSpec, reason: str) -> InstanceEnd:
    """Return an instance's end. reason: a message, which may contain the log's end."""
    first = reason.partition("\n")[0].removesuffix(f"; {_HEADING.strip()}").removeprefix(f"{spec.name} ")
    return InstanceEnd(time.time(), first, _read_tail(spec))


def quote_log(spec: InstanceSpec) -> str:
    """Return the end of the instance's log, for an error message."""
    return quote_lines(_read_tail(spec))


def quote_lines(lines: tuple[str, ...]) -> str:
    """Return lines of a log, for a message."""
    return _HEADING + "\n".join(lines) if lines else "it wrote no log"


def _read_tail(spec: InstanceSpec) -> tuple[str, ...]:
    for path in (spec.log_file, spec.folder / "console.log"):
        lines = _last_lines(path)
        if lines:
            return lines
    return ()


def _last_lines(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(begin)
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ()
    lines = text.splitlines()
    return tuple(line[:MAX_LINE] for line in lines[1 if begin and len(lines) > 1 else 0 :][-NUM_LOG_LINES:])
