"""The last routing decisions, for operators: where requests went, why, and what came of it.

Kept whether somebody looks or not, since who looks wants to know what has been. So that they are minutes even under
load, only so many a second are kept, and as many again of those that went wrong or were sent twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.proxy.http.call import Outcome
from torchmoor.wire.session_hash import session_hash

if TYPE_CHECKING:
    from torchmoor.proxy.api.invocation import Invocation
    from torchmoor.proxy.dispatch.choice import Choice
    from torchmoor.wire.session_ids import SessionId

DEFAULT_SHOWN = 200
MAX_SHOWN = 1000
_ANSWERED = Outcome.ANSWERED


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionQuery:
    """Which are wanted. since: only those that ended later, in seconds since 1970."""

    endpoint: str | None = None
    instance: str | None = None
    since: float = 0.0
    limit: int = DEFAULT_SHOWN

    def as_message(self) -> dict[str, Any]:
        """In a form for JSON."""
        return asdict(self)


class _Decision(NamedTuple):
    """One request. ended_at, began_at: in monotonic seconds."""

    ended_at: float
    began_at: float
    request_id: bytes
    operation: str
    metrics: InvocationMetrics
    choice: Choice | None
    session: SessionId | None
    outcome: Outcome
    status: int
    error: str
    waited_s: float
    num_retries: int


class Decisions:
    """Those of one process. num_left_out: requests that came too many in a second to be kept."""

    def __init__(self, max_kept: int, max_per_s: int) -> None:
        self.num_left_out = 0
        self._kept: deque[_Decision] = deque(maxlen=max_kept)
        self._max_per_s = max_per_s
        self._num_left = 0
        self._second_ends = self._full_until = 0.0  # in monotonic seconds

    def note(self, invocation: Invocation, outcome: Outcome, now: float) -> None:
        """A request is over. now: in monotonic seconds."""
        if now < self._full_until:
            is_usual = outcome is _ANSWERED and invocation.status < 400 and not invocation.num_retries
            if is_usual or not self._num_left:
                self.num_left_out += 1
                return
        elif now >= self._second_ends:
            self._second_ends = now + 1.0
            self._num_left = self._max_per_s
        self._num_left -= 1
        if not self._num_left and self._full_until < now:  # what goes wrong has as many places again
            self._full_until = self._second_ends
            self._num_left = self._max_per_s
        self._kept.append(
            _Decision(
                now,
                invocation.request.received_at,
                invocation.request_id,
                invocation.operation_name,
                invocation.metrics,
                invocation.choice,
                invocation.session,
                outcome,
                invocation.status,
                invocation.error_kind,
                invocation.waited_s,
                invocation.num_retries,
            )
        )

    def describe(self, query: DecisionQuery) -> dict[str, Any]:
        """As GET /decisions tells them, the newest first."""
        offset = time.time() - monotonic()
        rows: list[dict[str, Any]] = []
        for decision in self._find(query, offset):
            rows.append(_describe(decision, offset))
            if len(rows) == query.limit:
                break
        oldest = self._kept[0].ended_at + offset if self._kept else None
        return {"decisions": rows, "left_out": self.num_left_out, "oldest": oldest}

    def _find(self, query: DecisionQuery, offset: float) -> Iterator[_Decision]:
        for decision in reversed(self._kept):
            if decision.ended_at + offset <= query.since:
                return
            name = None if decision.choice is None else decision.choice.instance.name
            if query.endpoint in (None, decision.metrics.endpoint) and query.instance in (None, name):
                yield decision


def _describe(decision: _Decision, offset: float) -> dict[str, Any]:
    choice, session = decision.choice, decision.session
    return {
        "time": round(decision.ended_at + offset, 3),
        "request_id": decision.request_id.decode(),
        "operation": decision.operation,
        "endpoint": decision.metrics.endpoint,
        "variant": decision.metrics.variant,
        "instance": None if choice is None else choice.instance.name,
        "reason": None if choice is None else choice.reason,
        "session": None if session is None else session_hash(session.text),
        "outcome": decision.outcome.value,
        "status": decision.status or None,
        "error": decision.error or None,
        "ms": round((decision.ended_at - decision.began_at) * 1000, 3),
        "waited_ms": round(decision.waited_s * 1000, 3),
        "retries": decision.num_retries,
    }


def join_decisions(told: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Those of several processes as one's. oldest: of the one that goes back farthest; others may have begun later."""
    rows = sorted((row for each in told for row in each["decisions"]), key=lambda row: -row["time"])
    begun = [each["oldest"] for each in told if each["oldest"] is not None]
    left_out = sum(each["left_out"] for each in told)
    return {"decisions": rows[:limit], "left_out": left_out, "oldest": min(begun, default=None)}
