"""The last hours of variants, backlogs and this machine's load, minute by minute, as CloudWatch's statistics."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmoor.fleet.data_plane_view import DataPlaneView, VariantTraffic
from torchmoor.metrics.definition import BY_VARIANT
from torchmoor.metrics.histogram import BUCKETS
from torchmoor.metrics.host import HOST, HostCollector
from torchmoor.metrics.invocations import CountGroup, counted

logger = logging.getLogger(__name__)

MINUTE_S = 60
MICROSECONDS = 1e6
COUNTED = {each.name: each.field for group in CountGroup for each in counted(group) if each.labels == BY_VARIANT}
INVOCATIONS = "invocations"
PER_INSTANCE, CONCURRENT, LOADED = "InvocationsPerInstance", "ConcurrentRequestsPerModel", "LoadedModelCount"
UTILIZATION = frozenset(each.name for each in HOST)  # of the machine, which all variants share

Series = tuple[str, str]
"""An endpoint and a variant; no variant for an endpoint's backlog."""

Times = tuple[Sequence[int], float]
"""The state of a histogram: its counts by bucket, and the sum of its values in seconds."""


@dataclass(slots=True)
class Observations:
    """The observations of a period: their number and sum, and for a histogram their counts by bucket."""

    count: float = 0
    total: float = 0.0
    least: float = 0.0
    most: float = 0.0
    buckets: list[int] = field(default_factory=list)

    def add(self, other: Observations) -> None:
        """Add the observations of another period."""
        if other.count:
            self.least = min(self.least, other.least) if self.count else other.least
            self.most = max(self.most, other.most) if self.count else other.most
            self.count += other.count
            self.total += other.total
            pairs = zip(self.buckets or [0] * len(other.buckets), other.buckets, strict=True)
            self.buckets = [own + more for own, more in pairs]

    def statistic(self, name: str) -> float:
        """Return a statistic by CloudWatch's name: SampleCount, Sum, Average, Minimum, Maximum, or p99 and the like."""
        if name.startswith("p"):
            return self._percentile(float(name[1:]) / 100)
        return {
            "SampleCount": self.count,
            "Sum": self.total,
            "Average": self.total / self.count,
            "Minimum": self.least,
            "Maximum": self.most,
        }[name]

    def _percentile(self, share: float) -> float:
        """Return the upper bound of the percentile's bucket, or the largest value without buckets."""
        passed = 0
        for number, count in enumerate(self.buckets):
            passed += count
            if count and passed >= share * self.count:
                return BUCKETS[min(number, len(BUCKETS) - 1)] * MICROSECONDS
        return self.most


@dataclass(frozen=True, slots=True)
class _Sample:
    """A series at one moment. gauges: for each metric a value, or one per instance. counts: a variant's, by fields.

    num_instances, generation: of the variant.
    """

    gauges: Mapping[str, Sequence[float]]
    counts: Mapping[str, Any] = field(default_factory=dict)
    num_instances: int = 0
    generation: int = 0


class MetricHistory:
    """Takes a sample each minute while `run` runs; `read` includes the current minute."""

    def __init__(self, data: DataPlaneView, *, num_minutes: int) -> None:
        self._data = data
        self._samples: deque[tuple[float, Mapping[Series, _Sample]]] = deque([(time.time(), {})], maxlen=num_minutes)
        self._host = HostCollector()
        self._use = self._measure_host()

    async def run(self) -> None:
        """Take samples."""
        while True:
            await asyncio.sleep(MINUTE_S - time.time() % MINUTE_S)
            try:
                self.sample()
            except Exception:
                logger.exception("a sample of the metrics failed")

    def sample(self) -> None:
        """End a minute."""
        self._use = self._measure_host()
        self._samples.append((time.time(), self._take()))

    def _measure_host(self) -> dict[str, list[float]]:
        """Return the machine's load since the last call."""
        return {family.name: [family.samples[0].value] for family in self._host.collect()}

    def _take(self) -> dict[Series, _Sample]:
        found = {
            (each.variant.endpoint, each.variant.name): _sample_of(each, self._use) for each in self._data.traffic()
        }
        if self._data.async_inference is not None:
            for name, endpoint in self._data.async_inference.endpoints.items():
                found[name, ""] = _Sample({key: [value] for key, value in endpoint.metrics.gauges()})
        return found

    def names(self) -> Iterator[tuple[str, Series]]:
        """Yield all metrics that have values now, each with its series."""
        for series, sample in self._take().items():
            for name in (*COUNTED, PER_INSTANCE, *sample.gauges) if series[1] else sample.gauges:
                yield name, series

    def read(self, name: str, series: Series, *, start: float, end: float, period: int) -> dict[int, Observations]:
        """Return the observations of each period in a time range, by its beginning in seconds; none for empty ones."""
        samples = [*self._samples, (time.time(), self._take())]
        begin = max(0, bisect_right([at for at, _ in samples], start - MINUTE_S) - 1)
        found: dict[int, Observations] = {}
        for (at, before), (_, after) in zip(samples[begin:], samples[begin + 1 :], strict=False):
            minute = int(at - at % MINUTE_S)
            if series not in after or not start - MINUTE_S < minute < end:
                continue
            change = _compare(name, before.get(series), after[series])
            if change.count:
                found.setdefault(minute - minute % period, Observations()).add(change)
        return found


def _sample_of(traffic: VariantTraffic, use: Mapping[str, Sequence[float]]) -> _Sample:
    """Return a variant's sample. use: the gauges of the machine."""
    members, models = list(traffic.variant.pool.members), traffic.variant.models
    gauges: dict[str, Sequence[float]] = {CONCURRENT: [sum(each.outstanding for each in members) + traffic.num_waiting]}
    if models is not None and members:
        gauges[LOADED] = [models.num_loaded(each.name) for each in members]
    return _Sample({**gauges, **use}, traffic.metrics.snapshot(), len(members), traffic.variant.generation)


def _compare(name: str, before: _Sample | None, after: _Sample) -> Observations:
    """Return the observations between two samples. After an update an endpoint counts from zero again."""
    if name in after.gauges:
        values = after.gauges[name]
        return Observations(len(values), sum(values), min(values), max(values))
    key, new = INVOCATIONS if name == PER_INSTANCE else COUNTED.get(name), after.counts
    if key is None or key not in new:
        return Observations()
    old = before.counts if before is not None and before.generation == after.generation else {}
    if name == PER_INSTANCE:
        share = 1 / max(1, after.num_instances)
        count = new[key] - old.get(key, 0)
        return Observations(count, count * share, share, share)
    if isinstance(new[key], Sequence):
        return _compare_times(new[key], old.get(key))
    changed = new[key] - old.get(key, 0)
    count = max(changed, new[INVOCATIONS] - old.get(INVOCATIONS, 0))
    return Observations(count, changed, float(changed == count), float(changed > 0))


def _compare_times(after: Times, before: Times | None) -> Observations:
    """Return the observations between two states of a histogram."""
    counts, total = after
    old_counts, old_total = before or ([0] * len(counts), 0.0)
    buckets = [count - less for count, less in zip(counts, old_counts, strict=True)]
    used = [number for number, count in enumerate(buckets) if count]
    if not used:
        return Observations()
    bounds = (0.0, *BUCKETS, BUCKETS[-1])
    least, most = bounds[used[0]] * MICROSECONDS, bounds[used[-1] + 1] * MICROSECONDS
    return Observations(sum(buckets), (total - old_total) * MICROSECONDS, least, most, buckets)
