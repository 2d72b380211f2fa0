"""POST / with X-Amz-Target: operations of AWS's control plane on the data plane's port; torchmoor.control answers.

The protocol smithy-rpc-v2-cbor has the target in the path, and a header Smithy-Protocol.

These operations can run code, so pages of other origins must not reach them, not even those of listen.allowed_origins:
every request of such a page is refused.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from torchmoor.errors import AccessDenied, ApiError, BodyTooLarge, ServiceUnavailable, ValidationError
from torchmoor.proxy.access.exposure import is_loopback
from torchmoor.proxy.access.web_pages import WebPageGuard
from torchmoor.proxy.api.deferred_reply import DeferredReply, in_task
from torchmoor.proxy.api.other_services import refuse_unknown
from torchmoor.proxy.api.replies import Handler, runtime_error
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.call import Call
from torchmoor.proxy.http.field_names import AWS_REQUEST_ID
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.tasks import BackgroundTasks

PATH = b"/"
TARGET = b"x-amz-target"
PROTOCOL, CBOR = b"smithy-protocol", b"rpc-v2-cbor"
_RPC = re.compile(r"/service/(\w+)/operation/(\w+)", re.ASCII)
TIMEOUT_S = 60.0
TOO_MANY = "Too many requests for the control plane are running. Try again later."


class ControlRequest(NamedTuple):
    """A request for the control plane. target: as X-Amz-Target, such as SageMaker.CreateModel. is_cbor: not JSON."""

    target: str
    body: bytes
    is_cbor: bool = False


AnswerControl = Callable[[ControlRequest], Awaitable[Reply]]
"""Answers a request for the control plane. Raises nothing."""


def target_of(path: str) -> str | None:
    """Return the target that a path of the protocol smithy-rpc-v2-cbor names."""
    match = _RPC.fullmatch(path)
    return None if match is None else f"{match[1]}.{match[2]}"


class ControlReply(DeferredReply):
    """Is ready when the control plane has answered."""

    late = "The control plane has not answered in time."


class ControlApi:
    """Passes requests to the control plane, if their listener may serve it."""

    def __init__(
        self,
        dispatchers: Dispatchers,
        answer: AnswerControl,
        pages: WebPageGuard,
        otherwise: Handler,
        *,
        is_guarded: bool,
    ) -> None:
        """otherwise: handles a POST to / without X-Amz-Target. is_guarded: whether callers need credentials."""
        self._pages = pages
        self._dispatchers = dispatchers
        self._answer = answer
        self._otherwise = otherwise
        self._is_guarded = is_guarded
        self._settings = dispatchers.settings.control
        self._host = dispatchers.settings.listen.host
        self._running = BackgroundTasks(self._settings.max_requests)

    def find_handler(self, method: bytes, path: bytes) -> Handler | None:
        is_known = method == b"POST" and (path == PATH or path.startswith(b"/service/"))
        return self._handle if is_known else None

    def _handle(self, request: Request, request_id: bytes) -> Call | Reply:
        """Make the call for a request."""
        try:
            is_cbor = request.find(PROTOCOL) == CBOR
            if is_cbor:
                target = target_of(request.path.decode("latin-1"))
            else:
                target = None if request.path != PATH else (request.find(TARGET) or b"").decode("latin-1")
            if not target:
                handle = self._otherwise if request.path == PATH and not is_cbor else refuse_unknown
                return handle(request, request_id)
            self._check_source(request)
            if self._running.is_full:  # checked again when the body has arrived
                raise ServiceUnavailable(TOO_MANY)
        except ApiError as error:
            return runtime_error(error, request_id)

        async def answer(body: bytes) -> Reply:
            reply = await self._answer(ControlRequest(target, body, is_cbor))
            return Reply(reply.status, (*reply.headers, (AWS_REQUEST_ID, request_id)), reply.body)

        max_body_bytes = self._settings.max_body_bytes
        return ControlReply(
            self._dispatchers,
            request,
            request_id,
            in_task(self._running, answer, TOO_MANY),
            runtime_error,
            too_large=ValidationError(BodyTooLarge(max_body_bytes).message),
            max_body_bytes=max_body_bytes,
            timeout_s=TIMEOUT_S,
        )

    def _check_source(self, request: Request) -> None:
        """Raise AccessDenied if a page of another site may have sent it, or if an open address has no credentials."""
        self._pages.check_origin(request)
        if not (self._is_guarded or is_loopback(self._host)):
            raise AccessDenied(f"The control plane on {self._host} needs access keys: see docs/access.md.")
