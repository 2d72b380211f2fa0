"""The last routing decisions, for operators: where requests went, why, and with what result.

They are always recorded, because operators look after an incident. To cover minutes even under load, only a limited
number per second is kept, and as many again of requests that failed or were retried.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from torchmoor.errors import ValidationError
from torchmoor.proxy.dispatch.record import RequestRecord, describe_record
from torchmoor.proxy.http.call import Outcome

DEFAULT_SHOWN = 200
MAX_SHOWN = 1000
ANY_ERROR = "any"
_ANSWERED = Outcome.ANSWERED.value


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionQuery:
    """A selection of decisions. The fields are the parameters of GET /decisions.

    error: a code that the client received or the handler gave; ANY_ERROR: any. session: the beginning of its hash.
    since: only those that ended later, in seconds since 1970.
    """

    endpoint: str | None = None
    variant: str | None = None
    instance: str | None = None
    request: str | None = None
    error: str | None = None
    session: str | None = None
    since: float = 0.0
    limit: int = DEFAULT_SHOWN

    @classmethod
    def from_text(cls, values: Mapping[str, str], limit: int) -> DecisionQuery:
        """Read the fields except limit from the parameters of a URL; others are ignored. Raises ValidationError."""
        texts = {each.name: values[each.name] for each in fields(cls) if each.default is None and each.name in values}
        try:
            since = float(values.get("since", "0"))
        except ValueError:
            since = math.nan
        if not math.isfinite(since):
            raise ValidationError("since must be a time in seconds since 1970.")
        return cls(**texts, since=since, limit=limit)

    def matches(self, record: RequestRecord) -> bool:
        """Return whether the selection includes a record, by everything but its time."""
        return (
            self.endpoint in (None, record.endpoint)
            and self.variant in (None, record.variant)
            and self.instance in (None, record.instance)
            and self.request in (None, record.request_id)
            and (self.session is None or (record.session or "").startswith(self.session))
            and (self.error is None or self.error in _errors_of(record))
        )


class RecentDecisions:
    """Keeps the decisions of one process. num_left_out: requests beyond the limit per second."""

    def __init__(self, max_kept: int, max_per_s: int) -> None:
        self.num_left_out = 0
        self._kept: deque[RequestRecord] = deque(maxlen=max_kept)
        self._max_per_s = max_per_s
        self._num_left = 0
        self._second_ends = self._full_until = 0.0  # in monotonic seconds

    def try_leave_out(self, now: float) -> bool:
        """Count a usual request as left out, if its second has had too many. now: in monotonic seconds."""
        if now < self._full_until:
            self.num_left_out += 1
            return True
        return False

    def note(self, record: RequestRecord, now: float) -> bool:
        """Keep a finished request, unless its second has had too many. Returns whether it is kept.

        now: in monotonic seconds.
        """
        is_usual = record.outcome == _ANSWERED and (record.status or 0) < 400 and not record.num_retries
        if is_usual and self.try_leave_out(now):
            return False
        if now < self._full_until:
            if not self._num_left:
                self.num_left_out += 1
                return False
        elif now >= self._second_ends:
            self._second_ends = now + 1.0
            self._num_left = self._max_per_s
        self._num_left -= 1
        if not self._num_left and self._full_until < now:  # failures and retries have as many places again
            self._full_until = self._second_ends
            self._num_left = self._max_per_s
        self._kept.append(record)
        return True

    def describe(self, query: DecisionQuery) -> dict[str, Any]:
        """Return the answer to GET /decisions, the newest first."""
        rows = [describe_record(record) for record in islice(self._find(query), query.limit)]
        oldest = self._kept[0].ended_at if self._kept else None
        return {"decisions": rows, "left_out": self.num_left_out, "oldest": oldest}

    def _find(self, query: DecisionQuery) -> Iterator[RequestRecord]:
        for record in reversed(self._kept):
            if record.ended_at <= query.since:
                return
            if query.matches(record):
                yield record


def _errors_of(record: RequestRecord) -> tuple[str | None, ...]:
    has_failed = record.error_type or record.outcome != _ANSWERED or (record.status or 0) >= 400
    return (ANY_ERROR, record.error_type, record.model_error) if has_failed else ()


def join_decisions(answers: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Join the answers of several processes. oldest: the earliest time of any process."""
    rows = sorted((row for each in answers for row in each["decisions"]), key=lambda row: -row["time"])
    begun = [each["oldest"] for each in answers if each["oldest"] is not None]
    left_out = sum(each["left_out"] for each in answers)
    return {"decisions": rows[:limit], "left_out": left_out, "oldest": min(begun, default=None)}
