"""One operation of an endpoint: its limits, and the header lines that all its requests share."""

from __future__ import annotations

from collections.abc import Mapping

from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.api.dialect import ApiDialect
from torchmoor.proxy.dispatch.chooser import Choice
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.call import Deadlines
from torchmoor.proxy.http.field_names import INFERENCE_ID, INVOCATION_ID
from torchmoor.proxy.http.message import Request
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.wire import headers

_IDS_START = f"{headers.ENDPOINT}: %b\r\n{headers.REQUEST_ID}: ".encode()
_INFERENCE_ID_LINE = f"\r\n{headers.INFERENCE_ID}: ".encode()
_INVOCATION_ID_LINE = f"{headers.INVOCATION_ID}: ".encode()
_PRINCIPAL_LINE = f"{headers.PRINCIPAL}: %b\r\n".encode()
_TIMEOUT_LINE = f"\r\n{headers.TIMEOUT_MS}: ".encode()


class Operation:
    """The limits and header lines of one operation of one endpoint."""

    def __init__(self, dispatchers: Dispatchers, endpoint: Endpoint, dialect: ApiDialect) -> None:
        settings = dispatchers.settings
        self.dispatchers = dispatchers
        self.endpoint = endpoint
        self.dialect = dialect
        self.deadlines = (stream_deadlines if dialect.has_stream_deadlines else whole_deadlines)(settings.timeouts)
        self.max_body_bytes = dialect.max_body_bytes(settings.limits)
        self.timeout_line = timeout_line(self.deadlines.total_s)
        self._ids_start = _IDS_START % endpoint.name.encode()

    def begin_head(
        self,
        request: Request,
        request_id: bytes,
        choice: Choice,
        path: bytes,
        *,
        framing: bytes,
        held_back: frozenset[bytes],
        timeout_line: bytes,
    ) -> list[bytes]:
        """Render the beginning of a request's head for an instance; the caller adds its other lines and the end.

        framing: the lines that frame the body. held_back: names of fields that are not forwarded.
        """
        places = request.layout.places
        parts = [
            self.dialect.sent_method or request.method,
            b" ",
            path,
            choice.request_line,
            framing,
            request.lines(held_back),
            self._ids_start,
            request_id,
            _INFERENCE_ID_LINE,
            (request.find(INFERENCE_ID) or request_id) if INFERENCE_ID in places else request_id,
            timeout_line,
        ]
        if INVOCATION_ID not in places:
            parts += (_INVOCATION_ID_LINE, request_id, b"\r\n")
        if request.principal:
            parts.append(_PRINCIPAL_LINE % request.principal.encode())
        return parts


def map_operations(dispatchers: Dispatchers, dialect: ApiDialect) -> Mapping[Endpoint, Operation]:
    """Return the dialect's operation of each endpoint that is served, now and later."""
    return dispatchers.registry.map_served(lambda endpoint: Operation(dispatchers, endpoint, dialect))


def whole_deadlines(timeouts: TimeoutSettings) -> Deadlines:
    """Return the limits of an answer that is not streamed."""
    return Deadlines(timeouts.model_timeout_s, timeouts.model_timeout_s)


def stream_deadlines(timeouts: TimeoutSettings) -> Deadlines:
    """Return the limits of an answer that may be a stream."""
    return Deadlines(timeouts.model_timeout_s, timeouts.stream_total_timeout_s, timeouts.stream_idle_timeout_s)


def timeout_line(time_left_s: float) -> bytes:
    """Return the header line with the answer's time-out; it begins with the line end of the field before."""
    return b"%b%d\r\n" % (_TIMEOUT_LINE, max(0.0, time_left_s + headers.TIMEOUT_GRACE_S) * 1000)


def placed_name(name: str, endpoint: Endpoint) -> str | None:
    """Return the name by which a target model is placed; None for the model of an endpoint with adapters."""
    return None if endpoint.settings.has_adapters and name == endpoint.name else name
