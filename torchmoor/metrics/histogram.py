"""Histograms of durations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Upper bounds in seconds: 100 us to 8 minutes, which is the longest stream.
BUCKETS = (*tuple(round(base * 10.0**power, 7) for power in range(-4, 3) for base in (1.0, 2.5, 5.0))[:-1], 480.0)


class Histogram:
    """Counts of values by bucket; the last bucket has no upper bound."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add the counts and the sum of another histogram."""
        self.counts = [own + more for own, more in zip(self.counts, counts, strict=True)]
        self.sum += total

    def cumulative(self) -> list[tuple[str, float]]:
        """Return each bucket's bound and the number of values up to it, in Prometheus' form."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets
