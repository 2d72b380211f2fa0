"""Collectors of the metrics page: they render the proxy's counts and the fleet's state when Prometheus scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from torchmoor.admin.connections import AdminConnections
from torchmoor.fleet.data_plane_view import LogCounts, VariantTraffic
from torchmoor.metrics.asynchronous import AsyncMetrics
from torchmoor.metrics.table import (
    ACCESS,
    ACCESS_LOG,
    ADMIN,
    ASYNCHRONOUS,
    DISCOVERY,
    INSTANCES,
    INVOCATIONS,
    MODELS,
    MetricFamilies,
)
from torchmoor.proxy.instances.breaker import BreakerState
from torchmoor.proxy.instances.instance import InstanceState
from torchmoor.proxy.instances.registry import Registry

BREAKER_STATES = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


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
        traffic: Iterable[VariantTraffic],
        denied: Mapping[str, int],
        limited: Mapping[str, int],
        log: LogCounts | None,
    ) -> None:
        self._registry = registry
        self._traffic = list(traffic)
        self._denied = denied
        self._limited = limited
        self._log = log
        self._averages = [InstanceAverage() for _ in self._traffic]

    def collect(self) -> Iterator[Metric]:
        families = MetricFamilies((*INVOCATIONS, *INSTANCES, *ACCESS, *(ACCESS_LOG if self._log is not None else ())))
        for traffic, average in zip(self._traffic, self._averages, strict=True):
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
            families.add("InstanceBreaker", labels, BREAKER_STATES.index(instance.breaker.state))
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


class ModelMetricsCollector:
    """Collects the metrics of endpoints with many models. Yields nothing without such an endpoint."""

    def __init__(self, traffic: Iterable[VariantTraffic]) -> None:
        self._traffic = [each for each in traffic if each.variant.models is not None]

    def collect(self) -> Iterator[Metric]:
        families = MetricFamilies(MODELS)
        for traffic in self._traffic:
            families.add_counts(traffic.metrics)
            models = traffic.variant.models
            assert models is not None
            for instance in traffic.variant.pool.members:
                families.add(
                    "LoadedModelCount", (traffic.variant.endpoint, instance.name), models.num_loaded(instance.name)
                )
        if self._traffic:
            yield from families


class AsyncMetricsCollector:
    """Collects the metrics of all endpoints that take asynchronous requests."""

    def __init__(self, endpoints: Iterable[AsyncMetrics]) -> None:
        self._endpoints = list(endpoints)

    def collect(self) -> Iterator[Metric]:
        families = MetricFamilies(ASYNCHRONOUS)
        for endpoint in self._endpoints:
            for name, value in endpoint.gauges():
                families.add(name, (endpoint.endpoint,), value)
            for metrics in endpoint.variants.values():
                families.add_counts(metrics)
        yield from families
