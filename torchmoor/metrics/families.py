"""Prometheus' form of the proxy's metrics, filled at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from torchmoor.metrics.definition import COUNTER, GAUGE, HISTOGRAM, MetricDefinition
from torchmoor.metrics.histogram import Histogram
from torchmoor.metrics.invocations import InvocationMetrics

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
