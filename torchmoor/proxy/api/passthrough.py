"""Dialects that send an instance's answers and errors to the client unchanged."""

from __future__ import annotations

from torchmoor.errors import ApiError, BodyTooLarge, ModelError, ValidationError
from torchmoor.proxy.api.deferred_reply import Begin, DeferredReply
from torchmoor.proxy.api.dialect import ApiDialect
from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.api.operation import Operation, find_target_model, stream_deadlines
from torchmoor.proxy.api.replies import container_error
from torchmoor.proxy.api.stream_continuer import CONTINUABLE
from torchmoor.proxy.api.validation import SESSION_ID, TARGET_VARIANT, check_members
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.answer import Answer
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.proxy.instances.registry import Endpoint
from torchmoor.wire import headers

_REQUEST_ID_LINE = f"{headers.REQUEST_ID}: ".encode()

MAX_OPERATION_BYTES = 65_536
GRACE_S = 2.0  # after an operation's own time-out, which is reported first
TIMEOUT_STATUS = 504
_DROPPED_FIELDS = frozenset((b"ts_stream_next", CONTINUABLE, headers.REQUEST_ID.encode()))


class PassThroughDialect(ApiDialect):
    """Answers are sent on unchanged. A stream that breaks off ends the client's connection."""

    operation_name = "PassThrough"

    def error(self, error: ApiError, request_id: bytes, endpoint: Endpoint) -> Reply:
        """Render an error in the handlers' form; a time-out is reported as the proxy's."""
        status = TIMEOUT_STATUS if isinstance(error, ModelError) else error.status
        return container_error(error, request_id, status=status)

    def answer(self, head: AnswerHead, request_id: bytes) -> Answer:
        lines = head.lines(_DROPPED_FIELDS)
        return Answer((head.line.client_line, lines, _REQUEST_ID_LINE, request_id, b"\r\n"))


def defer(
    dispatchers: Dispatchers, request: Request, request_id: bytes, begin: Begin, *, timeout_s: float
) -> DeferredReply:
    """Make the call of a container's own operation. timeout_s: of the operation."""
    too_large = ValidationError(f"The body may have up to {MAX_OPERATION_BYTES} bytes.", status=413)
    return DeferredReply(
        request,
        begin,
        render_error=lambda error: container_error(error, request_id),
        observe=lambda reply: dispatchers.observe_reply(request, request_id, reply),
        too_large=too_large,
        max_body_bytes=MAX_OPERATION_BYTES,
        timeout_s=timeout_s + GRACE_S,
    )


class PassThrough:
    """Makes the invocations of these dialects."""

    def __init__(self, dispatchers: Dispatchers) -> None:
        self._dispatchers = dispatchers
        settings = dispatchers.settings
        self._max_body_bytes = settings.limits.max_passthrough_body_bytes
        self._deadlines = stream_deadlines(settings.timeouts)
        self._operations = dispatchers.registry.map_served(
            lambda endpoint: self.make_operation(endpoint, PassThroughDialect())
        )

    def make_operation(self, endpoint: Endpoint, dialect: PassThroughDialect) -> Operation:
        """Make an operation of an endpoint with a dialect of its own."""
        return Operation(self._dispatchers, endpoint, dialect, self._deadlines, self._max_body_bytes)

    def invoke(
        self,
        request: Request,
        request_id: bytes,
        endpoint: Endpoint,
        *,
        path: bytes | None = None,
        variant: bytes | None = None,
        operation: Operation | None = None,
        model: str | None = None,
    ) -> Invocation | Reply:
        """Send the request to `path` of an instance of the endpoint, or to its model; sticky by the session header.

        operation, model: used in place of the endpoint's operation and of the header's model.
        """
        try:
            check_members(request.layout)
            session = self._dispatchers.sessions.get(endpoint, request.principal, request.find(SESSION_ID))
            dispatcher = self._dispatchers.choose(endpoint, session, variant or request.find(TARGET_VARIANT))
            if (request.content_length or 0) > self._max_body_bytes:
                raise BodyTooLarge(self._max_body_bytes)
        except ApiError as error:
            return container_error(error, request_id)
        return Invocation(
            operation or self._operations[endpoint],
            request,
            request_id=request_id,
            dispatcher=dispatcher,
            session=session,
            path=path,
            model=model or find_target_model(request, endpoint),
        )
