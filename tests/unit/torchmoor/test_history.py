"""The dashboard's last minutes: rates, quantiles and what is forgotten; what is kept of an instance."""

from dataclasses import dataclass, field

import pytest

from torchmoor.admin.dashboard.history import (
    FIELDS,
    INTERVAL_S,
    NUM_SAMPLES,
    RANGES,
    InstanceHistory,
    VariantHistory,
    find_gpu,
    quantile,
)
from torchmoor.config.routing import VariantSettings
from torchmoor.metrics.histogram import BUCKETS, Histogram
from torchmoor.metrics.host import GpuUse
from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.instances.endpoint import Variant
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.routing.reported_status import ReportedStatus

GPU = GpuUse("1", "GPU-a", 30.0, 25, 100)


@dataclass
class Traffic:
    variant: Variant = field(default_factory=lambda: Variant("llava", VariantSettings(model="llava"), None))
    metrics: InvocationMetrics = field(default_factory=lambda: InvocationMetrics("llava", "AllTraffic"))
    num_waiting: int = 0
    waiting_turns: dict[str, int] = field(default_factory=dict)


def observed(*seconds: float) -> list[int]:
    histogram = Histogram()
    for value in seconds:
        histogram.observe(value)
    return histogram.counts


@pytest.mark.parametrize(
    ("seconds", "q", "least", "most"),
    [
        ((0.02,), 0.5, 0.01, 0.025),
        ((0.002,) * 99 + (3.0,), 0.5, 0.001, 0.0025),
        ((0.002,) * 99 + (3.0,), 0.999, 2.5, 5.0),
        ((0.00001,), 0.5, 0.0, BUCKETS[0]),
        ((100_000.0,), 0.5, BUCKETS[-1], BUCKETS[-1]),
    ],
)
def test_quantile_lies_in_its_bucket(seconds: tuple[float, ...], q: float, least: float, most: float) -> None:
    """A quantile is as exact as its bucket; in the open bucket it is the lower bound."""
    found = quantile(observed(*seconds), q)

    assert found is not None
    assert least <= found <= most


def test_quantile_of_nothing_is_none() -> None:
    """A quantile of no values is None, so that the curve has a gap instead of a zero."""
    assert quantile(observed(), 0.5) is None


def test_series_tell_rates_and_what_was_true_at_the_time() -> None:
    """Series have rates per second of elapsed time, and the gauges of their time."""
    traffic = Traffic()
    history = VariantHistory(traffic, 0.0)
    traffic.metrics.invocations, traffic.metrics.server_errors, traffic.num_waiting = 12, 2, 3
    traffic.metrics.observe(0.02, 0.001)
    traffic.metrics.decisions["random"].count = 12
    history.take(4.0)
    history.take(6.0)

    told = history.describe()

    assert told["series"]["requests_per_s"] == [3.0, 0.0]
    assert told["series"]["errors_per_s"] == [0.5, 0.0]
    assert told["series"]["waiting"] == [3, 3]
    assert told["series"]["seconds_ago"] == [2.0, 0.0]
    assert 10 <= told["series"]["latency_p50_ms"][0] <= 25
    assert told["series"]["first_chunk_p50_ms"] == [None, None]
    assert told["latency"]["counts"] == [1]
    assert told["decisions"] == {"random": 12}


def test_what_is_older_than_five_minutes_is_forgotten() -> None:
    """Curves, histograms and decisions older than five minutes are dropped, so that memory is limited."""
    traffic = Traffic()
    history = VariantHistory(traffic, 0.0)
    traffic.metrics.observe(0.02, 0.001)
    traffic.metrics.decisions["random"].count = 1
    for number in range(1, NUM_SAMPLES + 1):
        history.take(number * INTERVAL_S)

    told = history.describe()

    assert told["latency"] == {"upper_ms": [], "counts": [], "p50_ms": None, "p99_ms": None}
    assert told["decisions"] == {}
    assert len(told["series"]["waiting"]) == NUM_SAMPLES - 1


@pytest.mark.parametrize(("name", "seconds"), [("15m", 900), ("1h", 3600), ("24h", 86_400)])
def test_longer_ranges_keep_less_often_what_the_shorter_ones_forget(name: str, seconds: int) -> None:
    """Each range has as many samples: gauges are the highest since the last sample, and quantiles cover that time."""
    traffic = Traffic()
    history = VariantHistory(traffic, 0.0)
    traffic.metrics.observe(0.02, 0.001)
    traffic.num_waiting = 7
    history.take(INTERVAL_S)
    traffic.num_waiting = 0
    for number in range(2, round(seconds / INTERVAL_S)):
        history.take(number * INTERVAL_S)

    told = history.describe(name)

    assert sum(told["latency"]["counts"]) == 1
    assert told["series"]["waiting"][0] == 7
    assert set(told["series"]["waiting"][1:]) == {0}
    assert 10 <= told["series"]["latency_p50_ms"][0] <= 25
    assert NUM_SAMPLES - 2 <= len(told["series"]["waiting"]) < NUM_SAMPLES
    assert sum(history.describe("5m")["latency"]["counts"]) == 0
    for _ in range(round(RANGES[name] / INTERVAL_S) + 3):
        number += 1
        history.take(number * INTERVAL_S)
    assert sum(history.describe(name)["latency"]["counts"]) == 0


def test_recent_rates_are_those_of_ten_seconds_in_every_range() -> None:
    """Current rates cover ten seconds in every range, however far apart its samples are."""
    traffic = Traffic()
    history = VariantHistory(traffic, 0.0)
    for number in range(1, 9):
        traffic.metrics.invocations += 20 if number > 3 else 0
        traffic.metrics.faults += 2 if number > 3 else 0
        history.take(number * INTERVAL_S)

    for name in RANGES:
        recent = history.describe(name)["recent"]
        assert (recent["requests_per_s"], recent["faults_per_s"]) == (10.0, 1.0), name


def make_instance() -> Instance:
    return Instance(name="llava-0", endpoint="llava", model="llava", port=1, gpu="1", state=InstanceState.READY)


def test_load_sessions_state_and_gpu_are_kept() -> None:
    """Values that an instance does not report are unknown, not zero."""
    instance, history = make_instance(), InstanceHistory()
    history.take(0.0, instance, None)
    instance.outstanding = 3
    instance.take_status(ReportedStatus(open_sessions=7, session_room=1))
    instance.state = InstanceState.DOWN
    history.take(2.0, instance, find_gpu(instance, {"1": GPU}))

    assert history.describe("5m") == {
        "seconds_ago": [2.0, 0.0],
        "in_flight": [0.0, 3.0],
        "sessions": [None, 7.0],
        "down": [0.0, 1.0],
        "gpu_percent": [None, 30.0],
        "gpu_memory_percent": [None, 25.0],
    }


@pytest.mark.parametrize("name", RANGES)
def test_each_range_is_bounded_and_keeps_peaks(name: str) -> None:
    """Each range keeps peaks between its samples and drops what is older."""
    instance, history = make_instance(), InstanceHistory()
    history.take(0.0, instance, None)
    instance.outstanding = 9
    history.take(INTERVAL_S, instance, None)
    instance.outstanding = 0
    num_ticks = round(NUM_SAMPLES * RANGES[name] / INTERVAL_S)
    for number in range(2, num_ticks - 3 * round(RANGES[name] / INTERVAL_S)):
        history.take(number * INTERVAL_S, instance, None)
    assert max(value or 0 for value in history.describe(name)["in_flight"]) == 9
    for later in range(number, num_ticks + 3 * round(RANGES[name] / INTERVAL_S)):
        history.take(later * INTERVAL_S, instance, None)

    series = history.describe(name)
    assert {len(series[field]) for field in FIELDS} == {NUM_SAMPLES} == {len(series["seconds_ago"])}
    assert set(series["in_flight"]) == {0.0}


def test_gpu_is_found_by_number_or_uuid() -> None:
    """A GPU is found by the number or UUID in CUDA_VISIBLE_DEVICES."""
    instance = make_instance()
    assert find_gpu(instance, {"1": GPU}) is GPU
    instance.gpu = "GPU-a"
    assert find_gpu(instance, {"GPU-a": GPU}) is GPU
    instance.gpu = None
    assert find_gpu(instance, {"1": GPU}) is None


def test_several_gpus_of_an_instance_are_one() -> None:
    """Several GPUs of an instance give their mean load and total memory, or unknown if one of them is."""
    instance = make_instance()
    instance.gpu = "0,GPU-b"
    first, second = GpuUse("0", "GPU-a", 10.0, 1, 4), GpuUse("1", "GPU-b", 30.0, 2, 8)

    found = find_gpu(instance, {"0": first, "GPU-a": first, "1": second, "GPU-b": second})

    assert found == GpuUse("0, 1", "GPU-a, GPU-b", 20.0, 3, 12)
    assert find_gpu(instance, {"0": first}) is None
