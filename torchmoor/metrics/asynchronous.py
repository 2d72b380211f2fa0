"""What asynchronous inference counts, under CloudWatch's names, rendered when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from torchmoor.async_inference.request import Backlog
from torchmoor.metrics.histogram import Histogram
from torchmoor.metrics.invocations import InvocationMetrics

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


class AsyncMetrics:
    """One endpoint's numbers, for whoever counts and whoever shows them.

    variants: where each counts. A request that no instance has seen counts for the first.
    """

    def __init__(self, endpoint: str, variants: Mapping[str, InvocationMetrics], num_ready: Callable[[], int]) -> None:
        self.endpoint = endpoint
        self.variants = variants
        self.backlog = Backlog()  # as it was when it was last looked at
        self._num_ready = num_ready
        self._first = next(iter(variants))

    def of(self, variant: str | None) -> InvocationMetrics:
        """A variant's."""
        return self.variants[self._first if variant is None else variant]

    def gauges(self) -> Iterator[tuple[str, float]]:
        """The endpoint's, by their names."""
        size, num_ready = self.backlog.waiting + self.backlog.running, self._num_ready()
        yield "ApproximateBacklogSize", size
        yield "ApproximateBacklogSizePerInstance", size / max(1, num_ready)
        yield "ApproximateAgeOfOldestRequest", self.backlog.oldest_age_s
        yield "HasBacklogWithoutCapacity", int(size > 0 and num_ready == 0)


def _values(metrics: InvocationMetrics) -> Iterator[tuple[str, int]]:
    yield "InvocationsProcesssed", metrics.async_processed
    yield "InvocationFailures", metrics.async_failures
    yield "ExpiredRequests", metrics.async_expired
    yield "CancelledRequests", metrics.async_cancelled
    yield "RequestDownloadFailures", metrics.async_download_failures
    yield "ResponseUploadFailures", metrics.async_upload_failures
    yield "NotificationFailures", metrics.async_notification_failures
    yield "RepeatedAttempts", metrics.async_repeated


def _histograms(metrics: InvocationMetrics) -> Iterator[tuple[str, Histogram]]:
    yield "TimeInBacklog", metrics.async_time_in_backlog
    yield "TotalProcessingTime", metrics.async_total_time
    yield "RequestDownloadLatency", metrics.async_download_latency
    yield "ResponseUploadLatency", metrics.async_upload_latency


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
                for name, number in _values(metrics):
                    counters[name].add_metric(where, number)
                for name, histogram in _histograms(metrics):
                    histograms[name].add_metric(where, histogram.cumulative(), sum_value=histogram.sum)
        yield from counters.values()
        yield from histograms.values()
        yield from gauges.values()
