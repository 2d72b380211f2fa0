"""The last five minutes of a variant as samples: rates, quantiles, histograms and decisions.

A sample is taken every INTERVAL_S even while no page is open, so that a new page shows the past. Its quantiles are
computed once, when it is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torchmoor.fleet.data_plane_view import VariantTraffic
from torchmoor.metrics.histogram import BUCKETS, Histogram

INTERVAL_S = 2.0
NUM_SAMPLES = 151  # five minutes
QUANTILES = {"p50": 0.5, "p99": 0.99}  # the page shows as many as there are
QUANTILE_SAMPLES = 5  # quantiles cover 10 s; a shorter time often has no requests

Quantiles = dict[str, float | None]  # None without requests


@dataclass(slots=True)
class TrafficSample:
    """Counts since the start, and gauges, at one moment. Quantiles are by name, in milliseconds."""

    at: float
    invocations: int
    client_errors: int
    server_errors: int
    faults: int
    waiting: int
    outstanding: int
    latency: tuple[int, ...]
    first_chunk: tuple[int, ...]
    decisions: dict[str, int]
    latency_quantiles: Quantiles = field(default_factory=dict)
    first_chunk_quantiles: Quantiles = field(default_factory=dict)


class VariantHistory:
    """Keeps one variant's samples; the constructor takes the first."""

    def __init__(self, traffic: VariantTraffic, now: float) -> None:
        """now: in monotonic seconds, as in `take`."""
        self.traffic = traffic
        self._samples: deque[TrafficSample] = deque(maxlen=NUM_SAMPLES)
        self.take(now)

    def take(self, now: float) -> None:
        """Take a sample. now: in monotonic seconds."""
        metrics = self.traffic.metrics
        sample = TrafficSample(
            at=now,
            invocations=metrics.invocations,
            client_errors=metrics.client_errors,
            server_errors=metrics.server_errors,
            faults=metrics.faults,
            waiting=self.traffic.num_waiting,
            outstanding=sum(instance.outstanding for instance in self.traffic.variant.pool.members),
            latency=_counts(metrics.model_latency),
            first_chunk=_counts(metrics.first_chunk_latency),
            decisions={reason: tally.count for reason, tally in metrics.decisions.items()},
        )
        if self._samples:
            before = self._samples[max(0, len(self._samples) - QUANTILE_SAMPLES)]
            sample.latency_quantiles = _quantiles(_difference(sample.latency, before.latency))
            sample.first_chunk_quantiles = _quantiles(_difference(sample.first_chunk, before.first_chunk))
        self._samples.append(sample)

    def describe(self) -> dict[str, Any]:
        """Return series, oldest first, and histograms and decisions of all samples. Durations are in milliseconds."""
        samples = list(self._samples)
        pairs = list(pairwise(samples))
        first, last = samples[0], samples[-1]
        return {
            "series": {
                "seconds_ago": [round(last.at - sample.at, 1) for _, sample in pairs],
                "requests_per_s": [_rate(a, b, b.invocations - a.invocations) for a, b in pairs],
                "errors_per_s": [
                    _rate(a, b, b.client_errors + b.server_errors - a.client_errors - a.server_errors) for a, b in pairs
                ],
                "faults_per_s": [_rate(a, b, b.faults - a.faults) for a, b in pairs],
                "in_flight": [sample.outstanding for _, sample in pairs],
                "waiting": [sample.waiting for _, sample in pairs],
                **{f"latency_{q}_ms": [sample.latency_quantiles[q] for _, sample in pairs] for q in QUANTILES},
                **{f"first_chunk_{q}_ms": [sample.first_chunk_quantiles[q] for _, sample in pairs] for q in QUANTILES},
            },
            "latency": _histogram(_difference(last.latency, first.latency)),
            "first_chunk": _histogram(_difference(last.first_chunk, first.first_chunk)),
            "decisions": {
                reason: count - first.decisions.get(reason, 0)
                for reason, count in sorted(last.decisions.items())
                if count > first.decisions.get(reason, 0)
            },
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


def _counts(histogram: Histogram) -> tuple[int, ...]:
    return tuple(histogram.counts)


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
