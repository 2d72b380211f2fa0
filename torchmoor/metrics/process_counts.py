"""The numbers of a proxy process that belong to no variant. A row adds a metric; `counts` of DataPlane sets its value.

The numbers of several processes are added up here, so those of one go the same way as those of all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from torchmoor.metrics.definition import GAUGE, counter, gauge

PROCESS = (
    counter("AccessDenied", "Requests refused for their credentials.", labels=("error",)),
    counter(
        "CallerLimited",
        "Requests refused because their caller is at a limit of `callers`, or their client at one of `limits`: it "
        "sends too many or too slow bodies (max_arriving_bytes), or a long one fills the disk (min_spool_free_bytes) "
        "or the open files (reserved_descriptors).",
        labels=("setting",),
    ),
    gauge("WebSocketConnections", "Open WebSocket connections of the Responses API.", ()),
    counter("AccessLogLines", "Lines of the access log.", labels=()),
    counter("AccessLogDropped", "Lines lost because the log could not be written fast enough.", labels=()),
)
_GAUGES = frozenset(each.name for each in PROCESS if each.type is GAUGE)

ProcessCounts = dict[str, dict[str, int]]
"""By the metric's name, then by its label's value; "" for a metric without a label."""


def add_counts(counts: Iterable[ProcessCounts]) -> ProcessCounts:
    """Return the sums over processes."""
    total: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in counts:
        for name, values in each.items():
            total[name].update(values)
    return {name: dict(sums) for name, sums in total.items()}


def counts_after_end(counts: ProcessCounts) -> ProcessCounts:
    """Return what counts of processes that have ended: their counters, but not what they had open."""
    return {name: dict.fromkeys(values, 0) if name in _GAUGES else values for name, values in counts.items()}
