"""What an instance's log says of it: its progress while it starts, why its model cannot be loaded, and its end."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from torchmoor.fleet.torchserve import InstanceSpec
from torchmoor.proxy.instances.instance import InstanceEnd
from torchmoor.wire.connection_errors import is_shortage
from torchmoor.wire.progress import MARK

_HEAP_FULL = "Terminating due to java.lang.OutOfMemoryError: Java heap space"  # in the console, as the JVM says it
TAKEN = "failed: Address already in use"  # in the console, as netty says it
NUM_LOG_LINES = 15
MAX_LINE = 500  # characters
MAX_TRACE_LINES = 200  # of Java's stack traces
_TAIL_BYTES = 16 << 10
_HEADING = "the end of its log:\n"
DEATH_MESSAGE = "Backend worker process died."  # a traceback follows
# TorchServe's own line when it cannot read or unpack an archive, and the next one. It then serves without a model.
_ARCHIVE_FAILURE = re.compile(r" Failed to load model: \S+\n(?P<reason>[A-Za-z_][\w.]*(?:: .*)?)\n")

# Lines of a worker in the instance's log.
_WORKER_LINE = re.compile(r" (W-\d+-\S+) MODEL_LOG - (.*)")
_LOAD_FAILURE = re.compile(r"Failed to load model |Load model \S+ (cpu|cuda) OOM")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?")
# TorchServe tries to import its own handlers from the archive first; the next exception is the cause.
_DEFAULT_HANDLER = re.compile(
    r"ModuleNotFoundError: No module named '(image_classifier|image_segmenter|object_detector|text_classifier)'"
)
# TorchServe's line about a worker that ended while it loaded the model, for any reason.
_ENDED_LOAD = re.compile(r" (W-\d+-\S+) \S+\.BatchAggregator - Load model failed: \S+, error: Worker died\.")
_STARTUP_TIMEOUT = "Backend worker did not respond in given time"  # TorchServe has ended the worker itself


def find_load_failure(spec: InstanceSpec) -> str | None:
    """Return from the log why the worker could not load its model; None if it may still succeed.

    TorchServe logs a RuntimeError and a lack of memory in one line. After any other error, such as a missing module,
    the worker dies with a traceback, whose first exception is the cause. A worker that is killed or exits writes
    nothing, and counts as failed the second time. Without a readable archive or enough disk, TorchServe starts no
    worker.
    """
    log = _read_log(spec)
    unread = _ARCHIVE_FAILURE.search(log)
    if unread is not None:
        return f"TorchServe could not unpack {spec.archive} into {spec.folder}: {unread['reason']}"
    dead: set[str] = set()
    for worker, text in _worker_lines(log):
        if _LOAD_FAILURE.match(text):
            return text.partition("exception ")[2] or text
        if text == DEATH_MESSAGE:
            dead.add(worker)
        elif worker in dead and _EXCEPTION.fullmatch(text) and not _DEFAULT_HANDLER.fullmatch(text):
            return text
    ended = [match[1] for match in _ENDED_LOAD.finditer(log)]
    if len(ended) > len(set(ended)) and _STARTUP_TIMEOUT not in log:
        return (
            "its worker ended twice while loading, without an error: it exited, or was killed, as happens if the host "
            "has too little memory for the model"
        )
    return None


def find_progress(spec: InstanceSpec) -> str:
    """Return what the worker is downloading or loading, from its last line of progress in the log."""
    found = [text for _, text in _worker_lines(_read_log(spec)) if text.startswith(MARK)]
    return found[-1].removeprefix(MARK) if found else "loading its model"


def _read_log(spec: InstanceSpec) -> str:
    """Return the instance's log as far as it is written; empty if it cannot be read now."""
    if not spec.log_file.is_file():
        return ""
    try:
        return spec.log_file.read_text(errors="replace")
    except OSError as error:
        if is_shortage(error):  # says nothing about the instance; a later look can read the log
            return ""
        raise


def _worker_lines(log: str) -> list[tuple[str, str]]:
    """Return the workers' lines in a log, each with its worker."""
    return [(match[1], match[2]) for line in log.splitlines() if (match := _WORKER_LINE.search(line)) is not None]


def describe_exit(status: int) -> str:
    """Describe the exit status of an instance's guard, which exits with the status of TorchServe's command."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:  # most real-time signals have no name
            return f"was killed by signal {-status}"
    return f"has ended with exit status {status}" if status else "has ended"


def read_end(spec: InstanceSpec, reason: str) -> InstanceEnd:
    """Return an instance's end. reason: a message, which may contain the log's end."""
    first = reason.partition("\n")[0].removesuffix(f"; {_HEADING.strip()}").removeprefix(f"{spec.name} ")
    log = _read_tail(spec)
    if _HEAP_FULL in log:
        first += ": the heap of its JVM was too small; set a larger --heap-mib, or launcher.heap_mib of the file"
    return InstanceEnd(time.time(), first, log)


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
