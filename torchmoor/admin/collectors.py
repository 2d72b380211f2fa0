"""The metrics page's metrics and their collector, which reads counts and state when Prometheus scrapes.

The metrics of requests, of the process, of asynchronous requests and of the host are defined in metrics/, where they
are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

from prometheus_client.core import Metric

from torchmoor.admin.connections import AdminConnections
from torchmoor.async_inference.service import AsyncInference
from torchmoor.fleet.data_plane_view import DataPlaneView, VariantTraffic
from torchmoor.metrics.backlog import ASYNCHRONOUS
from torchmoor.metrics.definition import BY_INSTANCE, BY_VARIANT, MetricFamilies, counter, gauge
from torchmoor.metrics.host import HOST
from torchmoor.metrics.invocations import CountGroup, counted
from torchmoor.metrics.process_counts import PROCESS
from torchmoor.proxy.instances.breaker import SEVERITIES
from torchmoor.proxy.instances.instance import InstanceState
from torchmoor.proxy.instances.registry import Registry

BY_DNS_NAME = ("endpoint", "variant", "dns_name")

INVOCATIONS = (
    *counted(CountGroup.REQUESTS),
    counter("InvocationsPerInstance", "Requests sent to the endpoint, divided by its instances."),
    gauge("WaitingInvocations", "Requests that wait for an instance.", BY_VARIANT),
    gauge("ConcurrentRequestsPerModel", "Requests that an instance works on or that wait for one.", BY_VARIANT),
)
INSTANCES = (
    gauge("OutstandingInvocations", "Requests that the instance works on.", BY_INSTANCE),
    gauge("InflightBodyBytes", "Heap that their bodies take in the instance's JVM.", BY_INSTANCE, "bytes"),
    gauge("InstanceCapacity", "Requests that each proxy process may send to the instance at a time.", BY_INSTANCE),
    gauge("InstanceReady", "1 while the instance takes requests.", BY_INSTANCE, "0 or 1"),
    gauge("InstanceBreaker", "0: closed, 1: half open (one trial request), 2: open.", BY_INSTANCE, "0 to 2"),
    gauge("InstanceShare", "Share of its usual work; below 1 during slow start.", BY_INSTANCE, "0 to 1"),
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
    *PROCESS,
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


class FleetCollector:
    """Collects all metrics of the proxy. connections: the admin plane's."""

    def __init__(self, registry: Registry, data: DataPlaneView, connections: AdminConnections) -> None:
        self._registry = registry
        self._data = data
        self._connections = connections
        self._averages: WeakKeyDictionary[VariantTraffic, InstanceAverage] = WeakKeyDictionary()

    def collect(self) -> Iterator[Metric]:
        traffic = self._data.traffic()
        yield from self._invocations(traffic)
        yield from self._instances()
        yield from self._process()
        yield from self._admin()
        if any(each.variant.models is not None for each in traffic):
            yield from self._models(traffic)
        if self._registry.sources:
            yield from self._discovery()
        if self._data.async_inference is not None:
            yield from self._asynchronous(self._data.async_inference)

    def _invocations(self, traffic: Iterable[VariantTraffic]) -> MetricFamilies:
        families = MetricFamilies(INVOCATIONS)
        for each in traffic:
            average = self._averages.setdefault(each, InstanceAverage())
            metrics = each.metrics
            instances = list(each.variant.pool.members)
            labels = (metrics.endpoint, metrics.variant)
            outstanding = sum(instance.outstanding for instance in instances)
            families.add_all(metrics.series(CountGroup.REQUESTS))
            families.add("WaitingInvocations", labels, each.num_waiting)
            families.add("ConcurrentRequestsPerModel", labels, outstanding + each.num_waiting)
            families.add("InvocationsPerInstance", labels, average.add(metrics.invocations, len(instances)))
        return families

    def _instances(self) -> MetricFamilies:
        families = MetricFamilies(INSTANCES)
        for instance in self._registry.instances():
            labels = (instance.endpoint, instance.name)
            families.add("OutstandingInvocations", labels, instance.outstanding)
            families.add("InflightBodyBytes", labels, instance.inflight_body_bytes)
            families.add("InstanceCapacity", labels, instance.capacity)
            families.add("InstanceReady", labels, int(instance.state is InstanceState.READY))
            families.add("InstanceBreaker", labels, SEVERITIES.index(instance.breaker.state))
            families.add("InstanceShare", labels, instance.share)
        return families

    def _process(self) -> MetricFamilies:
        counts = self._data.counts()
        families = MetricFamilies(each for each in PROCESS if each.name in counts)
        for name, values in counts.items():
            for label, number in values.items():
                families.add(name, (label,) if label else (), number)
        return families

    def _admin(self) -> MetricFamilies:
        families = MetricFamilies(ADMIN)
        families.add("AdminConnections", (), len(self._connections.open))
        families.add("AdminConnectionsRefused", (), self._connections.num_refused)
        return families

    def _models(self, traffic: Iterable[VariantTraffic]) -> MetricFamilies:
        families = MetricFamilies(MODELS)
        for each in traffic:
            models = each.variant.models
            if models is None:
                continue
            families.add_all(each.metrics.series(CountGroup.MODELS))
            for instance in each.variant.pool.members:
                labels = (each.variant.endpoint, instance.name)
                families.add("LoadedModelCount", labels, models.num_loaded(instance.name))
        return families

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

    def _asynchronous(self, service: AsyncInference) -> MetricFamilies:
        families = MetricFamilies(ASYNCHRONOUS)
        for endpoint in service.endpoints.values():
            for name, value in endpoint.metrics.gauges():
                families.add(name, (endpoint.metrics.endpoint,), value)
            for metrics in endpoint.metrics.variants.values():
                families.add_all(metrics.series(CountGroup.ASYNCHRONOUS))
        return families
