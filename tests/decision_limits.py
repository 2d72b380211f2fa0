"""Excludes usual requests from the recorded decisions, so that they can take the proxy's fast path."""

from torchmoor.config.observe import ObserveSettings
from torchmoor.proxy.dispatch.recent_decisions import RecentDecisions
from torchmoor.proxy.dispatch.record import RequestRecord

NEVER = 1e9  # in monotonic seconds


def leave_out_usual(decisions: RecentDecisions, settings: ObserveSettings) -> None:
    """Begin a second that does not end and has already had the maximum of recorded decisions."""
    for _ in range(settings.max_decisions_per_s):
        decisions.note(RequestRecord("", "", "", "", 0.0), NEVER)
