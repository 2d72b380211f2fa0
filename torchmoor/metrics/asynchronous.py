"""Metrics of asynchronous inference, under CloudWatch's names, rendered when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from torchmoor.metrics.histogram import Histogram
from torchmoor.metrics.invocations import InvocationMetrics

COUNTERS = {
    "InvocationsProcesssed": "Asynchronous requests that ended with a result. The spelling is AWS's.",
    "InvocationFailures": "Asynchronous requests that failed.",
    "ExpiredRequests": "Asynchronous requests whose time to live passed before they were answered.",
    "CancelledRequests": "Asynchronous requests that were cancelled.",
    "RequestDownloadFailures": "Inputs that could not be read.",
    "ResponseUploadFailures": "Results that could not be written.",
    "NotificationFailures": "Notifications that could not be delivered.",
    "RepeatedAttempts": "Attempts at asynchronous requests that failed and were repeated.",
}
HISTOGRAMS = {
    "TimeInBacklog": "Seconds from an asynchronous request's arrival to its first attempt.",
    "TotalProcessingTime": "Seconds from an asynchronous request's arrival until it was published.",
    "RequestDownloadLatency": "Seconds until the first byte of an input was read.",
    "ResponseUploadLatency": "Seconds to write a result to its store.",
}
GAUGES = {
    "ApproximateBacklogSize": "Asynchronous requests that wait or run.",
    "ApproximateBacklogSizePerInstance": "Backlog per ready instance; the whole backlog while no instance is ready.",
    "ApproximateAgeOfOldestRequest": "Seconds since the oldest of them arrived; 0 if there are none.",
    "HasBacklogWithoutCapacity": "1 while requests wait or run and no instance is ready.",
}


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
    """Renders the metrics of all asynchronous endpoints for prometheus_client."""

    def __init__(self, endpoints: Iterable[AsyncMetrics]) -> None:
        self._endpoints = list(endpoints)

    def collect(self) -> Iterator[Metric]:
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
