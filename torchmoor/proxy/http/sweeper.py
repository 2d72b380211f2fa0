"""The deadlines of all connections, checked together a few times per second instead of by a timer each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from torchmoor.fault_log import FaultLog

logger = logging.getLogger(__name__)

NEVER = float("inf")
LINGER_S = 5.0  # how long a closing connection still reads


class Expiring(Protocol):
    """Something with a deadline in monotonic seconds."""

    @property
    def deadline(self) -> float: ...

    def expire(self) -> None:
        """Handle the passed deadline; called again at the next sweep unless it was moved."""
        ...


class Sweeper:
    """Calls `expire()` of every watched thing whose deadline has passed, at most interval_s late.

    If the loop was held up, it runs this timer before it reads what has arrived meanwhile. So the sweep then waits for
    the next interval, once.
    """

    def __init__(self, interval_s: float, *, clock: Callable[[], float] = monotonic) -> None:
        self.interval_s = interval_s
        self._clock = clock
        self._watched: set[Expiring] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when the timer ends, in seconds of the loop
        self._has_waited = False
        self._faults = FaultLog(logger, clock=clock)

    def watch(self, thing: Expiring) -> None:
        """Start checking a thing's deadline."""
        self._watched.add(thing)

    def forget(self, thing: Expiring) -> None:
        """Stop checking a thing's deadline; unknown things are ignored."""
        self._watched.discard(thing)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + self.interval_s
        self._timer = loop.call_later(self.interval_s, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sweep(self) -> None:
        """Expire the things whose deadline has passed."""
        now = self._clock()
        for thing in [thing for thing in self._watched if thing.deadline < now]:
            # The end of an earlier one may have moved this one's deadline, or ended it.
            if thing.deadline < now and thing in self._watched:
                try:
                    thing.expire()
                except Exception as error:  # the others expire, and the next sweep calls this one again
                    self._faults.add(f"a deadline was not handled of={type(thing).__name__}", error, has_trace=True)

    def _tick(self) -> None:
        is_late = asyncio.get_running_loop().time() > self._due + self.interval_s
        self.start()
        self._has_waited = is_late and not self._has_waited
        if not self._has_waited:
            self.sweep()
