"""Waits between the attempts at an operation that fails: doubled each time, up to a longest one, with jitter."""

from __future__ import annotations

import random
from dataclasses import dataclass

LEAST_SHARE = 0.5  # of a wait; the rest is random, so that many requests do not repeat at once
MAX_DOUBLINGS = 60  # more make no difference, and would overflow


@dataclass(frozen=True, slots=True)
class Backoff:
    """Settings of the waits. first_s: after the first failure, in seconds. longest_s: upper limit of a wait."""

    first_s: float
    longest_s: float

    def delay_s(self, failures: int) -> float:
        """Return the seconds to wait after this many failures in a row."""
        return self._spread(self.first_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS))

    def delay_since_s(self, elapsed_s: float) -> float:
        """Return the seconds to wait for a caller that knows only for how long it has tried."""
        return self._spread(max(self.first_s, elapsed_s))

    def _spread(self, wait_s: float) -> float:
        return min(self.longest_s, wait_s) * random.uniform(LEAST_SHARE, 1.0)
