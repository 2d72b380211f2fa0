"""Retry budget: at most a fraction of all requests is retried, so that an outage does not double the load.

budget = RetryBudget(fraction=0.2, burst=100)
budget.try_take(metrics.invocations)
"""

from __future__ import annotations


class RetryBudget:
    """One variant's budget. It starts full with `burst` retries, about the requests of one instance that dies."""

    __slots__ = ("_fraction", "_burst", "_left", "_num_seen")

    def __init__(self, *, fraction: float, burst: int) -> None:
        self._fraction = fraction
        self._burst = burst
        self._left = float(burst)
        self._num_seen = 0

    def try_take(self, num_requests: int) -> bool:
        """Count one retry, or return False if there were too many. num_requests: all so far."""
        earned = self._fraction * (num_requests - self._num_seen)
        self._num_seen = num_requests
        self._left = min(float(self._burst), self._left + earned)
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def release(self) -> None:
        """Count a retry no longer: it was not made."""
        self._left += 1.0
