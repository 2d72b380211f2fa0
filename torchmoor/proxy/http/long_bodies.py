"""Sends the long bodies for one instance one after the other, at a limited rate if several wait.

Otherwise a burst of them takes the processors that answer everyone else (docs/decisions/0059-long-bodies-in-turn.md).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

from torchmoor.proxy.http.spool import SpoolSender


class LongBodies:
    """The bodies in files on their way to one target.

    A body is written as fast as its connection takes it. The next one, if it has waited, begins when the bytes of this
    one would have been written at max_bytes_per_s.
    """

    def __init__(self, max_bytes_per_s: float, *, clock: Callable[[], float] = monotonic) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._clock = clock
        self._senders: deque[SpoolSender] = deque()  # the first is being written, or is the next
        self._began_at = 0.0
        self._pause: asyncio.TimerHandle | None = None

    def add(self, sender: SpoolSender) -> None:
        """Begin to write the body, now or after others."""
        self._senders.append(sender)
        if len(self._senders) == 1:
            self._begin()

    def go_on(self, sender: SpoolSender) -> None:
        """Write more of a body whose connection can take more, unless it is not its turn."""
        if self._senders[0] is sender and self._pause is None:
            sender.go_on()

    def remove(self, sender: SpoolSender) -> None:
        """Go on to the next body, because this one was written or its connection is lost."""
        is_first = self._senders[0] is sender
        self._senders.remove(sender)
        if not is_first:
            return
        if self._pause is not None:  # it had not begun
            self._pause.cancel()
            self._pause = None
            self._begin()
        elif self._senders:
            pause_s = self._began_at + sender.num_written / self._max_bytes_per_s - self._clock()
            self._pause = asyncio.get_running_loop().call_later(max(0.0, pause_s), self._begin)

    def _begin(self) -> None:
        self._pause = None
        if self._senders:
            self._began_at = self._clock()
            self._senders[0].go_on()

    def __len__(self) -> int:
        return len(self._senders)
