"""What asynchronous inference counts, under CloudWatch's names, rendered when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from torchmoor.async_inference.request import Backlog
from torchmoor.metrics import Histogram

COUNTERS = {
    "InvocationsProcesssed": "Asynchronous requests that have ended with a result. AWS spells it so.",
    "InvocationFailures": "Asynchronous requests that have failed.",
    "ExpiredRequests": "Asynchronous requests whose time to live passed before they were answered.",
    "CancelledRequests": "Asynchronous requests that were cancelled.",
    "RequestDownloadFailures": "Inputs that could not be read.",
    "ResponseUploadFailures": "Results that could not be written.",
    "NotificationFailures": "Notices that nobody took.",
    "RepeatedAttempts": "Attempts at asynchronous requests that came to nothing and were tried again.",
}
HISTOGRAMS = {
    "TimeInBacklog": "Seconds from an asynchronous request's arrival to its first attempt.",
    "TotalProcessingTime": "Seconds from an asynchronous request's arrival until it was published.",
    "RequestDownloadLatency": "Seconds until an input's first byte was there.",
    "ResponseUploadLatency": "Seconds that a result took to its store.",
}
GAUGES = {
    "ApproximateBacklogSize": "Asynchronous requests that wait or run.",
    "ApproximateBacklogSizePerInstance": "The same for each ready instance; all of them while there is none.",
    "ApproximateAgeOfOldestRequest": "Seconds since the oldest of them came; 0 without one.",
    "HasBacklogWithoutCapacity": "1 while requests wait and no instance is ready.",
}


class VariantMetrics:
    """One variant's numbers."""

    def __init__(self) -> None:
        self.processed = self.failures = self.expired = self.cancelled = 0
        self.download_failures = self.upload_failures = self.notification_failures = 0
        self.repeated = 0
        self.time_in_backlog = Histogram()
        self.total_time = Histogram()
        self.download_latency = Histogram()
        self.upload_latency = Histogram()

    def values(self) -> Iterator[tuple[str, int]]:
        """The counters by their names."""
        yield "InvocationsProcesssed", self.processed
        yield "InvocationFailures", self.failures
        yield "ExpiredRequests", self.expired
        yield "CancelledRequests", self.cancelled
        yield "RequestDownloadFailures", self.download_failures
        yield "ResponseUploadFailures", self.upload_failures
        yield "NotificationFailures", self.notification_failures
        yield "RepeatedAttempts", self.repeated

    def histograms(self) -> Iterator[tuple[str, Histogram]]:
        """The histograms by their names."""
        yield "TimeInBacklog", self.time_in_backlog
        yield "TotalProcessingTime", self.total_time
        yield "RequestDownloadLatency", self.download_latency
        yield "ResponseUploadLatency", self.upload_latency


class AsyncMetrics:
    """One endpoint's numbers. A request that no instance has seen counts for the first variant."""

    def __init__(self, endpoint: str, variants: Iterable[str], num_ready: Callable[[], int]) -> None:
        self.endpoint = endpoint
        self.variants = {name: VariantMetrics() for name in variants}
        self.backlog = Backlog()  # as it was when it was last looked at
        self._num_ready = num_ready
        self._first = next(iter(self.variants.values()))

    def of(self, variant: str | None) -> VariantMetrics:
        """A variant's."""
        return self._first if variant is None else self.variants[variant]

    def gauges(self) -> Iterator[tuple[str, float]]:
        """The endpoint's, by their names."""
        size, num_ready = self.backlog.waiting + self.backlog.running, self._num_ready()
        yield "ApproximateBacklogSize", size
        yield "ApproximateBacklogSizePerInstance", size / max(1, num_ready)
        yield "ApproximateAgeOfOldestRequest", self.backlog.oldest_age_s
        yield "HasBacklogWithoutCapacity", int(size > 0 and num_ready == 0)


class AsyncMetricsCollector:
    """Turns the numbers of all asynchronous endpoints into Prometheus metrics, when scraped."""

    def __init__(self, endpoints: Iterable[AsyncMetrics]) -> None:
        self._endpoints = list(endpoints)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        labels = ["endpoint", "variant"]
        counters = {name: CounterMetricFamily(name, text, labels=labels) for name, text in COUNTERS.items()}
        histograms = {name: HistogramMetricFamily(name, text, labels=labels) for name, text in HISTOGRAMS.items()}
        gauges = {name: GaugeMetricFamily(name, text, labels=["endpoint"]) for name, text in GAUGES.items()}
        for endpoint in self._endpoints:
            for name, value in endpoint.gauges():
                gauges[name].add_metric([endpoint.endpoint], value)
            for variant, metrics in endpoint.variants.items():
                where = [endpoint.endpoint, variant]
                for name, number in metrics.values():
                    counters[name].add_metric(where, number)
                for name, histogram in metrics.histograms():
                    histograms[name].add_metric(where, histogram.cumulative(), sum_value=histogram.sum)
        yield from counters.values()
        yield from histograms.values()
        yield from gauges.values()
