"""Counts and times since the worker's start, and the rows of the tables that turn them into metrics.

Parts only write here. The status operation and the metrics read. The tables are in handlers/chat/metrics.py and
handlers/many/metrics.py; handlers/torchserve/metrics_publisher.py publishes them.
"""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

MAX_TIMES = 10_000  # of one name, between two readings; the oldest go first


COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"  # as TorchServe spells them


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of a table of metrics.

    name: without the prefix; a counter ends in `_total`, which TorchServe does not add.
    unit: one of TorchServe's. source: path of the number in the service's status; for a histogram, the name of its
    series. label: its name and its values, each the last part of a path. The path of a counter is also the name of its
    count, in parts, unless the status has the number from elsewhere.
    """

    name: str
    kind: str
    unit: str
    help: str
    source: tuple[str, ...]
    label: tuple[str, tuple[str, ...]] | None = None

    @property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """The paths of its numbers."""
        return (self.source,) if self.label is None else tuple((*self.source, value) for value in self.label[1])


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

    def read(self, table: Iterable[Metric]) -> dict[str, dict[str, int]]:
        """Return the counts of a table's counters, by group and name."""
        found: dict[str, dict[str, int]] = {}
        for metric in table:
            if metric.kind == COUNTER:
                for group, name in metric.paths:
                    found.setdefault(group, {})[name] = self.get(f"{group}_{name}")
        return found

    def observe(self, name: str, seconds: float) -> None:
        """Add a value to a histogram. Call this per turn, not per token."""
        with self._lock:
            self._times[name].append(seconds)

    def drain(self, name: str) -> list[float]:
        """Return the values since the last call, oldest first."""
        with self._lock:
            times = list(self._times[name])
            self._times[name].clear()
            return times
