"""How many requests a variant got in the last minute, for SageMakerVariantInvocationsPerInstance."""

from __future__ import annotations

from collections import deque

PERIOD_S = 60.0
SAMPLE_S = 1.0  # samples are at least this far apart, so PERIOD_S bounds their number


class RecentRequests:
    """Samples a count that only grows."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # times and counts; the first one is a period old, or less

    def count(self, total: int, now: float) -> int:
        """Return by how much the count has grown in the last period, or since the first call.

        now: monotonic seconds.
        """
        samples = self._samples
        if not samples or now >= samples[-1][0] + SAMPLE_S:
            samples.append((now, total))
        while len(samples) > 1 and samples[1][0] <= now - PERIOD_S:
            samples.popleft()
        return total - samples[0][1]
