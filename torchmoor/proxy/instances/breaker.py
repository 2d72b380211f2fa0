"""Circuit breaker: stops new work for an instance whose probes succeed but whose answers fail.

    CLOSED     work as usual; max_failures in a row open it
    OPEN       no new work for an interval, which doubles each time that it opens again without a success between
    HALF_OPEN  one request at a time as a trial, beside older ones and streams that have begun; a failure opens it again

A success closes it from any state. The module does no I/O; the time is an argument.
"""

from __future__ import annotations

from enum import Enum

from torchmoor.config.recovery import RecoverySettings


class BreakerState(Enum):
    """Which new requests an instance gets: all, one trial at a time, or none."""

    CLOSED = "closed"
    HALF_OPEN = "half-open"
    OPEN = "open"


SEVERITIES = tuple(BreakerState)


class Breaker:
    """One instance's breaker. num_failures: successive failures up to now."""

    __slots__ = ("state", "num_failures", "_settings", "_open_s", "_until")

    def __init__(self, settings: RecoverySettings) -> None:
        self.state = BreakerState.CLOSED
        self.num_failures = 0
        self._settings = settings
        self._open_s = settings.min_open_s
        self._until = 0.0

    def on_success(self) -> None:
        """Close the breaker: the instance has answered."""
        self.state = BreakerState.CLOSED
        self.num_failures = 0
        self._open_s = self._settings.min_open_s

    def on_failure(self, now: float, *, may_open: bool) -> None:
        """Count a failure. may_open: whether other instances can do its work."""
        self.num_failures += 1
        is_too_much = self.num_failures >= self._settings.max_failures or self.state is BreakerState.HALF_OPEN
        if is_too_much and may_open:
            self.open(now)

    def open(self, now: float) -> None:
        """Open the breaker for an interval longer than the last; an open breaker stays as it is."""
        if self.state is not BreakerState.OPEN:
            self.state = BreakerState.OPEN
            self._until = now + self._open_s
            self._open_s = min(2 * self._open_s, self._settings.max_open_s)

    def tick(self, now: float) -> bool:
        """Go from OPEN to HALF_OPEN when the interval is over. Return True if that happens now."""
        if self.state is BreakerState.OPEN and now >= self._until:
            self.state = BreakerState.HALF_OPEN
            return True
        return False
