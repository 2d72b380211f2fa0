"""Long bodies to an instance: one at a time, at a limited rate, and without waiting for lost ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fuzz.answers import Target, Transport
from torchmoor.config.limits import LimitSettings
from torchmoor.proxy.http.long_body_queue import LongBodyQueue
from torchmoor.proxy.http.spool import PIECE_BYTES, Spool, SpooledBody
from torchmoor.proxy.http.sweeper import Sweeper
from torchmoor.proxy.http.upstream import AnswerCaches, UpstreamConnection

NUM_BYTES = 3 * PIECE_BYTES
AT_ONCE, HARDLY = 1e15, 1e-3  # bytes per second


class Peer(Transport):
    """An instance's end of a connection. received: bytes of the body. is_full: it takes one piece more."""

    def __init__(self, connection: UpstreamConnection, *, is_full: bool) -> None:
        super().__init__()
        self.connection = connection
        self.received = 0
        self.is_full = is_full
        connection.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if bytes(data) == b"head":
            return
        self.received += len(data)
        if self.is_full:
            self.connection.pause_writing()

    def go_on(self) -> None:
        self.is_full = False
        self.connection.resume_writing()

    def lose(self) -> None:
        self.abort()
        self.connection.connection_lost(None)


class Stage:
    """Connections to one target, each with a long body to send. now: the time, in seconds."""

    def __init__(self, folder: Path, bytes_per_s: float, max_turn_s: float) -> None:
        self.now = 0.0
        self.long_bodies = LongBodyQueue(bytes_per_s, max_turn_s=max_turn_s, clock=lambda: self.now)
        self._spool = Spool(LimitSettings(spool_folder=str(folder)))
        self._sweeper = Sweeper(1.0)
        self._files: list[SpooledBody] = []

    def send(self, *, is_full: bool = False) -> Peer:
        connection = UpstreamConnection(
            Target(),
            self._sweeper,
            AnswerCaches(),
            siblings=set(),
            long_bodies=self.long_bodies,
            max_header_bytes=8192,
            idle_timeout_s=60,
        )
        body = self._spool.try_open()
        body.append(bytes(NUM_BYTES))
        self._files.append(body)
        peer = Peer(connection, is_full=is_full)
        connection.send(b"head", body)
        return peer

    def close(self) -> None:
        self._sweeper.stop()
        for body in self._files:
            body.close()


@asynccontextmanager
async def staged(folder: Path, bytes_per_s: float = AT_ONCE, max_turn_s: float = 600.0) -> AsyncIterator[Stage]:
    """Yield a stage; at its end no body may be on its way."""
    stage = Stage(folder, bytes_per_s, max_turn_s)
    yield stage
    assert len(stage.long_bodies) == 0
    stage.close()


async def run_loop() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_one_body_after_the_other(tmp_path: Path) -> None:
    """The second body waits while the first is blocked, even if its own connection could continue."""
    async with staged(tmp_path) as stage:
        first, second = stage.send(is_full=True), stage.send()
        await run_loop()
        second.connection.pause_writing()  # its head has filled the buffer
        second.go_on()
        assert (first.received, second.received) == (PIECE_BYTES, 0)

        first.go_on()
        await run_loop()
        assert (first.received, second.received) == (NUM_BYTES, NUM_BYTES)
        assert [peer.connection.is_sending for peer in (first, second)] == [False, False]


async def test_the_next_body_waits_as_long_as_the_rate_requires(tmp_path: Path) -> None:
    """The wait begins with the start of the previous body; a body that arrives when none is sent starts at once."""
    async with staged(tmp_path, NUM_BYTES / 1000) as stage:
        first, second, third = (stage.send(is_full=number == 0) for number in range(3))
        stage.now = 1000.0  # the first one has taken this long
        first.go_on()
        await run_loop()
        assert [peer.received for peer in (first, second, third)] == [NUM_BYTES, NUM_BYTES, 0]
        third.connection.pause_writing()
        third.go_on()
        assert third.received == 0

        third.lose()
        later = stage.send()
        assert later.received == 0  # a client that leaves in the pause does not end it
        later.lose()


@pytest.mark.parametrize(
    ("lost", "received"), [(0, [PIECE_BYTES, NUM_BYTES, NUM_BYTES]), (1, [NUM_BYTES, 0, NUM_BYTES])]
)
async def test_a_lost_connection_holds_up_none(tmp_path: Path, lost: int, received: list[int]) -> None:
    """A lost connection, sending or waiting, does not delay other bodies."""
    async with staged(tmp_path) as stage:
        peers = [stage.send(is_full=number == 0) for number in range(3)]
        await run_loop()

        peers[lost].lose()
        peers[0].go_on()
        await run_loop()
        assert [peer.received for peer in peers] == received


async def test_a_body_that_takes_too_long_holds_up_none(tmp_path: Path) -> None:
    """A body that takes too long lets the next one start, and continues when its connection can."""
    async with staged(tmp_path, max_turn_s=0.0) as stage:
        slow, lost, other = stage.send(is_full=True), stage.send(is_full=True), stage.send()
        await run_loop()
        assert [peer.received for peer in (slow, lost, other)] == [PIECE_BYTES, PIECE_BYTES, NUM_BYTES]

        lost.lose()
        slow.go_on()
        await run_loop()
        assert slow.received == NUM_BYTES


async def test_a_body_that_comes_when_none_is_sent_begins_at_once(tmp_path: Path) -> None:
    """A body that arrives when none is sent starts at once, however low the rate is."""
    async with staged(tmp_path, HARDLY) as stage:
        for _ in range(2):
            peer = stage.send()
            await run_loop()
            assert peer.received == NUM_BYTES
