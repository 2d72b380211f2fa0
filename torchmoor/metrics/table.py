"""The table of the proxy's metrics. Counts of requests are declared where they are counted (metrics/invocations.py);
a collector in admin/collectors.py reads the others when Prometheus scrapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from torchmoor.metrics.definition import BY_VARIANT, COUNTER, GAUGE, HISTOGRAM, MetricDefinition
from torchmoor.metrics.histogram import Histogram
from torchmoor.metrics.invocations import CountGroup, InvocationMetrics, counted

BY_ENDPOINT = ("endpoint",)
BY_INSTANCE = ("endpoint", "instance")
BY_DNS_NAME = ("endpoint", "variant", "dns_name")


def _counter(name: str, help: str, *, labels: tuple[str, ...] = BY_VARIANT) -> MetricDefinition:
    return MetricDefinition(name, COUNTER, labels, "", help)


def _gauge(name: str, help: str, labels: tuple[str, ...], unit: str = "") -> MetricDefinition:
    return MetricDefinition(name, GAUGE, labels, unit, help)


INVOCATIONS = (
    *counted(CountGroup.REQUESTS),
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
    _counter("CallerLimited", "Requests refused because their caller is at a limit of `callers`.", labels=("setting",)),
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
    *counted(CountGroup.MODELS),
    _gauge("LoadedModelCount", "Models in the instance's memory.", BY_INSTANCE),
)
ASYNCHRONOUS = (
    *counted(CountGroup.ASYNCHRONOUS),
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
