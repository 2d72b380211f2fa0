"""Invocation metrics under SageMaker's names (docs/runtime-api.md), kept as plain numbers and rendered when asked.

The hot path only adds to integers; prometheus_client's own counters would cost more than routing does. Labels are
endpoint and variant: both come from the configuration, so they are bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from torchmoor.proxy.instances.breaker import BreakerState
from torchmoor.proxy.instances.instance import InstanceState
from torchmoor.proxy.instances.registry import Registry, Variant

# Seconds; 100 us to 8 minutes, which is the longest stream.
BUCKETS = (*tuple(round(base * 10.0**power, 7) for power in range(-4, 3) for base in (1.0, 2.5, 5.0))[:-1], 480.0)

COUNTERS = {
    "Invocations": "Requests sent to the endpoint.",
    "Invocation4XXErrors": "Requests answered with a status from 400 to 499.",
    "Invocation5XXErrors": "Requests answered with a status from 500 to 599.",
    "InvocationModelErrors": "Requests that the model answered with an error, or not in time.",
    "MidStreamErrors": "Answers that broke off after their first byte.",
    "NoCapacityInvocationFailures": "Requests refused because no instance could take them.",
    "Retries": "Requests sent again to another instance because the first could not take them, or was lost.",
    "RetriesRefused": "Requests not sent again because too many had been.",
}
BREAKER_STATES = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)
HISTOGRAMS = {
    "ModelLatency": "Seconds from sending the request to an instance until its answer has ended.",
    "OverheadLatency": "Seconds that a request spent in the proxy beside the model's time.",
    "QueueLatency": "Seconds from a request's head until an instance was free, of those that had to wait for one.",
    "FirstChunkLatency": "Seconds from receiving the request's head to the first byte of a streamed answer's body.",
    "FirstChunkModelLatency": "Of FirstChunkLatency, the seconds since the request was sent to the instance.",
    "FirstChunkOverheadLatency": "Of FirstChunkLatency, the seconds before that.",
}


class Tally:
    """A count that others add to."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Histogram:
    """Counts of values by bucket; the last bucket is open."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one value."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def add(self, counts: Sequence[int], total: float) -> None:
        """Count values that another histogram has counted."""
        self.counts = [own + more for own, more in zip(self.counts, counts, strict=True)]
        self.sum += total

    def cumulative(self) -> list[tuple[str, float]]:
        """Bucket bounds and the number of values up to each, as Prometheus wants them."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


class InvocationMetrics:
    """One variant's numbers."""

    __slots__ = (
        "endpoint",
        "variant",
        "invocations",
        "client_errors",
        "server_errors",
        "model_errors",
        "mid_stream_errors",
        "no_capacity",
        "retries",
        "retries_refused",
        "model_latency",
        "overhead_latency",
        "queue_latency",
        "first_chunk_latency",
        "first_chunk_model_latency",
        "first_chunk_overhead_latency",
        "decisions",
        "model_invocations",
        "model_hits",
        "model_loading_wait",
        "async_processed",
        "async_failures",
        "async_expired",
        "async_cancelled",
        "async_repeated",
        "async_download_failures",
        "async_upload_failures",
        "async_notification_failures",
        "async_time_in_backlog",
        "async_total_time",
        "async_download_latency",
        "async_upload_latency",
    )

    def __init__(self, endpoint: str, variant: str) -> None:
        self.endpoint = endpoint
        self.variant = variant
        self.invocations = self.client_errors = self.server_errors = self.model_errors = 0
        self.mid_stream_errors = self.no_capacity = self.retries = self.retries_refused = 0
        self.model_latency = Histogram()
        self.overhead_latency = Histogram()
        self.queue_latency = Histogram()
        self.first_chunk_latency = Histogram()
        self.first_chunk_model_latency = Histogram()
        self.first_chunk_overhead_latency = Histogram()
        self.model_invocations = self.model_hits = 0  # of endpoints with many models: see torchmoor.metrics.models
        self.model_loading_wait = Histogram()
        # Of asynchronous requests: see torchmoor.metrics.asynchronous.
        self.async_processed = self.async_failures = self.async_expired = self.async_cancelled = 0
        self.async_repeated = self.async_download_failures = self.async_upload_failures = 0
        self.async_notification_failures = 0
        self.async_time_in_backlog = Histogram()
        self.async_total_time = Histogram()
        self.async_download_latency = Histogram()
        self.async_upload_latency = Histogram()
        self.decisions: dict[str, Tally] = {}  # by why an instance was chosen

    def tally(self, reason: str) -> Tally:
        """Where instances chosen for this reason are counted."""
        return self.decisions.setdefault(reason, Tally())

    def observe(self, model_s: float, overhead_s: float) -> None:
        """Count how long a request took at its instance, and beside that. In one, because every request comes here."""
        model, overhead = self.model_latency, self.overhead_latency
        model.counts[bisect_left(BUCKETS, model_s)] += 1
        model.sum += model_s
        overhead.counts[bisect_left(BUCKETS, overhead_s)] += 1
        overhead.sum += overhead_s

    @property
    def num_sent(self) -> int:
        """Requests that were sent to an instance and are over."""
        return sum(self.model_latency.counts)

    def observe_first_chunk(self, model_s: float, overhead_s: float) -> None:
        """Count how long a stream's client waited for its first bytes."""
        self.first_chunk_latency.observe(model_s + overhead_s)
        self.first_chunk_model_latency.observe(model_s)
        self.first_chunk_overhead_latency.observe(overhead_s)

    def count_status(self, status: int) -> None:
        """Count the status that a client was told."""
        if status >= 500:
            self.server_errors += 1
        elif status >= 400:
            self.client_errors += 1

    def snapshot(self) -> dict[str, Any]:
        """All numbers, in a form for JSON; see add."""
        numbers = {
            name: [value.counts, value.sum] if isinstance(value, Histogram) else value
            for name in self.__slots__
            if not isinstance(value := getattr(self, name), str | dict)
        }
        return {**numbers, "decisions": {reason: tally.count for reason, tally in self.decisions.items()}}

    def add(self, snapshot: Mapping[str, Any]) -> None:
        """Count what another process has counted."""
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
        """Begin again from nothing."""
        self.__init__(self.endpoint, self.variant)  # type: ignore[misc]

    def values(self) -> Iterator[tuple[str, int]]:
        """The counters by their names."""
        yield "Invocations", self.invocations
        yield "Invocation4XXErrors", self.client_errors
        yield "Invocation5XXErrors", self.server_errors
        yield "InvocationModelErrors", self.model_errors
        yield "MidStreamErrors", self.mid_stream_errors
        yield "NoCapacityInvocationFailures", self.no_capacity
        yield "Retries", self.retries
        yield "RetriesRefused", self.retries_refused

    def histograms(self) -> Iterator[tuple[str, Histogram]]:
        """The histograms by their names."""
        yield "ModelLatency", self.model_latency
        yield "OverheadLatency", self.overhead_latency
        yield "QueueLatency", self.queue_latency
        yield "FirstChunkLatency", self.first_chunk_latency
        yield "FirstChunkModelLatency", self.first_chunk_model_latency
        yield "FirstChunkOverheadLatency", self.first_chunk_overhead_latency


class Traffic(Protocol):
    """A variant, its numbers, and how many of its requests wait at this moment."""

    variant: Variant
    metrics: InvocationMetrics

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an instance."""
        ...

    @property
    def waiting_turns(self) -> Mapping[str, int]:
        """Of those the turns of sessions, by the instance that they wait for."""
        ...


class LogCounts(Protocol):
    """An access log's own numbers."""

    num_lines: int

    @property
    def num_dropped(self) -> int:
        """Lines that are lost."""
        ...


class InstanceShare:
    """Invocations divided by instances. How many there are counts from one look to the next."""

    __slots__ = ("_invocations", "_total")

    def __init__(self) -> None:
        self._invocations = 0
        self._total = 0.0

    def add(self, invocations: int, num_instances: int) -> float:
        """All invocations up to now, and the instances of this moment; returns the sum."""
        self._total += (invocations - self._invocations) / max(1, num_instances)
        self._invocations = invocations
        return self._total


class MetricsCollector:
    """Turns the numbers of all variants and instances into Prometheus metrics, when scraped."""

    def __init__(
        self, registry: Registry, variants: Iterable[Traffic], denied: Mapping[str, int], log: LogCounts | None = None
    ) -> None:
        """denied: requests refused for their credentials, by kind of error. log: the access log, if there is one."""
        self._denied = denied
        self._registry = registry
        self._variants = list(variants)
        self._log = log
        self._shares = [InstanceShare() for _ in self._variants]

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        labels = ["endpoint", "variant"]
        counters = {name: CounterMetricFamily(name, text, labels=labels) for name, text in COUNTERS.items()}
        histograms = {name: HistogramMetricFamily(name, text, labels=labels) for name, text in HISTOGRAMS.items()}
        per_instance = CounterMetricFamily(
            "InvocationsPerInstance", "Requests sent to the endpoint, divided by its instances.", labels=labels
        )
        decisions = CounterMetricFamily(
            "RoutingDecisions", "Instances chosen, by why; a retry chooses again.", labels=[*labels, "reason"]
        )
        waiting = GaugeMetricFamily("WaitingInvocations", "Requests that wait for an instance.", labels=labels)
        concurrent = GaugeMetricFamily(
            "ConcurrentRequestsPerModel", "Requests that instances work on or that wait for one.", labels=labels
        )
        for traffic, share in zip(self._variants, self._shares, strict=True):
            variant = traffic.metrics
            instances = list(traffic.variant.pool.members)
            where = [variant.endpoint, variant.variant]
            for name, value in variant.values():
                counters[name].add_metric(where, value)
            for name, histogram in variant.histograms():
                histograms[name].add_metric(where, histogram.cumulative(), sum_value=histogram.sum)
            waiting.add_metric(where, traffic.num_waiting)
            outstanding = sum(instance.outstanding for instance in instances)
            concurrent.add_metric(where, outstanding + traffic.num_waiting)
            per_instance.add_metric(where, share.add(variant.invocations, len(instances)))
            for reason, tally in variant.decisions.items():
                decisions.add_metric([*where, reason], tally.count)
        yield from counters.values()
        yield from histograms.values()
        yield from (waiting, concurrent, per_instance, decisions)
        if self._log is not None:
            yield CounterMetricFamily("AccessLogLines", "Lines of the access log.", value=self._log.num_lines)
            yield CounterMetricFamily(
                "AccessLogDropped", "Lines that could not be written, or not fast enough.", value=self._log.num_dropped
            )
        denied = CounterMetricFamily(
            "AccessDenied", "Requests refused before any endpoint saw them, by kind of error.", labels=["error"]
        )
        for kind, number in list(self._denied.items()):
            denied.add_metric([kind], number)
        yield denied
        yield from self._instances()

    def _instances(self) -> Iterator[Metric]:
        labels = ["endpoint", "instance"]
        outstanding = GaugeMetricFamily("OutstandingInvocations", "Requests an instance is working on.", labels=labels)
        ready = GaugeMetricFamily("InstanceReady", "1 while an instance may be sent requests.", labels=labels)
        breaker = GaugeMetricFamily(
            "InstanceBreaker", "0 while closed, 1 half open (one request as a trial), 2 open.", labels=labels
        )
        share = GaugeMetricFamily(
            "InstanceShare", "Of the usual work that an instance gets; below 1 while it comes back.", labels=labels
        )
        for instance in self._registry.instances():
            where = [instance.endpoint, instance.name]
            breaker.add_metric(where, BREAKER_STATES.index(instance.breaker.state))
            share.add_metric(where, instance.share)
            outstanding.add_metric(where, instance.outstanding)
            ready.add_metric(where, int(instance.state is InstanceState.READY))
        yield outstanding
        yield ready
        yield breaker
        yield share
        yield from discovery_metrics(self._registry)


def discovery_metrics(registry: Registry) -> Iterator[Metric]:
    """How the DNS names do that bring instances; nothing where there are none."""
    labels = ["endpoint", "variant", "dns_name"]
    discovered = GaugeMetricFamily("DiscoveredInstances", "Instances that a DNS name has brought.", labels=labels)
    failures = CounterMetricFamily("DiscoveryFailures", "Questions for a DNS name without an answer.", labels=labels)
    age = GaugeMetricFamily("DiscoveryAnswerAge", "Seconds since the last answer for a DNS name.", labels=labels)
    counts = Counter(instance.source for instance in registry.instances())
    for source in registry.sources.values():
        where = [source.endpoint, source.variant, source.dns_name]
        discovered.add_metric(where, counts[source.dns_name])
        failures.add_metric(where, source.num_failures)
        age_s = source.age_s()
        if age_s is not None:
            age.add_metric(where, age_s)
    if registry.sources:
        yield from (discovered, failures, age)
