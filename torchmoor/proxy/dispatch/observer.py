"""The observer of requests, which the access log and traces implement, and what an invocation measures for it."""

from __future__ import annotations

import logging
from typing import Protocol

from torchmoor.proxy.dispatch.record import RequestRecord
from torchmoor.proxy.http.answer import Answer, WatchedAnswer
from torchmoor.proxy.http.message import Reply, Request

logger = logging.getLogger(__name__)

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"  # W3C Trace Context

NO_FIELDS: frozenset[bytes] = frozenset()


class Trace(Protocol):
    """A request's place in a trace."""

    @property
    def line(self) -> bytes:
        """Return the header line that replaces the client's own on the way to the instance."""
        ...

    @property
    def replaced(self) -> frozenset[bytes]:
        """Return the names of the client's fields that do not reach the instance."""
        ...

    def end(self, record: RequestRecord) -> None:
        """End the trace with the request's result, and add its id to the record."""
        ...


class Observer(Protocol):
    """Observes every request. Its methods must not block or keep a reference to a request."""

    @property
    def is_tracing(self) -> bool:
        """True if `begin_trace` may return a trace."""
        ...

    def begin_trace(self, request: Request) -> Trace | None:
        """Begin to trace an invocation; None if it is not sampled."""
        ...

    def on_end(self, record: RequestRecord) -> None:
        """Observe the end of an invocation."""
        ...

    def on_reply(self, request: Request, request_id: bytes, reply: Reply) -> None:
        """Observe a request that the proxy answers itself."""
        ...

    def reopen_log(self) -> None:
        """Open the access log, if there is one, again by its name."""
        ...


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
        """Add the measurements to the record, and give it to the trace and the observer.

        A failure is logged, not raised: the request must still release its lease.
        """
        try:
            if self._answer is not None:
                record.num_bytes_out += self._answer.num_bytes
                if self._answer.began_at:
                    record.first_byte_s = self._answer.began_at - self._request.received_at
            if self._trace is not None:
                self._trace.end(record)
            self._observer.on_end(record)
        except Exception:
            logger.exception("request not recorded request_id=%s", record.request_id)
