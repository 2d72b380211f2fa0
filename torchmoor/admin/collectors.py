"""The metrics page's metrics and their collectors, which read counts and state when Prometheus scrapes.

The metrics of requests are defined where they are counted (metrics/invocations.py), as are those of asynchronous
requests and of the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from weakref import WeakKeyDictionary

from prometheus_client.core import Metric

from torchmoor.admin.connections import AdminConnections
from torchmoor.fleet.data_plane_view import LogCounts, VariantTraffic
from torchmoor.metrics.backlog import ASYNCHRONOUS, AsyncMetrics
from torchmoor.metrics.definition import BY_INSTANCE, BY_VARIANT, counter, gauge
from torchmoor.metrics.families import MetricFamilies
from torchmoor.metrics.host import HOST
from torchmoor.metrics.invocations import CountGroup, counted
from torchmoor.proxy.instances.breaker import SEVERITIES
from torchmoor.proxy.instances.instance import InstanceState
from torchmoor.proxy.instances.registry import Registry

BY_DNS_NAME = ("endpoint", "variant", "dns_name")

INVOCATIONS = (
    *counted(CountGroup.REQUESTS),
    counter("InvocationsPerInstance", "Requests sent to the endpoint, divided by its instances."),
    gauge("WaitingInvocations", "Requests that wait for an instance.", BY_VARIANT),
    gauge("ConcurrentRequestsPerModel", "Requests that an instance works on or that wait for one.", BY_VARIANT),
    counter("RoutingDecisions", "Instances chosen, by reason. A retry chooses again.", labels=(*BY_VARIANT, "reason")),
)
INSTANCES = (
    gauge("OutstandingInvocations", "Requests that the instance works on.", BY_INSTANCE),
    gauge("InflightBodyBytes", "Heap that their bodies take in the instance's JVM.", BY_INSTANCE, "bytes"),
    gauge("InstanceReady", "1 while the instance takes requests.", BY_INSTANCE, "0 or 1"),
    gauge("InstanceBreaker", "0: closed, 1: half open (one trial request), 2: open.", BY_INSTANCE, "0 to 2"),
    gauge("InstanceShare", "Share of its usual work; below 1 during slow start.", BY_INSTANCE, "0 to 1"),
)
ACCESS = (
    counter("AccessDenied", "Requests refused for their credentials.", labels=("error",)),
    counter(
        "CallerLimited",
        "Requests refused because their caller is at a limit of `callers`, or their client at one of `limits`: it "
        "sends too many or too slow bodies (max_arriving_bytes), or a long one fills the disk (min_spool_free_bytes) "
        "or the open files (reserved_descriptors).",
        labels=("setting",),
    ),
)
WEBSOCKETS = (gauge("WebSocketConnections", "Open WebSocket connections of the Responses API.", ()),)
ACCESS_LOG = (
    counter("AccessLogLines", "Lines of the access log.", labels=()),
    counter("AccessLogDropped", "Lines lost because the log could not be written fast enough.", labels=()),
)
ADMIN = (
    gauge("AdminConnections", "Open connections to the admin plane.", ()),
    counter("AdminConnectionsRefused", "Connections to the admin plane above its limit.", labels=()),
)
DISCOVERY = (
    gauge("DiscoveredInstances", "Instances that come from the DNS name.", BY_DNS_NAME),
    counter("DiscoveryFailures", "DNS queries without an answer.", labels=BY_DNS_NAME),
    gauge("DiscoveryAnswerAge", "Time since the last answer for the DNS name.", BY_DNS_NAME, "seconds"),
)
MODELS = (
    *counted(CountGroup.MODELS),
    gauge("LoadedModelCount", "Models in the instance's memory.", BY_INSTANCE),
)
METRICS = (
    *INVOCATIONS,
    *INSTANCES,
    *ACCESS,
    *WEBSOCKETS,
    *ACCESS_LOG,
    *ADMIN,
    *DISCOVERY,
    *MODELS,
    *ASYNCHRONOUS,
    *HOST,
)


class InstanceAverage:
    """Invocations per instance, summed over scrapes, since the number of instances changes between them."""

    __slots__ = ("_invocations", "_total")

    def __init__(self) -> None:
        self._invocations = 0
        self._total = 0.0

    def add(self, invocations: int, num_instances: int) -> float:
        """Add the invocations since the last call, divided by the current instances. Returns the sum."""
        self._total += (invocations - self._invocations) / max(1, num_instances)
        self._invocations = invocations
        return self._total


class MetricsCollector:
    """Collects invocations, instances, access and discovery.

    denied: requests refused for their credentials, by error type. limited: requests refused for their caller's limit,
    by its setting. log: the access log; None without one.
    """

    def __init__(
        self,
        registry: Registry,
        traffic: Callable[[], Iterable[VariantTraffic]],
        denied: Mapping[str, int],
        limited: Mapping[str, int],
        log: LogCounts | None,
    ) -> None:
        self._registry = registry
        self._traffic = traffic
        self._denied = denied
        self._limited = limited
        self._log = log
        self._averages: WeakKeyDictionary[VariantTraffic, InstanceAverage] = WeakKeyDictionary()

    def collect(self) -> Iterator[Metric]:
        families = MetricFamilies((*INVOCATIONS, *INSTANCES, *ACCESS, *(ACCESS_LOG if self._log is not None else ())))
        for traffic in self._traffic():
            average = self._averages.setdefault(traffic, InstanceAverage())
            metrics = traffic.metrics
            instances = list(traffic.variant.pool.members)
            labels = (metrics.endpoint, metrics.variant)
            outstanding = sum(instance.outstanding for instance in instances)
            families.add_counts(metrics)
            families.add("WaitingInvocations", labels, traffic.num_waiting)
            families.add("ConcurrentRequestsPerModel", labels, outstanding + traffic.num_waiting)
            families.add("InvocationsPerInstance", labels, average.add(metrics.invocations, len(instances)))
            for reason, tally in metrics.decisions.items():
                families.add("RoutingDecisions", (*labels, reason), tally.count)
        for instance in self._registry.instances():
            labels = (instance.endpoint, instance.name)
            families.add("OutstandingInvocations", labels, instance.outstanding)
            families.add("InflightBodyBytes", labels, instance.inflight_body_bytes)
            families.add("InstanceReady", labels, int(instance.state is InstanceState.READY))
            families.add("InstanceBreaker", labels, SEVERITIES.index(instance.breaker.state))
            families.add("InstanceShare", labels, instance.share)
        for error, count in list(self._denied.items()):
            families.add("AccessDenied", (error,), count)
        for setting, count in list(self._limited.items()):
            families.add("CallerLimited", (setting,), count)
        if self._log is not None:
            families.add("AccessLogLines", (), self._log.num_lines)
            families.add("AccessLogDropped", (), self._log.num_dropped)
        yield from families
        if self._registry.sources:
            yield from self._discovery()

    def _discovery(self) -> MetricFamilies:
        families = MetricFamilies(DISCOVERY)
        counts = Counter(instance.source for instance in self._registry.instances())
        for source in self._registry.sources.values():
            labels = (source.endpoint, source.variant, source.dns_name)
            families.add("DiscoveredInstances", labels, counts[source.dns_name])
            families.add("DiscoveryFailures", labels, source.num_failures)
            age_s = source.age_s()
            if age_s is not None:
                families.add("DiscoveryAnswerAge", labels, age_s)
        return families


class AdminCollector:
    """Collects the admin plane's own connections."""

    def __init__(self, connections: AdminConnections) -> None:
        self._connections = connections

    def collect(self) -> MetricFamilies:
        families = MetricFamilies(ADMIN)
        families.add("AdminConnections", (), len(self._connections.open))
        families.add("AdminConnectionsRefused", (), self._connections.num_refused)
        return families


class WebSocketCollector:
    """Collects the open WebSocket connections. count: returns their number."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def collect(self) -> MetricFamilies:
        families = MetricFamilies(WEBSOCKETS)
        families.add("WebSocketConnections", (), self._count())
        return families


class ModelMetricsCollector:
    """Collects the metrics of endpoints with many models. Yields nothing without such an endpoint."""

    def __init__(self, traffic: Callable[[], Iterable[VariantTraffic]]) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        families = MetricFamilies(MODELS)
        found = [each for each in self._traffic() if each.variant.models is not None]
        for traffic in found:
            families.add_counts(traffic.metrics)
            models = traffic.variant.models
            assert models is not None
            for instance in traffic.variant.pool.members:
                families.add(
                    "LoadedModelCount", (traffic.variant.endpoint, instance.name), models.num_loaded(instance.name)
                )
        if found:
            yield from families


class AsyncMetricsCollector:
    """Collects the metrics of all endpoints that take asynchronous requests."""

    def __init__(self, endpoints: Callable[[], Iterable[AsyncMetrics]]) -> None:
        self._endpoints = endpoints

    def collect(self) -> Iterator[Metric]:
        families = MetricFamilies(ASYNCHRONOUS)
        for endpoint in self._endpoints():
            for name, value in endpoint.gauges():
                families.add(name, (endpoint.endpoint,), value)
            for metrics in endpoint.variants.values():
                families.add_counts(metrics)
        yield from families
