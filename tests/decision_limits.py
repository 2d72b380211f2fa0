"""Leaves usual requests out of the recorded decisions, so that they can end on the proxy's fast path."""

from __future__ import annotations

from torchmoor.config.observe import ObserveSettings
from torchmoor.proxy.dispatch.decisions import Decisions
from torchmoor.proxy.dispatch.record import RequestRecord

NEVER = 1e9  # in monotonic seconds


def leave_out_usual(decisions: Decisions, settings: ObserveSettings) -> None:
    """Begin a second that does not end, and that has had as many decisions as are kept of one."""
    for _ in range(settings.max_decisions_per_s):
        decisions.note(RequestRecord("", "", "", "", 0.0), NEVER)
