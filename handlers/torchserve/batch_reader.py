"""Reads TorchServe's batches from its socket in large parts, and parses a row that is sent again only once.

TorchServe's own reader makes a system call for each number and each string, about 40 per row, and each one releases the
interpreter's lock to the engine's thread. TorchServe sends all rows in flight again at each step: a stream's row is the
same in each of them, so it is compared with the last batch's instead of being parsed. TorchServe 0.12.0 is the
last release, so the replaced functions will not change (docs/decisions/0033-batch-reader.md).

TorchServe sends the body of each unanswered request again at each step, and its reader would parse JSON each time,
before our limits apply: four bodies of 30 MB blocked a worker for a minute.
"""

import os
import struct
from typing import Any, NamedTuple

from ts.protocol import otf_message_handler

PART_BYTES = 1 << 16
INT_BYTES = 4
PARSES = "TS_DECODE_INPUT_REQUEST"  # TorchServe sets it for its workers, and reads it for each body


class KnownRow(NamedTuple):
    """A row of the last batch: its bytes, and the parsed row to return if the same bytes are sent again."""

    sent: bytes
    again: dict[str, Any]


class BatchReader:
    """Replaces TorchServe's functions that read a number of bytes and a row. One thread only."""

    def __init__(self) -> None:
        self._connection: Any = None
        self._data, self._at = b"", 0  # bytes that were read; those from `_at` on were not yet returned
        self._last: dict[bytes, KnownRow] = {}  # by request id, of the last batch
        self._current: dict[bytes, KnownRow] = {}  # of the batch that is being read
        self._read_unbuffered = otf_message_handler._retrieve_buffer
        self._parse_row = otf_message_handler._retrieve_request

    def install(self) -> None:
        os.environ[PARSES] = "false"
        otf_message_handler._retrieve_buffer = self.read
        otf_message_handler._retrieve_request = self.next_row

    def remove(self) -> None:
        """Restore TorchServe's own functions."""
        os.environ.pop(PARSES, None)
        otf_message_handler._retrieve_buffer = self._read_unbuffered
        otf_message_handler._retrieve_request = self._parse_row

    def next_row(self, connection: Any) -> dict[str, Any] | None:
        """Return the next row of a batch, or None at its end.

        A row that the last batch had, too, comes without headers, because the pump reads only those of new rows.
        """
        known = self._next_known()
        if known is not None:
            self._at += len(known.sent)
            self._current[known.again["requestId"]] = known
            return known.again
        data, at = self._data, self._at
        row: dict[str, Any] | None = self._parse_row(connection)
        if row is None:
            self._last, self._current = self._current, {}
        elif data is self._data:  # otherwise it came in several parts
            self._current[row["requestId"]] = KnownRow(data[at : self._at], {**row, "headers": []})
        return row

    def _next_known(self) -> KnownRow | None:
        """Return the row of the last batch that is sent again next, if this part has all of its bytes."""
        id_at = self._at + INT_BYTES
        if id_at > len(self._data):
            return None
        (id_length,) = struct.unpack_from("!i", self._data, self._at)  # -1: the end of the batch
        known = self._last.get(self._data[id_at : id_at + max(id_length, 0)])
        return known if known is not None and self._data.startswith(known.sent, self._at) else None

    def read(self, connection: Any, length: int) -> bytes | bytearray:
        """Return this many bytes; like TorchServe's, end the process if the front end has closed the connection."""
        if connection is not self._connection:
            self._connection, self._data, self._at = connection, b"", 0
            self._last, self._current = {}, {}
        end = self._at + length
        if end > len(self._data):
            if length >= PART_BYTES:
                return self._read_long(length)
            self._fill(length)
            end = length
        at, self._at = self._at, end
        return self._data[at:end]

    def _read_long(self, length: int) -> bytearray:
        """Read into one block, so that a body takes memory of its own length, not several times as much."""
        data = bytearray(length)
        left = memoryview(data)
        num_given = len(self._data) - self._at
        left[:num_given] = memoryview(self._data)[self._at :]
        left, self._data, self._at = left[num_given:], b"", 0
        while left:
            num_read = self._connection.recv_into(left)
            if not num_read:
                self._read_unbuffered(self._connection, 1)  # reads the same end of the stream, and exits
            left = left[num_read:]
        return data

    def _fill(self, length: int) -> None:
        """Read parts until there are this many bytes, which begin the new `_data`."""
        parts = [self._data[self._at :]]
        missing = length - len(parts[0])
        while missing > 0:
            part = self._connection.recv(PART_BYTES)
            if not part:
                self._read_unbuffered(self._connection, 1)  # the same
            parts.append(part)
            missing -= len(part)
        self._data, self._at = b"".join(parts), 0
