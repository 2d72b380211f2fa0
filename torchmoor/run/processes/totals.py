"""The numbers of all child processes together: sums over those that run and those that have ended.

A child reports its counts since its start. When it ends, its last report is kept, so that no counter goes down; counts
after that report are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.metrics.process_counts import ProcessCounts, add_counts, counts_after_end
from torchmoor.proxy.dispatch.dispatcher import Dispatcher
from torchmoor.proxy.instances.breaker import SEVERITIES, BreakerState
from torchmoor.proxy.instances.endpoint import Variant
from torchmoor.proxy.instances.instance import InstanceState
from torchmoor.proxy.instances.registry import Registry

Report = dict[str, Any]


class _ConnectionElsewhere:
    """Stands for a pooled connection of a child."""

    def close(self) -> None:
        """Do nothing: the child closes it."""


_ELSEWHERE = _ConnectionElsewhere()


class VariantTotal:
    """One variant's numbers over all children; a `VariantTraffic` of the metrics' collectors."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.metrics = InvocationMetrics(variant.endpoint, variant.name)
        self.num_waiting = 0
        self.waiting_turns: Counter[str] = Counter()


class Totals:
    """Adds up the reports of the children, by their indexes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.variants = [VariantTotal(variant) for endpoint in registry.endpoints() for variant in endpoint.variants]
        self.counts: ProcessCounts = {}
        self._running: dict[int, Report] = {}
        self._ended: list[Report] = []

    def take(self, index: int, report: Report) -> None:
        """Keep a child's newest report."""
        self._running[index] = report

    def end(self, index: int) -> None:
        """Add a child that has ended to the one report of all that have ended."""
        report = self._running.pop(index, None)
        if report is None:
            return
        self._ended.append(report)
        variants = [VariantTotal(each.variant) for each in self.variants]
        for old in self._ended:
            for total, given in zip(variants, old["variants"], strict=True):
                total.metrics.add(given["metrics"])
        counts = counts_after_end(add_counts(old["counts"] for old in self._ended))
        kept = [{"metrics": total.metrics.snapshot(), "num_waiting": 0, "turns": {}} for total in variants]
        self._ended = [{"variants": kept, "counts": counts, "instances": {}}]

    def is_in_use(self, name: str) -> bool:
        """Return False once every running child reports that it no longer uses the instance."""
        ready = InstanceState.READY.value
        reports = (report["instances"].get(name) for report in self._running.values())
        return any(found is None or found["outstanding"] or found["state"] == ready for found in reports)

    def compute(self) -> None:
        """Update all numbers and the registry's instances."""
        reports = [*self._ended, *self._running.values()]
        for number, total in enumerate(self.variants):
            total.metrics.reset()
            total.num_waiting = 0
            total.waiting_turns = Counter()
            for report in reports:
                given = report["variants"][number]
                total.metrics.add(given["metrics"])
                total.num_waiting += given["num_waiting"]
                total.waiting_turns.update(given["turns"])
        self.counts = add_counts(report["counts"] for report in reports)
        self.show_instances()

    def show_instances(self) -> None:
        """Update the registry's instances: the sum of outstanding requests, and the worst breaker and share."""
        reports = list(self._running.values())
        for instance in self._registry.instances():
            seen = [found for report in reports if (found := report["instances"].get(instance.name)) is not None]
            states = [SEVERITIES.index(BreakerState(found["breaker"])) for found in seen]
            instance.breaker.state = SEVERITIES[max(states, default=0)]
            instance.breaker.num_failures = max((found["num_failures"] for found in seen), default=0)
            instance.outstanding = sum(found["outstanding"] for found in seen)
            instance.inflight_body_bytes = sum(found["inflight_body_bytes"] for found in seen)
            instance.num_pieces = sum(found["num_pieces"] for found in seen)
            instance.share = min((found["share"] for found in seen), default=1.0)
            instance.idle = [_ELSEWHERE] * sum(found["idle"] for found in seen)


def make_report(registry: Registry, dispatchers: Iterable[Dispatcher], counts: ProcessCounts) -> Report:
    """Return a child's counts since its start, and its state of each instance."""
    return {
        "variants": [
            {
                "metrics": dispatcher.metrics.snapshot(),
                "num_waiting": dispatcher.num_waiting,
                "turns": dispatcher.waiting_turns,
            }
            for dispatcher in dispatchers
        ],
        "counts": counts,
        "instances": {
            instance.name: {
                "state": instance.state.value,
                "outstanding": instance.outstanding,
                "inflight_body_bytes": instance.inflight_body_bytes,
                "num_pieces": instance.num_pieces,
                "breaker": instance.breaker.state.value,
                "num_failures": instance.breaker.num_failures,
                "share": instance.share,
                "idle": len(instance.idle),
            }
            for instance in registry.instances()
        },
        "needs_status": [
            [variant.endpoint, variant.name]
            for endpoint in registry.endpoints()
            for variant in endpoint.variants
            if variant.needs_status
        ],
    }
