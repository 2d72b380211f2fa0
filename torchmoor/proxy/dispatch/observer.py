"""The observer of requests: implemented by the access log and traces, called by the request path."""

from __future__ import annotations

from typing import Protocol

from torchmoor.proxy.dispatch.record import RequestRecord
from torchmoor.proxy.http.message import Reply, Request

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"  # W3C Trace Context


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


class Observer(Protocol):
    """Observes every request. Its methods must not block or keep a reference to a request."""

    @property
    def is_tracing(self) -> bool:
        """True if `begin_trace` may return a trace."""
        ...

    def begin_trace(self, request: Request) -> Trace | None:
        """Begin to trace an invocation; None if it is not sampled."""
        ...

    def on_end(self, record: RequestRecord, trace: Trace | None) -> None:
        """Observe the end of an invocation."""
        ...

    def on_reply(self, request: Request, request_id: bytes, reply: Reply) -> None:
        """Observe a request that the proxy answers itself."""
        ...

    def reopen_log(self) -> None:
        """Open the access log, if there is one, again by its name."""
        ...
