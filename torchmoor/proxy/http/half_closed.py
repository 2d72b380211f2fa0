"""Finds out whether a client that sends no more still reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchmoor.proxy.http.message import CONTINUE

PROBE_INTERVALS_S = (0.01, 0.05, 0.25)  # between two interim answers; the last interval repeats


class HalfClosedProbe:
    """Sends a half-closed client interim answers, which it must ignore, until `stop`.

    A fully closed client answers the first with a reset, so that the second fails. is_due: whether the client still
    waits for its answer.
    """

    def __init__(self, write: Callable[[bytes], None], is_due: Callable[[], bool]) -> None:
        self._write = write
        self._is_due = is_due
        self._num_sent = 0
        self._timer: asyncio.TimerHandle | None = None

    def send(self) -> None:
        """Send an interim answer if it is due, and the next one later."""
        if self._is_due():
            self._write(CONTINUE)
            interval_s = PROBE_INTERVALS_S[min(self._num_sent, len(PROBE_INTERVALS_S) - 1)]
            self._num_sent += 1
            self._timer = asyncio.get_running_loop().call_later(interval_s, self.send)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
