"""The definition of a metric: name, type, labels, unit and help.

Names are those of SageMaker's CloudWatch metrics where it has the metric. Every duration is in seconds. Labels come
from the configuration, so their number is bounded; a model's name is never a label, since there may be 10,000.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

BY_VARIANT = ("endpoint", "variant")
BY_ENDPOINT = ("endpoint",)
BY_INSTANCE = ("endpoint", "instance")


class MetricType(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


COUNTER, GAUGE, HISTOGRAM = MetricType


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
