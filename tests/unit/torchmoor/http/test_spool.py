"""Bodies in files: how much is read at a time."""

import asyncio
from pathlib import Path

from torchmoor.config.limits import LimitSettings
from torchmoor.proxy.http.spool import PIECE_BYTES, Spool, SpoolSender


class Connection:
    """A transport that, if it is slow, is full after each piece."""

    def __init__(self, *, is_slow: bool) -> None:
        self.sender: SpoolSender | None = None
        self.pieces: list[bytes] = []
        self._is_slow = is_slow

    def is_closing(self) -> bool:
        return False

    def write(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.sender.is_paused = self._is_slow


async def send(folder: Path, *, is_slow: bool) -> tuple[list[bytes], list[int]]:
    """Return the written pieces of a body, and their number each time the connection could continue."""
    spool = Spool(LimitSettings(spool_folder=str(folder)))
    body = spool.try_open()
    body.append(bytes(PIECE_BYTES) + b"x" * PIECE_BYTES + b"end")
    connection, sent, counts = Connection(is_slow=is_slow), asyncio.Event(), []
    sender = connection.sender = SpoolSender(connection, body, sent.set)
    sender.go_on()
    for _ in range(10):
        await asyncio.sleep(0)
        counts.append(len(connection.pieces))
    while not sent.is_set():
        sender.is_paused = False
        sender.go_on()
        counts.append(len(connection.pieces))
    body.close()
    assert spool.num_bytes == 0
    return connection.pieces, counts


async def test_a_full_connection_gets_the_next_piece_when_it_can_take_it(tmp_path: Path) -> None:
    """The next piece is read when the connection can take it, so that one piece is in memory at a time."""
    pieces, counts = await send(tmp_path, is_slow=True)

    assert list(map(len, pieces)) == [PIECE_BYTES, PIECE_BYTES, 3]
    assert counts == [1] * 10 + [2, 3]


async def test_a_quick_connection_gets_a_piece_in_each_step_of_the_loop(tmp_path: Path) -> None:
    """A fast connection gets one piece per turn of the loop, so that other requests run in between."""
    pieces, counts = await send(tmp_path, is_slow=False)

    assert b"".join(pieces) == bytes(PIECE_BYTES) + b"x" * PIECE_BYTES + b"end"
    assert counts[:3] == [2, 3, 3]
