"""One variant's counts, as plain numbers.

The hot path only adds to integers, because prometheus_client's own counters cost more than routing does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torchmoor.metrics.histogram import BUCKETS, Histogram


class Tally:
    """A shared count."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@dataclass(slots=True)
class InvocationMetrics:
    """Counts of one variant since the start. metrics/table.py names the metric that each field holds."""

    endpoint: str
    variant: str
    invocations: int = 0
    client_errors: int = 0
    server_errors: int = 0
    model_errors: int = 0
    mid_stream_errors: int = 0
    no_capacity: int = 0
    shortages: int = 0
    retries: int = 0
    retries_refused: int = 0
    model_latency: Histogram = field(default_factory=Histogram)
    overhead_latency: Histogram = field(default_factory=Histogram)
    queue_latency: Histogram = field(default_factory=Histogram)
    first_chunk_latency: Histogram = field(default_factory=Histogram)
    first_chunk_model_latency: Histogram = field(default_factory=Histogram)
    first_chunk_overhead_latency: Histogram = field(default_factory=Histogram)
    model_invocations: int = 0
    model_hits: int = 0
    model_loading_wait: Histogram = field(default_factory=Histogram)
    async_processed: int = 0
    async_failures: int = 0
    async_expired: int = 0
    async_cancelled: int = 0
    async_repeated: int = 0
    async_download_failures: int = 0
    async_upload_failures: int = 0
    async_notification_failures: int = 0
    async_time_in_backlog: Histogram = field(default_factory=Histogram)
    async_total_time: Histogram = field(default_factory=Histogram)
    async_download_latency: Histogram = field(default_factory=Histogram)
    async_upload_latency: Histogram = field(default_factory=Histogram)
    decisions: dict[str, Tally] = field(default_factory=dict)  # by the reason of the choice

    def tally(self, reason: str) -> Tally:
        """Return the count of instances chosen for this reason."""
        return self.decisions.setdefault(reason, Tally())

    def observe(self, model_s: float, overhead_s: float) -> None:
        """Count a request's time at its instance and in the proxy. Inlined, because every request passes here."""
        model, overhead = self.model_latency, self.overhead_latency
        model.counts[bisect_left(BUCKETS, model_s)] += 1
        model.sum += model_s
        overhead.counts[bisect_left(BUCKETS, overhead_s)] += 1
        overhead.sum += overhead_s

    @property
    def num_sent(self) -> int:
        """Requests that were sent to an instance and have ended."""
        return sum(self.model_latency.counts)

    def observe_first_chunk(self, model_s: float, overhead_s: float) -> None:
        """Count the time to the first bytes of a stream."""
        self.first_chunk_latency.observe(model_s + overhead_s)
        self.first_chunk_model_latency.observe(model_s)
        self.first_chunk_overhead_latency.observe(overhead_s)

    def count_status(self, status: int) -> None:
        """Count an answer's status."""
        if status >= 500:
            self.server_errors += 1
        elif status >= 400:
            self.client_errors += 1

    def snapshot(self) -> dict[str, Any]:
        """Return all counts in a form for JSON; `add` reads it."""
        numbers = {
            name: [value.counts, value.sum] if isinstance(value, Histogram) else value
            for name in _COUNTS
            if not isinstance(value := getattr(self, name), dict)
        }
        return {**numbers, "decisions": {reason: tally.count for reason, tally in self.decisions.items()}}

    def add(self, snapshot: Mapping[str, Any]) -> None:
        """Add the counts of another process."""
        for name, given in snapshot.items():
            value = getattr(self, name)
            if isinstance(value, Histogram):
                value.add(*given)
            elif name == "decisions":
                for reason, count in given.items():
                    self.tally(reason).count += count
            else:
                setattr(self, name, value + given)

    def reset(self) -> None:
        """Set all counts to zero."""
        fresh = InvocationMetrics(self.endpoint, self.variant)
        for name in _COUNTS:
            setattr(self, name, getattr(fresh, name))


_COUNTS = tuple(each.name for each in fields(InvocationMetrics) if each.name not in ("endpoint", "variant"))
