"""Metrics of endpoints with many models, under CloudWatch's names; times in seconds, as everywhere on the page.

Labels are endpoint and variant, or instance: never a model, of which there may be ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.instances.registry import Variant


class Traffic(Protocol):
    """A variant and its numbers."""

    variant: Variant
    metrics: InvocationMetrics


class ModelMetricsCollector:
    """Turns them into Prometheus metrics, when scraped."""

    def __init__(self, traffics: Iterable[Traffic]) -> None:
        self._traffics = [traffic for traffic in traffics if traffic.variant.models is not None]

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        labels = ["endpoint", "variant"]
        invocations = CounterMetricFamily(
            "ModelInvocations",
            "Requests that named one of many models; the whole that ModelCacheHit is of.",
            labels=labels,
        )
        hits = CounterMetricFamily(
            "ModelCacheHit", "Answered requests whose model was in the instance's memory.", labels=labels
        )
        waits = HistogramMetricFamily(
            "ModelLoadingWaitTime", "Seconds that answered requests waited for a model that was not.", labels=labels
        )
        loaded = GaugeMetricFamily(
            "LoadedModelCount", "Models in an instance's memory.", labels=["endpoint", "instance"]
        )
        for traffic in self._traffics:
            variant, numbers = traffic.variant, traffic.metrics
            where = [variant.endpoint, variant.name]
            invocations.add_metric(where, numbers.model_invocations)
            hits.add_metric(where, numbers.model_hits)
            waits.add_metric(where, numbers.model_loading_wait.cumulative(), sum_value=numbers.model_loading_wait.sum)
            for instance in variant.pool.members:
                assert variant.models is not None
                loaded.add_metric([variant.endpoint, instance.name], variant.models.num_loaded(instance.name))
        if self._traffics:
            yield from (invocations, hits, waits, loaded)
