"""The table of the proxy's metrics: name, type, labels and help of each, and the field that counts it.

Names are those of SageMaker's CloudWatch metrics where it has the metric. Every duration is in seconds. Labels come
from the configuration, so their number is bounded; a model's name is never a label, since there may be 10,000.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from torchmoor.metrics.histogram import Histogram
from torchmoor.metrics.invocations import InvocationMetrics

BY_VARIANT = ("endpoint", "variant")
BY_ENDPOINT = ("endpoint",)
BY_INSTANCE = ("endpoint", "instance")
BY_DNS_NAME = ("endpoint", "variant", "dns_name")


class MetricType(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


COUNTER, GAUGE, HISTOGRAM = MetricType


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One row.

    unit: "" for a plain number. field: where InvocationMetrics counts it; "" if a collector reads it from elsewhere.
    """

    name: str
    type: MetricType
    labels: tuple[str, ...]
    unit: str
    help: str
    field: str = ""


def _counter(name: str, help: str, field: str = "", *, labels: tuple[str, ...] = BY_VARIANT) -> MetricDefinition:
    return MetricDefinition(name, COUNTER, labels, "", help, field)


def _histogram(name: str, help: str, field: str) -> MetricDefinition:
    return MetricDefinition(name, HISTOGRAM, BY_VARIANT, "seconds", help, field)


def _gauge(name: str, help: str, labels: tuple[str, ...], unit: str = "") -> MetricDefinition:
    return MetricDefinition(name, GAUGE, labels, unit, help)


INVOCATIONS = (
    _counter("Invocations", "Requests sent to the endpoint.", "invocations"),
    _counter("Invocation4XXErrors", "Requests answered with status 4xx.", "client_errors"),
    _counter("Invocation5XXErrors", "Requests answered with status 5xx.", "server_errors"),
    _counter(
        "InvocationModelErrors", "Requests that the model answered with an error, or not in time.", "model_errors"
    ),
    _counter("MidStreamErrors", "Answers that broke off after the first byte.", "mid_stream_errors"),
    _counter("NoCapacityInvocationFailures", "Requests refused because no instance could take them.", "no_capacity"),
    _counter("DescriptorShortages", "Requests refused because the proxy had no free file descriptor.", "shortages"),
    _counter("Retries", "Requests sent again, because the first instance could not take them or was lost.", "retries"),
    _counter("RetriesRefused", "Requests not sent again, because the retry budget was used up.", "retries_refused"),
    _histogram(
        "ModelLatency", "Time from sending the request to an instance until its answer has ended.", "model_latency"
    ),
    _histogram(
        "OverheadLatency", "Time that a request spent in the proxy, without the model's time.", "overhead_latency"
    ),
    _histogram(
        "QueueLatency",
        "Time from a request's head until an instance was free, of requests that had to wait.",
        "queue_latency",
    ),
    _histogram(
        "FirstChunkLatency",
        "Time from a request's head to the first byte of a streamed answer's body.",
        "first_chunk_latency",
    ),
    _histogram(
        "FirstChunkModelLatency",
        "The part of FirstChunkLatency after the request was sent to the instance.",
        "first_chunk_model_latency",
    ),
    _histogram(
        "FirstChunkOverheadLatency",
        "The part of FirstChunkLatency before the request was sent to the instance.",
        "first_chunk_overhead_latency",
    ),
    _counter("InvocationsPerInstance", "Requests sent to the endpoint, divided by its instances."),
    _gauge("WaitingInvocations", "Requests that wait for an instance.", BY_VARIANT),
    _gauge("ConcurrentRequestsPerModel", "Requests that an instance works on or that wait for one.", BY_VARIANT),
    _counter("RoutingDecisions", "Instances chosen, by reason. A retry chooses again.", labels=(*BY_VARIANT, "reason")),
)
INSTANCES = (
    _gauge("OutstandingInvocations", "Requests that the instance works on.", BY_INSTANCE),
    _gauge("InflightBodyBytes", "Heap that their bodies take in the instance's JVM.", BY_INSTANCE, "bytes"),
    _gauge("InstanceReady", "1 while the instance takes requests.", BY_INSTANCE, "0 or 1"),
    _gauge("InstanceBreaker", "0: closed, 1: half open (one trial request), 2: open.", BY_INSTANCE, "0 to 2"),
    _gauge("InstanceShare", "Share of its usual work; below 1 during slow start.", BY_INSTANCE, "0 to 1"),
)
ACCESS = (
    _counter(
        "AccessDenied",
        "Requests refused for their credentials, or (ServiceUnavailable) dropped before their signature was checked.",
        labels=("error",),
    ),
)
ACCESS_LOG = (
    _counter("AccessLogLines", "Lines of the access log.", labels=()),
    _counter("AccessLogDropped", "Lines lost because the log could not be written fast enough.", labels=()),
)
ADMIN = (
    _gauge("AdminConnections", "Open connections to the admin plane.", ()),
    _counter("AdminConnectionsRefused", "Connections to the admin plane above its limit.", labels=()),
)
DISCOVERY = (
    _gauge("DiscoveredInstances", "Instances that come from the DNS name.", BY_DNS_NAME),
    _counter("DiscoveryFailures", "DNS queries without an answer.", labels=BY_DNS_NAME),
    _gauge("DiscoveryAnswerAge", "Time since the last answer for the DNS name.", BY_DNS_NAME, "seconds"),
)
MODELS = (
    _counter(
        "ModelInvocations",
        "Requests that named one of many models; ModelCacheHit is a part of them.",
        "model_invocations",
    ),
    _counter("ModelCacheHit", "Answered requests whose model was in the instance's memory.", "model_hits"),
    _histogram(
        "ModelLoadingWaitTime", "Time that answered requests waited for their model to be loaded.", "model_loading_wait"
    ),
    _gauge("LoadedModelCount", "Models in the instance's memory.", BY_INSTANCE),
)
ASYNCHRONOUS = (
    _counter(
        "InvocationsProcesssed",
        "Asynchronous requests that ended with a result. The spelling is CloudWatch's.",
        "async_processed",
    ),
    _counter("InvocationFailures", "Asynchronous requests that failed.", "async_failures"),
    _counter("ExpiredRequests", "Asynchronous requests whose time to live ended before an answer.", "async_expired"),
    _counter("CancelledRequests", "Asynchronous requests that were cancelled.", "async_cancelled"),
    _counter("RepeatedAttempts", "Failed attempts that were followed by another.", "async_repeated"),
    _counter("RequestDownloadFailures", "Inputs that could not be read.", "async_download_failures"),
    _counter("ResponseUploadFailures", "Results that could not be written.", "async_upload_failures"),
    _counter("NotificationFailures", "Notifications that could not be delivered.", "async_notification_failures"),
    _histogram(
        "TimeInBacklog", "Time from an asynchronous request's arrival to its first attempt.", "async_time_in_backlog"
    ),
    _histogram(
        "TotalProcessingTime",
        "Time from an asynchronous request's arrival to the publication of its result.",
        "async_total_time",
    ),
    _histogram("RequestDownloadLatency", "Time to the first byte of an input.", "async_download_latency"),
    _histogram("ResponseUploadLatency", "Time to write a result.", "async_upload_latency"),
    _gauge("ApproximateBacklogSize", "Asynchronous requests that wait or run.", BY_ENDPOINT),
    _gauge(
        "ApproximateBacklogSizePerInstance",
        "The backlog divided by the ready instances; the whole backlog without one.",
        BY_ENDPOINT,
    ),
    _gauge(
        "ApproximateAgeOfOldestRequest",
        "Age of the oldest request of the backlog; 0 without one.",
        BY_ENDPOINT,
        "seconds",
    ),
    _gauge("HasBacklogWithoutCapacity", "1 while requests wait and no instance is ready.", BY_ENDPOINT, "0 or 1"),
    _gauge("AsyncQueueBytes", "Size of SQLite's file, of all endpoints; 0 with Redis.", BY_ENDPOINT, "bytes"),
    _gauge(
        "AsyncResultBytes",
        "Bytes in the directories of results, of all endpoints, as last measured; 0 with S3.",
        BY_ENDPOINT,
        "bytes",
    ),
)
HOST = (
    _gauge("CPUUtilization", "CPU use since the last scrape; 400 is four busy CPUs.", (), "percent"),
    _gauge("MemoryUtilization", "Memory in use.", (), "percent"),
)
METRICS = (*INVOCATIONS, *INSTANCES, *ACCESS, *ACCESS_LOG, *ADMIN, *DISCOVERY, *MODELS, *ASYNCHRONOUS, *HOST)

_FAMILIES = {COUNTER: CounterMetricFamily, GAUGE: GaugeMetricFamily, HISTOGRAM: HistogramMetricFamily}


class MetricFamilies:
    """Prometheus families of some metrics, filled with the values of one scrape."""

    def __init__(self, definitions: Iterable[MetricDefinition]) -> None:
        self._definitions = tuple(definitions)
        self._families: dict[str, Metric] = {
            each.name: _FAMILIES[each.type](each.name, _help(each), labels=each.labels) for each in self._definitions
        }

    def add(self, name: str, labels: Sequence[str], value: float | Histogram) -> None:
        """Add one time series."""
        family = self._families[name]
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(value, Histogram)
            family.add_metric(labels, value.cumulative(), sum_value=value.sum)
        else:
            assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
            assert not isinstance(value, Histogram)
            family.add_metric(labels, value)

    def add_counts(self, metrics: InvocationMetrics) -> None:
        """Add the variant's counts of all metrics that have a field."""
        for each in self._definitions:
            if each.field:
                self.add(each.name, (metrics.endpoint, metrics.variant), getattr(metrics, each.field))

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())


def _help(definition: MetricDefinition) -> str:
    return f"{definition.help} Unit: {definition.unit}." if definition.unit else definition.help
