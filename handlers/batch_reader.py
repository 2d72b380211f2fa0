"""Reads TorchServe's batches from its socket in large parts, and leaves bodies as they were sent.

TorchServe's own reader asks the kernel for each number and each string: about 40 calls for a row, and each one hands
the interpreter's lock to the engine's thread. TorchServe 0.12.0 is its last release, so the function that this
replaces stays as it is (docs/decisions/0033-batch-reader.md).

TorchServe sends the body of each unanswered request again at each step, and its reader would parse JSON each time,
before any limit of ours: four bodies of 30 MB held a worker up for a minute.
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
        self._data = memoryview(b"")  # what was read and not yet asked for
        self._read_unbuffered = otf_message_handler._retrieve_buffer

    def install(self) -> None:
        os.environ[PARSES] = "false"
        otf_message_handler._retrieve_buffer = self.read

    def remove(self) -> None:
        """Give TorchServe its own way back."""
        os.environ.pop(PARSES, None)
        otf_message_handler._retrieve_buffer = self._read_unbuffered

    def read(self, connection: Any, length: int) -> bytes:
        """Return this many bytes; like TorchServe's, end the process if the front end has closed the connection."""
        if connection is not self._connection:
            self._connection, self._data = connection, memoryview(b"")
        if length > len(self._data):
            self._fill(length)
        data, self._data = self._data[:length], self._data[length:]
        return bytes(data)

    def _fill(self, length: int) -> None:
        parts = [bytes(self._data)]
        missing = length - len(self._data)
        while missing > 0:
            part = self._connection.recv(max(missing, PART_BYTES))
            if not part:
                self._read_unbuffered(self._connection, 1)  # sees the same end, and exits
            parts.append(part)
            missing -= len(part)
        self._data = memoryview(b"".join(parts))
