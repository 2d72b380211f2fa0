"""UpstreamConnection against llhttp: an answer is parsed as llhttp parses it, or lost.

The connection is kept only after an answer that ended exactly where its bytes end.
"""

import asyncio
from contextlib import suppress
from typing import Any

import httptools

from tests.fuzz.llhttp import CUT, Answers
from torchmoor.proxy.http.call import Loss
from torchmoor.proxy.http.long_body_queue import LongBodyQueue
from torchmoor.proxy.http.message import AnswerHead
from torchmoor.proxy.http.sweeper import Sweeper
from torchmoor.proxy.http.upstream import AnswerCaches, UpstreamConnection


class Target:
    """A target that connections go to and return to."""

    name, host, port = "a", "127.0.0.1", 1

    def __init__(self) -> None:
        self.idle: list[Any] = []
        self.num_pieces = 0


class Transport(asyncio.Transport):
    """A transport that records whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.is_closed = True


class Receiver:
    """A receiver that records one answer and releases the connection afterwards."""

    def __init__(self, connection: UpstreamConnection) -> None:
        self.connection = connection
        self.head: list[Any] | None = None
        self.body = b""
        self.is_complete = self.is_lost = False
        connection.exchange = self

    def on_answer(self, head: AnswerHead, piece: bytes, *, is_complete: bool) -> None:
        assert self.head is None
        self.head = [head.status, [(field.name, field.value) for field in head.headers]]
        self.on_answer_piece(piece, is_complete=is_complete)

    def on_answer_piece(self, piece: bytes, *, is_complete: bool) -> None:
        assert self.head is not None
        assert (self.is_complete, self.is_lost) == (False, False)
        self.body += piece
        if is_complete:
            self.is_complete = True
            self.connection.release(can_reuse=True)

    def on_lost(self, loss: Loss) -> None:
        assert (self.is_complete, self.is_lost) == (False, False)
        self.is_lost = True


def check(data: bytes) -> None:
    """Check any bytes in any pieces, then the end of the connection."""
    pieces = data.split(CUT)
    data = b"".join(pieces)
    connection = UpstreamConnection(
        Target(),
        Sweeper(1.0),
        AnswerCaches(),
        siblings=set(),
        long_bodies=LongBodyQueue(1e9),
        max_header_bytes=2_000,
        idle_timeout_s=1.0,
    )
    transport = Transport()
    connection.connection_made(transport)
    receiver = Receiver(connection)
    for piece in filter(None, pieces):
        if transport.is_closed:
            break
        connection.data_received(piece)
    is_kept = receiver.is_complete and not transport.is_closed
    if not transport.is_closed:
        connection.eof_received()
    connection.connection_lost(None)

    assert receiver.is_complete != receiver.is_lost
    assert connection.target.idle == []
    if not receiver.is_complete:
        return
    oracle = Answers()
    with suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
        oracle.parser.feed_data(data)
    at = next((at for at, (status, *_) in enumerate(oracle.heads) if status and status >= 200), None)
    assert at is not None, oracle.heads
    status, _, fields = oracle.heads[at]
    assert [status, fields] == receiver.head, (oracle.heads, receiver.head)
    assert oracle.bodies[at] == receiver.body, (oracle.bodies, receiver.body)
    if is_kept:
        assert oracle.num_complete == len(oracle.heads) == at + 1, oracle.heads
