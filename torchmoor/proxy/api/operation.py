"""One operation of an endpoint: its limits, and the header lines that all its requests share."""

from __future__ import annotations

from torchmoor.proxy.api.dialect import ApiDialect
from torchmoor.proxy.api.validation import TARGET_MODEL
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.call import Deadlines
from torchmoor.proxy.http.message import Request
from torchmoor.proxy.instances.registry import Endpoint
from torchmoor.wire import headers

_ENDPOINT_LINE = f"{headers.ENDPOINT}: ".encode()
_TIMEOUT_LINE = f"\r\n{headers.TIMEOUT_MS}: ".encode()


class Operation:
    """Holds what all requests for one operation of an endpoint share."""

    def __init__(
        self,
        dispatchers: Dispatchers,
        endpoint: Endpoint,
        dialect: ApiDialect,
        deadlines: Deadlines,
        max_body_bytes: int,
    ) -> None:
        self.dispatchers = dispatchers
        self.endpoint = endpoint
        self.dialect = dialect
        self.deadlines = deadlines
        self.max_body_bytes = max_body_bytes
        self.max_session_body_bytes = dispatchers.settings.limits.max_session_body_bytes
        self.endpoint_line = b"%b%b\r\n" % (_ENDPOINT_LINE, endpoint.name.encode())
        self.timeout_line = timeout_line(deadlines.total_s)


def timeout_line(time_left_s: float) -> bytes:
    """Tell an instance how long its answer is awaited; begins with the line end of the field before."""
    return b"%b%d\r\n" % (_TIMEOUT_LINE, max(0.0, time_left_s + headers.TIMEOUT_GRACE_S) * 1000)


def find_target_model(request: Request, endpoint: Endpoint) -> str | None:
    """Return the model that a request names, of an endpoint with many."""
    name = None if endpoint.settings.multi_model is None else request.find(TARGET_MODEL)
    return None if name is None else name.decode("latin-1")
