"""The access log: one line of JSON per request, written by a thread of its own.

The event loop only appends to a queue, and the thread writes the gathered lines in one call, so a slow disk does not
delay requests. If the thread falls behind for long, lines are dropped and counted. Several processes may append to one
file: it is opened with O_APPEND, and each write has whole lines only.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import deque
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quote

from torchmoor.config.observe import ObserveSettings
from torchmoor.errors import ConfigError
from torchmoor.proxy.dispatch.record import RequestRecord
from torchmoor.wire.receipt import GENERATED_TOKENS, NUMBER_FIELDS, PREFILL_TOKENS

logger = logging.getLogger(__name__)

STDERR = "stderr"
INTERVAL_S = 1.0  # between writes
WAKE_BYTES = 65_536  # bytes of gathered lines; more are written before the interval ends
PIPE_BYTES = 4096  # the largest atomic write to a pipe (PIPE_BUF)
STOP_S = 2.0
MAX_PLACES = 4096
_TOKENS = tuple(NUMBER_FIELDS[header] for header in (PREFILL_TOKENS, GENERATED_TOKENS))
# Without O_NONBLOCK, the opening of a pipe would wait for its reader.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK


class AccessLog:
    """Writes records between start and stop. `write` is for the event loop's thread only."""

    def __init__(self, settings: ObserveSettings) -> None:
        self.num_lines = 0
        self._num_refused = self._num_lost = 0  # because the buffer was full; because a write failed
        self._target = settings.access_log
        self._settings = settings
        self._lines: deque[bytes] = deque()
        # Each counter has one writing thread, so no lock is needed; the buffered bytes are the difference.
        self._num_bytes_in = self._num_bytes_out = 0
        self._news = threading.Event()
        self._is_reopening = self._is_stopping = self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._file = -1
        self._most = 0  # bytes of one write
        self._is_torn = False  # the file ends within a line, because its disk was full

    @property
    def num_dropped(self) -> int:
        """Lines that could not be written, or not fast enough."""
        return self._num_refused + self._num_lost

    def start(self) -> None:
        """Open the file and start the thread. Raises ConfigError if the file cannot be opened."""
        try:
            self._open()
        except OSError as error:
            why = "no program reads this pipe" if error.errno == errno.ENXIO else error.strerror
            raise ConfigError(f"observe.access_log: cannot append to {self._target}: {why}") from error
        self._thread.start()

    def stop(self) -> None:
        """Write the remaining lines; wait at most STOP_S for that."""
        self._is_stopping = True
        self._news.set()
        self._thread.join(STOP_S)

    def reopen(self) -> None:
        """Open the file again by its name: the old one was moved away."""
        self._is_reopening = True
        self._news.set()

    def write(self, record: RequestRecord) -> None:
        """Add a line; never waits."""
        line = render(record)
        num_waiting = self._num_bytes_in - self._num_bytes_out + len(line)
        if num_waiting > self._settings.access_log_buffer_bytes:
            self._num_refused += 1
            return
        self.num_lines += 1
        self._num_bytes_in += len(line)
        self._lines.append(line)
        if num_waiting >= WAKE_BYTES and not self._news.is_set():
            self._news.set()

    # The thread

    def _run(self) -> None:
        while not self._is_stopping:
            self._news.wait(INTERVAL_S)
            self._news.clear()
            self._write_all()
            if self._is_reopening:
                self._is_reopening = False
                self._reopen()
        self._write_all()
        if self._target != STDERR:
            os.close(self._file)

    def _write_all(self) -> None:
        lines: list[bytes] = []
        size = 0
        while self._lines:
            line = self._lines.popleft()
            if lines and size + len(line) > self._most:
                self._write_out(lines, size)
                lines, size = [], 0
            lines.append(line)
            size += len(line)
        if lines:
            self._write_out(lines, size)

    def _write_out(self, lines: list[bytes], size: int) -> None:
        data = memoryview(b"".join((b"\n", *lines) if self._is_torn else lines))
        try:
            while data:
                num_written = os.write(self._file, data)
                self._is_torn = data[num_written - 1] != ord("\n")
                data = data[num_written:]
            self._is_failing = False
        except OSError as error:
            self._num_lost += len(lines)
            if not self._is_failing:
                self._is_failing = True
                logger.error("access log not written target=%s error=%s", self._target, error.strerror)
        self._num_bytes_out += size

    def _open(self) -> None:
        if self._target == STDERR:
            self._file = 2
        else:
            self._file = os.open(self._target, _FLAGS, 0o640)
            os.set_blocking(self._file, True)
        is_regular = stat.S_ISREG(os.fstat(self._file).st_mode)
        self._most = WAKE_BYTES if is_regular else PIPE_BYTES
        self._is_torn = is_regular and self._target != STDERR and _ends_within_line(self._target)
        if self._is_torn:
            self._write_out([], 0)  # at once, so that of several processes only the first one ends the line

    def _reopen(self) -> None:
        if self._target == STDERR:
            return
        old = self._file
        try:
            self._open()
        except OSError as error:
            logger.error("access log not reopened target=%s error=%s", self._target, error.strerror)
        else:
            os.close(old)


def _ends_within_line(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # the file is empty, or may not be read
        return False


@lru_cache(maxsize=2)
def _second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


@lru_cache(maxsize=MAX_PLACES)
def _place(*values: str | None) -> str:
    """Return the part of a line that says where a request went, which is the same for many."""
    names = ("endpoint", "variant", "operation", "instance", "routing_reason")
    return "".join(f'"{name}":{quote(value)},' for name, value in zip(names, values, strict=True) if value is not None)


def render(record: RequestRecord) -> bytes:
    """Return the line; None values are left out. Written by hand, because json.dumps takes three times as long."""
    r = record
    place = _place(r.endpoint, r.variant, r.operation, r.instance, r.routing_reason)
    second = int(r.ended_at)
    ended_at = f"{_second(second)}.{int((r.ended_at - second) * 1000):03d}Z"
    inference_id = f'"{r.request_id}"' if r.inference_id == r.request_id else quote(r.inference_id)
    line = (
        f'{{"time":"{ended_at}","inference_id":{inference_id},"request_id":"{r.request_id}",{place}'
        f'"status":{r.status or "null"},"outcome":"{r.outcome}","bytes_in":{r.num_bytes_in},'
        f'"bytes_out":{r.num_bytes_out},"retries":{r.num_retries},"total_ms":{r.total_s * 1000:.3f}'
    )
    if r.upstream_s is not None:
        line += f',"upstream_ms":{r.upstream_s * 1000:.3f}'
    if r.first_byte_s is not None:
        line += f',"first_byte_ms":{r.first_byte_s * 1000:.3f}'
    if r.waited_s is not None:
        line += f',"waited_ms":{r.waited_s * 1000:.3f}'
    if r.receipt:
        line += "".join(f',"{name}":{r.receipt[name]}' for name in _TOKENS if name in r.receipt)
    if r.session is not None:
        line += f',"session":"{r.session}"'
    if r.principal is not None:
        line += f',"principal":"{r.principal}"'
    if r.trace_id is not None:
        line += f',"trace_id":"{r.trace_id}"'
    if r.target_model is not None:
        line += f',"target_model":{quote(r.target_model)}'
    if r.error_type is not None:
        line += f',"error_type":{quote(r.error_type)}'
    if r.status_refused is not None:
        line += f',"status_refused":{r.status_refused}'
    if r.operation is None:
        line += f',"method":{quote(r.method)},"path":{quote(r.path)}'
    return f"{line}}}\n".encode()
