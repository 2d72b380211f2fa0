"""CloudWatch statistics of a variant's counts."""

import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from torchmoor.config.routing import VariantSettings
from torchmoor.control.metric_history import MetricHistory, Observations
from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.instances.endpoint import Variant

SERIES = ("llava", "AllTraffic")


@dataclass
class Traffic:
    variant: Variant = field(default_factory=lambda: Variant("llava", VariantSettings(model="llava"), None))
    metrics: InvocationMetrics = field(default_factory=lambda: InvocationMetrics(*SERIES))
    num_waiting: int = 0


class Front:
    """A data plane with one variant."""

    async_inference = None

    def __init__(self) -> None:
        self.one = Traffic()

    def traffic(self) -> list[Traffic]:
        return [self.one]


@pytest.fixture
def front() -> Front:
    return Front()


@pytest.fixture
def history(front: Front) -> MetricHistory:
    given: Any = front
    return MetricHistory(given, num_minutes=10)


def read(history: MetricHistory, name: str) -> Observations:
    """Return all recorded data points."""
    total = Observations()
    for found in history.read(name, SERIES, start=0, end=time.time() + 1, period=60).values():
        total.add(found)
    return total


def serve(front: Front, model_s: float) -> None:
    front.one.metrics.invocations += 1
    front.one.metrics.observe(model_s, 0.001)


def test_latencies_of_all_minutes_are_kept(front: Front, history: MetricHistory) -> None:
    """Latencies of all minutes are kept; later requests do not change an earlier sample's counts."""
    for model_s in (0.2, 0.3, 0.4):
        serve(front, model_s)
        history.sample()
    serve(front, 2.0)

    found = read(history, "ModelLatency")

    assert found.statistic("SampleCount") == 4
    assert found.statistic("Sum") == pytest.approx(2.9e6)
    assert found.statistic("p99") >= 2.0e6
    assert read(history, "Invocations").statistic("Sum") == 4
    assert read(history, "InvocationsPerInstance").statistic("Sum") == 4


def test_what_variants_do_now_has_values_of_its_own(front: Front, history: MetricHistory) -> None:
    front.one.num_waiting = 3
    history.sample()
    front.one.num_waiting = 1

    found = read(history, "ConcurrentRequestsPerModel")

    assert (found.statistic("Maximum"), found.statistic("Minimum")) == (3, 1)
    assert read(history, "MemoryUtilization").statistic("Maximum") > 0
    assert read(history, "LoadedModelCount").count == 0
    assert read(history, "NoSuchMetric").count == 0
    assert {name for name, _ in history.names()} >= {"ModelLatency", "CPUUtilization", "ConcurrentRequestsPerModel"}


@pytest.mark.parametrize("num_later", [1, 2, 5])
def test_an_updated_endpoint_counts_from_zero_again(front: Front, history: MetricHistory, num_later: int) -> None:
    """Whether its new variant has had fewer requests at the next sample than the old one, or more."""
    serve(front, 0.1)
    serve(front, 4.0)
    history.sample()
    front.one = Traffic(Variant("llava", VariantSettings(model="llava"), None, generation=1))
    for _ in range(num_later):
        serve(front, 0.1)

    assert read(history, "Invocations").statistic("Sum") == 2 + num_later
    assert read(history, "ModelLatency").statistic("SampleCount") == 2 + num_later
    assert read(history, "ModelLatency").statistic("Sum") == pytest.approx((4.1 + 0.1 * num_later) * 1e6)
