"""Events of log files, read in pieces, so that an answer holds no more than its own events.

An event is a line. A line without a time has the time of the line before. A line that is longer than a piece is several
events.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import BinaryIO

PIECE_BYTES = 64 << 10
MAX_READ_BYTES = 8 << 20  # for one answer
_TIME = re.compile(rb"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d),(\d{3}) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A line of a log. at: its time in milliseconds. offset, end: in the file."""

    at: int
    message: str
    offset: int
    end: int


Accepts = Callable[[LogEvent], bool]


class LogReader:
    """Reads the events of a file in order, from `offset` to `end`. A read advances `offset`.

    If the offset is beyond the file's end, the file was replaced and is read from its beginning.
    """

    def __init__(self, path: Path, offset: int = 0, end: int | None = None) -> None:
        self.offset = offset if offset <= _size_of(path) else 0
        self.is_at_end = False
        self._path = path
        self._end = end
        self._at: int | None = None  # the time of the last line

    def read(self) -> list[LogEvent]:
        """Return the events of the next piece."""
        data = self._read_bytes()
        length = data.rfind(b"\n") + 1
        if not length and len(data) == PIECE_BYTES:
            length = len(data)
        self.is_at_end = not length
        events = []
        for line in data[:length].removesuffix(b"\n").split(b"\n") if length else ():
            if (match := _TIME.match(line)) is not None:
                self._at = _read_time(match)
            end = min(self.offset + len(line) + 1, self.offset + length)
            events.append(LogEvent(self._at or 0, line.decode(errors="replace"), self.offset, end))
            length -= end - self.offset
            self.offset = end
        return events

    def _read_bytes(self) -> bytes:
        most = PIECE_BYTES if self._end is None else min(PIECE_BYTES, self._end - self.offset)
        try:
            with self._path.open("rb") as file:
                if self._at is None:
                    self._at = _find_time_before(file, self.offset)
                file.seek(self.offset)
                return file.read(max(0, most))
        except FileNotFoundError:
            return b""


def read_forward(path: Path, offset: int, size: int, accepts: Accepts) -> tuple[list[LogEvent], int]:
    """Return up to `size` events from an offset, and where the next answer begins."""
    reader, found = LogReader(path, offset), list[LogEvent]()
    begin = reader.offset
    while len(found) < size and not reader.is_at_end and reader.offset - begin < MAX_READ_BYTES:
        found += filter(accepts, reader.read())
    return found[:size], found[size - 1].end if len(found) >= size else reader.offset


def read_backward(
    path: Path, end: int | None, size: int, accepts: Accepts, max_bytes: int = MAX_READ_BYTES
) -> tuple[list[LogEvent], int, int]:
    """Return up to `size` events before an offset, or before the file's end; where they begin, and where they end."""
    file_bytes = _size_of(path)
    end = file_bytes if end is None else min(end, file_bytes)
    begin = max(0, end - max_bytes)
    reader, found, num_found = LogReader(path, begin, end), deque[LogEvent](maxlen=size), 0
    events = reader.read()
    if begin and events:  # which may be the end of a line
        begin = events.pop(0).end
    while not reader.is_at_end:
        accepted = list(filter(accepts, events))
        found.extend(accepted)
        num_found += len(accepted)
        events = reader.read()
    return list(found), found[0].offset if num_found > size else begin, reader.offset


def merge(
    readers: Mapping[str, LogReader], size: int, accepts: Accepts
) -> tuple[list[tuple[str, LogEvent]], dict[str, int] | None]:
    """Return up to `size` events of several files in the order of their times, and the offsets of the next answer.

    Less than `size` events may be returned before the end, if few are accepted. At the end there are no offsets.
    """
    pending = {name: deque[LogEvent]() for name in readers}
    found: list[tuple[str, LogEvent]] = []
    num_left = max(MAX_READ_BYTES // PIECE_BYTES, 2 * len(readers))

    def fill(name: str) -> None:
        nonlocal num_left
        while not pending[name] and not readers[name].is_at_end and num_left:
            pending[name].extend(filter(accepts, readers[name].read()))
            num_left -= 1

    for name in readers:
        fill(name)
    order = [(events[0].at, name) for name, events in pending.items() if events]
    heapify(order)
    are_known = all(events or readers[name].is_at_end for name, events in pending.items())
    while order and are_known and len(found) < size:
        _, name = heappop(order)
        found.append((name, pending[name].popleft()))
        fill(name)
        if pending[name]:
            heappush(order, (pending[name][0].at, name))
        else:
            are_known = readers[name].is_at_end
    if are_known and not order:
        return found, None
    return found, {name: events[0].offset if events else readers[name].offset for name, events in pending.items()}


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _find_time_before(file: BinaryIO, offset: int) -> int:
    """Return the time of the last line before an offset that has one, if it is near; else 0."""
    begin = max(0, offset - PIECE_BYTES)
    file.seek(begin)
    matches = list(_TIME.finditer(file.read(offset - begin)))
    return _read_time(matches[-1]) if matches else 0


def _read_time(match: re.Match[bytes]) -> int:
    try:
        seconds = int(datetime.fromisoformat(match[1].decode()).timestamp())
    except (ValueError, OverflowError, OSError):  # digits that are not a time, or not one that this system knows
        return 0
    return seconds * 1000 + int(match[2])
