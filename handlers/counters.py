"""What a worker has done since it started: counts, and the times that histograms are made of.

Parts only write here. The status operation and the metrics (handlers/metrics.py) read.
"""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable

# Counts that the status shows in a group, and the metrics by a label. To add one, name it here and count it.
SESSION_EVENTS = ("opened", "closed", "adopted", "evicted", "damaged")
TURN_OUTCOMES = ("finished", "cancelled", "timed_out", "failed", "repeated")
TOKEN_KINDS = ("prefilled", "reused", "restored", "generated")
KV_EVENTS = ("written", "read", "stale", "damaged", "refused", "failed")
GRAMMAR_EVENTS = ("compiled", "refused", "exceeded")
IMAGE_EVENTS = ("received", "fetched", "encoded", "shared", "demoted")
MODEL_EVENTS = ("hits", "misses", "loads", "promotions", "demotions", "evictions", "failures")
MODEL_REQUEST_OUTCOMES = ("answered", "refused", "failed", "cancelled")

MAX_TIMES = 10_000  # of one name, between two readings; the oldest go first


class Counters:
    """Named counts and times that several threads write."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_TIMES))

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def get(self, name: str) -> int:
        return self._counts[name]

    def get_all(self, names: Iterable[str], prefix: str = "") -> dict[str, int]:
        """Return counts by their names without the prefix."""
        return {name: self.get(prefix + name) for name in names}

    def observe(self, name: str, seconds: float) -> None:
        """Add a value to a histogram. Call this per turn, not per token."""
        with self._lock:
            self._times[name].append(seconds)

    def drain(self, name: str) -> list[float]:
        """The values since the last call, oldest first."""
        with self._lock:
            times = list(self._times[name])
            self._times[name].clear()
            return times
