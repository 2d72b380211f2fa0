"""An invocation's trace and the measurements of its answer, which its record gets at the end."""

from __future__ import annotations

import logging

from torchmoor.proxy.dispatch.observer import Observer
from torchmoor.proxy.dispatch.record import RequestRecord
from torchmoor.proxy.http.answer import Answer, WatchedAnswer
from torchmoor.proxy.http.message import Request

NO_FIELDS: frozenset[bytes] = frozenset()

logger = logging.getLogger(__name__)


class Observation:
    """The trace and measurements of one running invocation; made only if there is an observer."""

    def __init__(self, observer: Observer, request: Request) -> None:
        self._observer = observer
        self._request = request
        self._trace = observer.begin_trace(request)
        self._answer: WatchedAnswer | None = None

    @property
    def trace_line(self) -> bytes:
        """The header line that replaces the client's traceparent; b"" if the request is not traced."""
        return b"" if self._trace is None else self._trace.line

    @property
    def replaced_fields(self) -> frozenset[bytes]:
        """The names of the client's fields that do not reach the instance, because the request has its own trace."""
        return NO_FIELDS if self._trace is None else self._trace.replaced

    def watch(self, answer: Answer) -> Answer:
        """Measure an answer while it is sent to the client."""
        self._answer = WatchedAnswer(answer)
        return self._answer

    def end(self, record: RequestRecord) -> None:
        """Add the measurements to the record, and give it to the observer.

        A failure is logged, not raised: the request must still release its lease.
        """
        try:
            if self._answer is not None:
                record.num_bytes_out += self._answer.num_bytes
                if self._answer.began_at:
                    record.first_byte_s = self._answer.began_at - self._request.received_at
            self._observer.on_end(record, self._trace)
        except Exception:
            logger.exception("request not recorded request_id=%s", record.request_id)
