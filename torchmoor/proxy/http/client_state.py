"""Finds out what a client still does: whether it reads after it has sent all, and whether it has received all bytes."""

from __future__ import annotations

import asyncio
import fcntl
import termios
from collections.abc import Callable

from torchmoor.proxy.http.message import CONTINUE

PROBE_INTERVALS_S = (0.01, 0.05, 0.25)  # between two interim answers; the last interval repeats

_NONE = bytes(4)


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


def has_unsent(transport: asyncio.Transport) -> bool:
    """Return True if the peer has not confirmed all bytes; False also on a system that does not report it.

    A transport with TLS does not count encrypted bytes. They wait in the process only while the system's own buffer is
    full.
    """
    try:
        return fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, _NONE) != _NONE
    except (AttributeError, OSError, ValueError):  # the socket is closed, or does not report it
        return False
