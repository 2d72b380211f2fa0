"""Dialects in which the instance's own words reach the client: answers and errors pass as they are."""

from __future__ import annotations

from torchmoor.errors import ApiError, ModelError
from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.api.operation import Operation, body_too_large
from torchmoor.proxy.api.replies import container_error
from torchmoor.proxy.api.target_model import ForTargetModel, is_for_target_model
from torchmoor.proxy.api.validation import SESSION_ID, TARGET_VARIANT, check_members
from torchmoor.proxy.dispatch.gateway import Gateway
from torchmoor.proxy.http.answer import Answer
from torchmoor.proxy.http.call import Deadlines
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.proxy.instances.registry import Endpoint
from torchmoor.wire import headers

_REQUEST_ID_LINE = f"{headers.REQUEST_ID}: ".encode()

TIMEOUT_STATUS = 504
TOO_LARGE_STATUS = 413
_UNTOLD = frozenset((b"ts_stream_next",))


class PassThroughInvocation(Invocation):
    """A request whose answer is not rewritten. A stream that breaks off ends the client's connection."""

    operation_name = "PassThrough"

    def error(self, error: ApiError) -> Reply:
        """The handlers' error form; a time-out is the gateway's, not the model's."""
        status = TIMEOUT_STATUS if isinstance(error, ModelError) else error.status
        self.status = status
        return container_error(error, self.request_id, status=status)

    def on_body_too_large(self) -> Reply:
        """HTTP's own status for it."""
        reply = container_error(body_too_large(self.max_body_bytes), self.request_id, status=TOO_LARGE_STATUS)
        self.status = reply.status
        return reply

    def answer(self, head: AnswerHead) -> Answer:
        """Every status passes."""
        assert self.choice is not None
        choice_lines = self.choice.answer_lines
        return Answer((head.line.told, head.lines(_UNTOLD), _REQUEST_ID_LINE, self.request_id, choice_lines))


class ModelPassThroughInvocation(ForTargetModel, PassThroughInvocation):
    """The same for one of many models."""


class PassThrough:
    """Makes the invocations of the dialects that pass through."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        settings = gateway.settings
        timeouts = settings.timeouts
        self._max_body_bytes = settings.limits.max_passthrough_body_bytes
        deadlines = Deadlines(timeouts.model_timeout_s, timeouts.stream_total_timeout_s, timeouts.stream_idle_timeout_s)
        self._operations = {
            endpoint.name: Operation(gateway, endpoint, deadlines, self._max_body_bytes)
            for endpoint in gateway.registry.endpoints()
        }

    def invoke(
        self,
        request: Request,
        request_id: bytes,
        endpoint: Endpoint,
        *,
        path: bytes | None = None,
        variant: bytes | None = None,
        kind: type[PassThroughInvocation] | None = None,
    ) -> PassThroughInvocation | Reply:
        """Send the request to `path` of an instance of the endpoint, or to its model; sticky by the session header.

        kind: what to make of it; None for what its header fields say.
        """
        try:
            check_members(request.layout)
            session = self._gateway.get_session(endpoint, request.principal, request.find(SESSION_ID))
            dispatcher = self._gateway.dispatcher_for(endpoint, session, variant or request.find(TARGET_VARIANT))
            if (request.content_length or 0) > self._max_body_bytes:
                return container_error(body_too_large(self._max_body_bytes), request_id, status=TOO_LARGE_STATUS)
        except ApiError as error:
            return container_error(error, request_id)
        if kind is None:
            is_for_model = is_for_target_model(request, endpoint)
            kind = ModelPassThroughInvocation if is_for_model else PassThroughInvocation
        return kind(
            self._operations[endpoint.name],
            request,
            request_id=request_id,
            dispatcher=dispatcher,
            session=session,
            path=path,
        )
