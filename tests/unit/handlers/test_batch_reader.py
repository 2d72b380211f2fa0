"""The reader of TorchServe's batches against TorchServe's own."""

import socket
import struct
import threading
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.torchserve.batch_reader import PART_BYTES, BatchReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ResourceWarning)  # it leaves its version file open
    from ts.protocol import otf_message_handler

END = struct.pack("!i", -1)
TEXTS = st.binary(max_size=30).map(bytes.hex).map(str.encode)


class Connection:
    """A connection that returns its bytes in given cuts."""

    def __init__(self, data: bytes, cuts: list[int]) -> None:
        self._data = data
        self._cuts = cuts

    def recv(self, length: int) -> bytes:
        most = self._cuts.pop(0) if self._cuts else len(self._data)
        part, self._data = self._data[: min(length, most)], self._data[min(length, most) :]
        return part

    def recv_into(self, buffer: memoryview) -> int:
        part = self.recv(len(buffer))
        buffer[: len(part)] = part
        return len(part)


def field(value: bytes) -> bytes:
    return struct.pack("!i", len(value)) + value


def encode_batch(rows: list[tuple[bytes, list[bytes], bytes]]) -> bytes:
    message = b"I"
    for request_id, headers, body in rows:
        message += field(request_id)
        for name in headers:
            message += field(name) + field(b"value of " + name)
        message += END + field(b"body") + field(b"application/octet-stream") + field(body) + END
    return message + END


def read_all(data: bytes, cuts: list[int], num_batches: int) -> list[Any]:
    connection = Connection(data, list(cuts))
    return [otf_message_handler.retrieve_msg(connection) for _ in range(num_batches)]


@contextmanager
def buffered() -> Iterator[None]:
    reader = BatchReader()
    reader.install()
    try:
        yield
    finally:
        reader.remove()


ROWS = st.lists(st.tuples(TEXTS, st.lists(TEXTS, max_size=4), st.binary(max_size=200)), max_size=6)


@given(
    rows=ROWS,
    others=st.lists(st.lists(st.integers(0, 5), max_size=6, unique=True), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 300), max_size=20),
)
def test_batches_are_read_as_torchserve_reads_them(rows: list[Any], others: list[list[int]], cuts: list[int]) -> None:
    """The rows of consecutive batches, which partly repeat, are equal however the bytes arrive.

    Only the headers of a row that the last batch had, too, may be missing.
    """
    batches = [rows, *([rows[n] for n in numbers if n < len(rows)] for numbers in others)]
    data = b"".join(map(encode_batch, batches))
    expected = read_all(data, [], len(batches))

    with buffered():
        found = read_all(data, cuts, len(batches))

    last: list[Any] = []
    for (_, read), (_, wanted) in zip(found, expected, strict=True):
        assert read == [
            {**row, "headers": []} if row in last and own["headers"] == [] else row
            for own, row in zip(read, wanted, strict=True)
        ]
        last = wanted


def test_a_row_that_comes_again_is_not_parsed_again() -> None:
    """A repeated row is returned without its headers.

    One with other bytes, or from an earlier batch, is parsed again.
    """
    first, changed = (b"a", [b"name"], b"body"), (b"a", [b"name"], b"BODY")
    other = (b"b", [b"name"], b"")
    batches = [[first, other], [first], [changed, other], [changed]]

    with buffered():
        found = read_all(b"".join(map(encode_batch, batches)), [], len(batches))

    read = [[(bytes(row["requestId"]), len(row["headers"])) for row in rows] for _, rows in found]
    assert read == [[(b"a", 1), (b"b", 1)], [(b"a", 0)], [(b"a", 1), (b"b", 1)], [(b"a", 0)]]
    assert [rows[0]["parameters"][0]["value"] for _, rows in found] == [b"body", b"body", b"BODY", b"BODY"]


def test_nothing_is_remembered_of_another_connection() -> None:
    """A new connection starts without remembered rows, because its front end has sent none."""
    message = encode_batch([(b"a", [b"name"], b"body")])

    with buffered():
        found = [read_all(message, [], 1) for _ in range(2)]

    assert found[0] == found[1]


def test_a_body_larger_than_a_part_is_whole() -> None:
    """Bodies of any size are read."""
    body = bytes(range(256)) * (PART_BYTES // 64)

    with buffered():
        [(command, rows)] = read_all(encode_batch([(b"a", [], body), (b"b", [], b"next")]), [1000], 1)

    assert command == b"I"
    assert [row["parameters"][0]["value"] for row in rows] == [body, b"next"]


def test_a_large_body_takes_its_own_length() -> None:
    """A large body is read into one block of its length, although it arrives in parts."""
    body = bytes(64 * PART_BYTES)
    message = encode_batch([(b"a", [], body)])
    sender, connection = socket.socketpair()
    sending = threading.Thread(target=sender.sendall, args=(message,), daemon=True)
    with buffered(), sender, connection:
        tracemalloc.start()
        try:
            sending.start()
            rows = otf_message_handler.retrieve_msg(connection)[1]
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert rows[0]["parameters"][0]["value"] == body
    assert most < 1.2 * len(body)


@pytest.mark.parametrize("num_sent", [10, PART_BYTES + 10])
def test_worker_ends_in_a_large_body(num_sent: int) -> None:
    data = encode_batch([(b"a", [], bytes(4 * PART_BYTES))])

    with buffered(), pytest.raises(SystemExit) as caught:
        read_all(data[: -4 * PART_BYTES + num_sent], [100], 1)

    assert caught.value.code == 0


def test_worker_ends_when_the_front_end_has_gone() -> None:
    """A connection that closes, also within a batch, ends the process as with TorchServe's own reader."""
    with buffered(), pytest.raises(SystemExit) as caught:
        read_all(encode_batch([(b"a", [], b"body")])[:-6], [], 1)

    assert caught.value.code == 0


def test_bodies_stay_as_they_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are passed on unparsed.

    The handlers parse them once, within limits, where TorchServe would at each step.
    """
    monkeypatch.setenv("TS_DECODE_INPUT_REQUEST", "true")
    bodies = [(b"application/json", b'{"a": [1]}'), (b"text/plain", b"a")]
    message = b"I"
    for content_type, body in bodies:
        message += field(b"id") + END + field(b"body") + field(content_type) + field(body) + END

    with buffered():
        (_, rows), *_ = read_all(message + END, [], 1)

    assert [row["parameters"][0]["value"] for row in rows] == [body for _, body in bodies]
