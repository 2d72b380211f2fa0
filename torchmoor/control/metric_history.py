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
INSTANCES, GENERATION = "instances", "generation"
PER_INSTANCE, CONCURRENT, LOADED = "InvocationsPerInstance", "ConcurrentRequestsPerModel", "LoadedModelCount"
UTILIZATION = frozenset(each.name for each in HOST)  # of the machine, which all variants share

Series = tuple[str, str]
"""An endpoint and a variant; no variant for an endpoint's backlog."""


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


class MetricHistory:
    """Takes a sample each minute while `run` runs; `read` includes the current minute."""

    def __init__(self, data: DataPlaneView, *, num_minutes: int) -> None:
        self._data = data
        self._samples: deque[tuple[float, Mapping[Series, Any]]] = deque([(time.time(), {})], maxlen=num_minutes)
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

    def _take(self) -> dict[Series, Any]:
        found: dict[Series, Any] = {
            (each.variant.endpoint, each.variant.name): {**each.metrics.snapshot(), **_observe(each), **self._use}
            for each in self._data.traffic()
        }
        if self._data.async_inference is not None:
            for name, endpoint in self._data.async_inference.endpoints.items():
                found[name, ""] = {key: [value] for key, value in endpoint.metrics.gauges()}
        return found

    def names(self) -> Iterator[tuple[str, Series]]:
        """Yield all metrics that have values now, each with its series."""
        for series, sample in self._take().items():
            observed = [name for name in sample if name[0].isupper()]
            for name in (*COUNTED, PER_INSTANCE, *observed) if series[1] else observed:
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
            change = _compare(name, before.get(series, {}), after[series])
            if change.count:
                found.setdefault(minute - minute % period, Observations()).add(change)
        return found


def _observe(traffic: VariantTraffic) -> dict[str, Any]:
    """Return a variant's current gauges: for each metric a value, or one per instance."""
    members, models = list(traffic.variant.pool.members), traffic.variant.models
    busy = sum(each.outstanding for each in members) + traffic.num_waiting
    loaded = [] if models is None else [float(models.num_loaded(each.name)) for each in members]
    return {
        CONCURRENT: [busy],
        **({LOADED: loaded} if loaded else {}),
        INSTANCES: len(members),
        GENERATION: traffic.variant.generation,
    }


def _compare(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Observations:
    """Return the observations between two samples. After an update an endpoint counts from zero again."""
    if name in after and name[0].isupper():
        values = after[name]
        return Observations(len(values), sum(values), min(values), max(values))
    key = INVOCATIONS if name == PER_INSTANCE else COUNTED.get(name)
    if key is None or key not in after:
        return Observations()
    if after[GENERATION] != before.get(GENERATION):
        before = {}
    if name == PER_INSTANCE:
        share = 1 / max(1, after[INSTANCES])
        count = after[key] - before.get(key, 0)
        return Observations(count, count * share, share, share)
    if isinstance(after[key], Sequence):
        counts, total = after[key]
        old, old_total = before.get(key, ([0] * len(counts), 0.0))
        buckets = [new - less for new, less in zip(counts, old, strict=True)]
        used = [number for number, count in enumerate(buckets) if count]
        if not used:
            return Observations()
        bounds = (0.0, *BUCKETS, BUCKETS[-1])
        least, most = bounds[used[0]] * MICROSECONDS, bounds[used[-1] + 1] * MICROSECONDS
        return Observations(sum(buckets), (total - old_total) * MICROSECONDS, least, most, buckets)
    changed = after[key] - before.get(key, 0)
    count = max(changed, after[INVOCATIONS] - before.get(INVOCATIONS, 0))
    return Observations(count, changed, float(changed == count), float(changed > 0))
