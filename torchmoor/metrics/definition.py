"""The definition of a metric (name, type, labels, unit and help), and Prometheus' form of its values.

Names are those of SageMaker's CloudWatch metrics where it has the metric. Every duration is in seconds. Labels come
from the configuration, so their number is bounded; a model's name is never a label, since there may be 10,000.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from torchmoor.metrics.histogram import Histogram

BY_VARIANT = ("endpoint", "variant")
BY_ENDPOINT = ("endpoint",)
BY_INSTANCE = ("endpoint", "instance")


class MetricType(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


COUNTER, GAUGE, HISTOGRAM = MetricType
_FAMILIES = {COUNTER: CounterMetricFamily, GAUGE: GaugeMetricFamily, HISTOGRAM: HistogramMetricFamily}


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One metric.

    unit: "" for a plain number. field: of InvocationMetrics; "" if a collector reads the value from elsewhere.
    """

    name: str
    type: MetricType
    labels: tuple[str, ...]
    unit: str
    help: str
    field: str = ""


def counter(name: str, help: str, *, labels: tuple[str, ...] = BY_VARIANT) -> MetricDefinition:
    """Define a metric that only grows."""
    return MetricDefinition(name, COUNTER, labels, "", help)


def gauge(name: str, help: str, labels: tuple[str, ...], unit: str = "") -> MetricDefinition:
    """Define a metric that goes up and down."""
    return MetricDefinition(name, GAUGE, labels, unit, help)


class MetricFamilies:
    """Prometheus families of some metrics, filled with the values of one scrape."""

    def __init__(self, definitions: Iterable[MetricDefinition]) -> None:
        self._families: dict[str, Metric] = {
            each.name: _FAMILIES[each.type](each.name, _help(each), labels=each.labels) for each in definitions
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

    def add_all(self, series: Iterable[tuple[str, Sequence[str], float | Histogram]]) -> None:
        """Add time series, each with its metric's name, its labels and its value."""
        for each in series:
            self.add(*each)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())


def _help(definition: MetricDefinition) -> str:
    return f"{definition.help} Unit: {definition.unit}." if definition.unit else definition.help
