"""Sends the long bodies for one instance one after the other, at a limited rate if several wait.

Otherwise a burst of them takes the processors that answer everyone else (docs/decisions/0059-long-bodies-in-turn.md).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

from torchmoor.proxy.http.spool import SpoolSender

MAX_TURN_S = 1.0


class LongBodyQueue:
    """The bodies in files on their way to one target.

    A body is written as fast as its connection takes it. If the next body waits, it begins when this body would have
    been written at max_bytes_per_s. A body that takes longer than max_turn_s no longer delays others.
    """

    def __init__(
        self, max_bytes_per_s: float, *, max_turn_s: float = MAX_TURN_S, clock: Callable[[], float] = monotonic
    ) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._max_turn_s = max_turn_s
        self._clock = clock
        self._waiting: deque[SpoolSender] = deque()
        self._current: SpoolSender | None = None
        self._began_at = 0.0
        self._timer: asyncio.TimerHandle | None = None  # of the current body's turn, or of the pause before the next
        self._late: set[SpoolSender] = set()  # whose turn is over, but not their body

    def add(self, sender: SpoolSender) -> None:
        """Begin to write the body, now or after others."""
        self._waiting.append(sender)
        if self._timer is None:
            self._begin()

    def go_on(self, sender: SpoolSender) -> None:
        """Write more of a body whose connection can take more, unless it has to wait."""
        if sender is self._current or sender in self._late:
            sender.go_on()

    def remove(self, sender: SpoolSender) -> None:
        """Forget a body that was written, or whose connection is lost."""
        if sender is self._current:
            self._end_turn()
        elif sender in self._late:
            self._late.remove(sender)
        else:
            self._waiting.remove(sender)

    def _begin(self) -> None:
        self._timer = None
        if self._waiting:
            self._current = sender = self._waiting.popleft()
            self._began_at = self._clock()
            self._timer = asyncio.get_running_loop().call_later(self._max_turn_s, self._pass_turn, sender)
            sender.go_on()

    def _pass_turn(self, sender: SpoolSender) -> None:
        self._late.add(sender)
        self._end_turn()

    def _end_turn(self) -> None:
        sender, self._current = self._current, None
        assert sender is not None
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        if self._waiting:
            pause_s = self._began_at + sender.num_written / self._max_bytes_per_s - self._clock()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, pause_s), self._begin)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._late) + (self._current is not None)
