"""One endpoint's backlog of asynchronous requests. Their counts are fields in invocations.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torchmoor.metrics.definition import BY_ENDPOINT, gauge
from torchmoor.metrics.invocations import CountGroup, InvocationMetrics, counted

ASYNCHRONOUS = (
    *counted(CountGroup.ASYNCHRONOUS),
    gauge("ApproximateBacklogSize", "Asynchronous requests that wait or run.", BY_ENDPOINT),
    gauge(
        "ApproximateBacklogSizePerInstance",
        "The backlog divided by the ready instances; the whole backlog without one.",
        BY_ENDPOINT,
    ),
    gauge(
        "ApproximateAgeOfOldestRequest",
        "Age of the oldest request of the backlog; 0 without one.",
        BY_ENDPOINT,
        "seconds",
    ),
    gauge("HasBacklogWithoutCapacity", "1 while requests wait and no instance is ready.", BY_ENDPOINT, "0 or 1"),
    gauge("AsyncQueueBytes", "Size of SQLite's file, of all endpoints; 0 with Redis.", BY_ENDPOINT, "bytes"),
    gauge(
        "AsyncResultBytes",
        "Bytes in the directories of results, of all endpoints, as last measured; 0 with S3.",
        BY_ENDPOINT,
        "bytes",
    ),
)


class AsyncMetrics:
    """Counts one endpoint's asynchronous requests.

    variants: each variant's counters. A request that no instance has received counts for the first variant.
    """

    def __init__(self, endpoint: str, variants: Mapping[str, InvocationMetrics], num_ready: Callable[[], int]) -> None:
        self.endpoint = endpoint
        self.variants = variants
        self.num_waiting = 0  # this and the next two: as last read from the queue
        self.num_running = 0
        self.oldest_age_s = 0.0
        self.num_queue_bytes = 0
        self.num_result_bytes = 0  # as last measured
        self._num_ready = num_ready
        self._first = next(iter(variants))

    def of(self, variant: str | None) -> InvocationMetrics:
        """Return a variant's counters."""
        return self.variants[self._first if variant is None else variant]

    def gauges(self) -> Iterator[tuple[str, float]]:
        """Yield the endpoint's gauges by name."""
        size, num_ready = self.num_waiting + self.num_running, self._num_ready()
        yield "ApproximateBacklogSize", size
        yield "ApproximateBacklogSizePerInstance", size / max(1, num_ready)
        yield "ApproximateAgeOfOldestRequest", self.oldest_age_s
        yield "HasBacklogWithoutCapacity", int(size > 0 and num_ready == 0)
        yield "AsyncQueueBytes", self.num_queue_bytes
        yield "AsyncResultBytes", self.num_result_bytes
