"""An instance is sent one long body at a time, and none waits for one that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.fuzz.answers import Target, Transport
from torchmoor.config.limits import LimitSettings
from torchmoor.proxy.http.spool import PIECE_BYTES, Spool, SpooledBody
from torchmoor.proxy.http.timeouts import Sweeper
from torchmoor.proxy.http.upstream import AnswerCaches, UpstreamConnection

NUM_BYTES = 3 * PIECE_BYTES


class Peer(Transport):
    """An instance's end of a connection. received: the bytes of the body; it can take no more while is_full."""

    def __init__(self, connection: UpstreamConnection) -> None:
        super().__init__()
        self.connection = connection
        self.received = 0
        self.is_full = False
        connection.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if bytes(data) == b"head":
            return
        self.received += len(data)
        if self.is_full:
            self.connection.pause_writing()

    def lose(self) -> None:
        self.abort()
        self.connection.connection_lost(None)


class Stage:
    """Connections to one target, each with a long body to send."""

    def __init__(self, folder: Path) -> None:
        self.spool = Spool(LimitSettings(spool_folder=str(folder)))
        self.target = Target()
        self.sweeper = Sweeper(1.0)
        self._bodies: list[SpooledBody] = []

    def send(self, *, to: Target | None = None, is_full: bool = False) -> Peer:
        connection = UpstreamConnection(
            to or self.target,
            self.sweeper,
            AnswerCaches(),
            siblings=set(),
            max_header_bytes=8192,
            idle_timeout_s=60,
        )
        body = self.spool.try_open()
        assert body is not None
        body.append(bytes(NUM_BYTES))
        self._bodies.append(body)
        peer = Peer(connection)
        peer.is_full = is_full
        connection.send(b"head", body)
        return peer

    def close(self) -> None:
        self.sweeper.stop()
        for body in self._bodies:
            body.close()


def run(check: Callable[[Stage], Awaitable[None]], folder: Path) -> None:
    async def play() -> None:
        stage = Stage(folder)
        await check(stage)
        assert stage.target.sending == []
        stage.close()

    asyncio.run(play())


async def pass_time() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_one_body_after_the_other(tmp_path: Path) -> None:
    """The second waits while the first cannot go on; one for another instance does not."""

    async def check(stage: Stage) -> None:
        first, second = stage.send(is_full=True), stage.send()
        other = stage.send(to=Target())
        await pass_time()
        assert (first.received, second.received, other.received) == (PIECE_BYTES, 0, NUM_BYTES)
        second.connection.pause_writing()  # its head filled the buffer
        second.connection.resume_writing()
        assert second.received == 0

        first.is_full = False
        first.connection.resume_writing()
        await pass_time()
        assert (first.received, second.received) == (NUM_BYTES, NUM_BYTES)
        assert not first.connection.is_sending
        assert not second.connection.is_sending

    run(check, tmp_path)


@pytest.mark.parametrize(
    ("lost", "received"), [(0, [PIECE_BYTES, NUM_BYTES, NUM_BYTES]), (1, [NUM_BYTES, 0, NUM_BYTES])]
)
def test_a_lost_connection_holds_up_none(tmp_path: Path, lost: int, received: list[int]) -> None:
    """Neither the one that is sending nor one that waits."""

    async def check(stage: Stage) -> None:
        peers = [stage.send(is_full=number == 0) for number in range(3)]
        await pass_time()

        peers[lost].lose()
        peers[0].is_full = False
        peers[0].connection.resume_writing()
        await pass_time()

        assert [peer.received for peer in peers] == received

    run(check, tmp_path)
