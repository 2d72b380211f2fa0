"""The past of a variant or an instance, up to 24 hours, as samples.

Of a variant: rates, quantiles, histograms and decisions. Of an instance: its load, sessions and state, and the use and
memory of its GPU. Samples are taken even while no page is open, so that a new page shows the past. Each of RANGES keeps
NUM_SAMPLES of them, the longer ones less often. Quantiles are computed once, when a sample is taken.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torchmoor.fleet.data_plane_view import VariantTraffic
from torchmoor.metrics.histogram import BUCKETS, Histogram
from torchmoor.metrics.host import GpuUse
from torchmoor.proxy.instances.instance import SERVING, Instance

INTERVAL_S = 2.0
NUM_SAMPLES = 151
RANGES = {"5m": INTERVAL_S, "15m": 6.0, "1h": 24.0, "24h": 576.0}  # seconds between two samples
NOW = "5m"
QUANTILES = {"p50": 0.5, "p99": 0.99}  # the page shows as many as there are
RECENT_S = 10.0  # quantiles cover this time at least; a shorter time often has no requests

Quantiles = dict[str, float | None]  # None without requests

FIELDS = ("in_flight", "sessions", "down", "gpu_percent", "gpu_memory_percent")
UNKNOWN = -1.0


@dataclass(slots=True)
class TrafficSample:
    """Counts since the start, and gauges, at one moment. Quantiles are by name, in milliseconds."""

    at: float
    invocations: int
    errors: int
    faults: int
    waiting: int
    outstanding: int
    latency: array[int]
    first_chunk: array[int]
    decisions: dict[str, int]
    latency_quantiles: Quantiles = field(default_factory=dict)
    first_chunk_quantiles: Quantiles = field(default_factory=dict)

    def measure(self, before: TrafficSample) -> None:
        """Compute the quantiles of the time since another sample."""
        self.latency_quantiles = _quantiles(_difference(self.latency, before.latency))
        self.first_chunk_quantiles = _quantiles(_difference(self.first_chunk, before.first_chunk))


class _Ring:
    """The last samples of one range. Gauges are the highest values since the sample before."""

    def __init__(self, interval_s: float) -> None:
        self.samples: deque[TrafficSample] = deque(maxlen=NUM_SAMPLES)
        self._interval_s = interval_s
        self._waiting = self._outstanding = 0

    def take(self, sample: TrafficSample) -> None:
        """Keep a sample if one is due."""
        self._waiting = max(self._waiting, sample.waiting)
        self._outstanding = max(self._outstanding, sample.outstanding)
        if self.samples and sample.at - self.samples[-1].at < self._interval_s - INTERVAL_S / 2:
            return
        sample = replace(sample, waiting=self._waiting, outstanding=self._outstanding)
        self._waiting = self._outstanding = 0
        if self.samples:
            sample.measure(self.before(len(self.samples)))
        self.samples.append(sample)

    def before(self, number: int) -> TrafficSample:
        """Return the sample with which the one of this number is compared: RECENT_S older than it, or the oldest."""
        return self.samples[max(0, number - max(1, round(RECENT_S / self._interval_s)))]


class VariantHistory:
    """Keeps one variant's samples; the constructor takes the first."""

    def __init__(self, traffic: VariantTraffic, now: float) -> None:
        """now: in monotonic seconds, as in `take`."""
        self.traffic = traffic
        self._rings = {name: _Ring(interval_s) for name, interval_s in RANGES.items()}
        self.take(now)

    def take(self, now: float) -> None:
        """Take a sample. now: in monotonic seconds."""
        metrics = self.traffic.metrics
        sample = TrafficSample(
            at=now,
            invocations=metrics.invocations,
            errors=metrics.client_errors + metrics.server_errors,
            faults=metrics.faults,
            waiting=self.traffic.num_waiting,
            outstanding=sum(instance.outstanding for instance in self.traffic.variant.pool.members),
            latency=_counts(metrics.model_latency),
            first_chunk=_counts(metrics.first_chunk_latency),
            decisions={reason: tally.count for reason, tally in metrics.decisions.items()},
        )
        for ring in self._rings.values():
            ring.take(sample)

    def describe(self, range_name: str = NOW) -> dict[str, Any]:
        """Return series of a range, oldest first, and histograms and decisions of its samples, in milliseconds.

        `recent` has the rates of the last RECENT_S, and the newest quantiles, whatever the range.
        """
        last_minutes = self._rings[NOW]
        newest = last_minutes.samples[-1]
        recent = _describe_pair(last_minutes.before(len(last_minutes.samples) - 1), newest)
        samples = list(self._rings[range_name].samples)
        if samples[-1].at < newest.at:
            samples = [*samples, newest][-NUM_SAMPLES:]
        pairs = list(pairwise(samples))
        first, last = samples[0], samples[-1]
        columns = [_describe_pair(a, b) for a, b in pairs]
        return {
            "series": {
                "seconds_ago": [round(last.at - sample.at, 1) for _, sample in pairs],
                **{name: [each[name] for each in columns] for name in recent},
            },
            "recent": recent,
            "latency": _histogram(_difference(last.latency, first.latency)),
            "first_chunk": _histogram(_difference(last.first_chunk, first.first_chunk)),
            "decisions": {
                reason: count - first.decisions.get(reason, 0)
                for reason, count in sorted(last.decisions.items())
                if count > first.decisions.get(reason, 0)
            },
        }


def _describe_pair(before: TrafficSample, after: TrafficSample) -> dict[str, float | None]:
    """Return the rates between two samples, and what was true at the later one."""
    return {
        "requests_per_s": _rate(before, after, after.invocations - before.invocations),
        "errors_per_s": _rate(before, after, after.errors - before.errors),
        "faults_per_s": _rate(before, after, after.faults - before.faults),
        "in_flight": after.outstanding,
        "waiting": after.waiting,
        **{f"latency_{q}_ms": after.latency_quantiles.get(q) for q in QUANTILES},
        **{f"first_chunk_{q}_ms": after.first_chunk_quantiles.get(q) for q in QUANTILES},
    }


def quantile(counts: Sequence[int], q: float) -> float | None:
    """Return the quantile q in seconds; None without values.

    Assumes that values spread evenly within a bucket. For the last bucket it returns the lower bound.
    """
    total = sum(counts)
    if not total:
        return None
    rank, seen = q * total, 0
    for number, count in enumerate(counts):
        if count and seen + count >= rank:
            low = BUCKETS[number - 1] if number else 0.0
            high = BUCKETS[number] if number < len(BUCKETS) else low
            return low + (high - low) * (rank - seen) / count
        seen += count
    return BUCKETS[-1]


def _counts(histogram: Histogram) -> array[int]:
    return array("q", histogram.counts)


def _difference(after: Sequence[int], before: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(after, before, strict=True)]


def _rate(before: TrafficSample, after: TrafficSample, count: int) -> float:
    return round(count / max(0.001, after.at - before.at), 2)


def _quantiles(counts: Sequence[int]) -> Quantiles:
    found = {name: quantile(counts, q) for name, q in QUANTILES.items()}
    return {name: None if seconds is None else round(seconds * 1000, 2) for name, seconds in found.items()}


def _histogram(counts: Sequence[int]) -> dict[str, Any]:
    """Return counts and upper bounds of the buckets from the first to the last that is not empty."""
    used = [number for number, count in enumerate(counts) if count]
    rows = range(used[0], used[-1] + 1) if used else ()
    return {
        "upper_ms": [BUCKETS[n] * 1000 if n < len(BUCKETS) else None for n in rows],
        "counts": [counts[n] for n in rows],
        **{f"{name}_ms": value for name, value in _quantiles(counts).items()},
    }


class _LoadRing:
    """The last rows of one range. A row has each field's highest value since the previous row."""

    def __init__(self, interval_s: float) -> None:
        self.times = array("d")
        self.values = array("f")  # row after row
        self._interval_s = interval_s
        self._highest = [UNKNOWN] * len(FIELDS)

    def take(self, now: float, row: Sequence[float]) -> None:
        """Keep a row if one is due."""
        self._highest = [max(pair) for pair in zip(self._highest, row, strict=True)]
        if self.times and now - self.times[-1] < self._interval_s - INTERVAL_S / 2:
            return
        self.times.append(now)
        self.values.extend(self._highest)
        self._highest = [UNKNOWN] * len(FIELDS)
        del self.times[:-NUM_SAMPLES], self.values[: -NUM_SAMPLES * len(FIELDS)]


class InstanceHistory:
    """Keeps the samples of the instances of one name."""

    def __init__(self) -> None:
        self._rings = {name: _LoadRing(interval_s) for name, interval_s in RANGES.items()}

    def take(self, now: float, instance: Instance, gpu: GpuUse | None) -> None:
        """Take a sample. now: in monotonic seconds."""
        sessions = instance.reported.open_sessions
        row = (
            instance.outstanding,
            UNKNOWN if sessions is None else sessions,
            instance.state not in SERVING,
            UNKNOWN if gpu is None else gpu.percent,
            UNKNOWN if gpu is None else 100 * gpu.used_bytes / gpu.total_bytes,
        )
        for ring in self._rings.values():
            ring.take(now, row)

    def describe(self, range_name: str) -> dict[str, list[float | None]]:
        """Return a series for each field, oldest first, and `seconds_ago`. None: not known."""
        ring, newest = self._rings[range_name], self._rings[NOW].times[-1:]
        series: dict[str, list[float | None]] = {"seconds_ago": [round(newest[0] - at, 1) for at in ring.times]}
        for number, name in enumerate(FIELDS):
            values = ring.values[number :: len(FIELDS)]
            series[name] = [None if value < 0 else round(value, 1) for value in values]
        return series


def find_gpu(instance: Instance, gpus: Mapping[str, GpuUse]) -> GpuUse | None:
    """Return the use of an instance's GPUs, joined. Each is found by the number or UUID that the launcher assigned."""
    names = [] if instance.gpu is None else instance.gpu.split(",")
    found = [gpus[name] for name in names if name in gpus]
    if not found or len(found) < len(names):
        return None
    if len(found) == 1:
        return found[0]
    return GpuUse(
        name=", ".join(gpu.name for gpu in found),
        uuid=", ".join(gpu.uuid for gpu in found),
        percent=sum(gpu.percent for gpu in found) / len(found),
        used_bytes=sum(gpu.used_bytes for gpu in found),
        total_bytes=sum(gpu.total_bytes for gpu in found),
    )
