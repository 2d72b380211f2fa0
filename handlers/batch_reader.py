"""Reads TorchServe's batches from its socket in large parts, and does not parse bodies.

TorchServe's own reader makes a system call for each number and each string, about 40 per row, and each one releases the
interpreter's lock to the engine's thread. TorchServe 0.12.0 is the last release, so the replaced function will not
change (docs/decisions/0033-batch-reader.md).

TorchServe sends the body of each unanswered request again at each step, and its reader would parse JSON each time,
before our limits apply: four bodies of 30 MB blocked a worker for a minute.
"""

import os
from typing import Any

from ts.protocol import otf_message_handler

PART_BYTES = 1 << 16
PARSES = "TS_DECODE_INPUT_REQUEST"  # TorchServe sets it for its workers, and reads it for each body


class BatchReader:
    """Replaces TorchServe's function that reads a number of bytes. One thread only."""

    def __init__(self) -> None:
        self._connection: Any = None
        self._data = memoryview(b"")  # bytes that were read but not yet returned
        self._read_unbuffered = otf_message_handler._retrieve_buffer

    def install(self) -> None:
        os.environ[PARSES] = "false"
        otf_message_handler._retrieve_buffer = self.read

    def remove(self) -> None:
        """Restore TorchServe's own function."""
        os.environ.pop(PARSES, None)
        otf_message_handler._retrieve_buffer = self._read_unbuffered

    def read(self, connection: Any, length: int) -> bytes | bytearray:
        """Return this many bytes; like TorchServe's, end the process if the front end has closed the connection."""
        if connection is not self._connection:
            self._connection, self._data = connection, memoryview(b"")
        if length > len(self._data):
            if length >= PART_BYTES:
                return self._read_long(length)
            self._fill(length)
        data, self._data = self._data[:length], self._data[length:]
        return bytes(data)

    def _read_long(self, length: int) -> bytearray:
        """Read into one block: a body takes its own length of memory, not several times as much."""
        data = bytearray(length)
        left = memoryview(data)
        left[: len(self._data)] = self._data
        left, self._data = left[len(self._data) :], memoryview(b"")
        while left:
            num_read = self._connection.recv_into(left)
            if not num_read:
                self._read_unbuffered(self._connection, 1)  # reads the same end of the stream, and exits
            left = left[num_read:]
        return data

    def _fill(self, length: int) -> None:
        parts = [bytes(self._data)]
        missing = length - len(self._data)
        while missing > 0:
            part = self._connection.recv(PART_BYTES)
            if not part:
                self._read_unbuffered(self._connection, 1)  # the same
            parts.append(part)
            missing -= len(part)
        self._data = memoryview(b"".join(parts))
