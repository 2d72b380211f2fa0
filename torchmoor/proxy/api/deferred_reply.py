"""A reply of the proxy that needs the request's whole body, or is ready only when an operation has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from torchmoor.errors import ApiError, InternalFailure, ServiceUnavailable, ValidationError
from torchmoor.proxy.api.replies import container_error
from torchmoor.proxy.dispatch import unavailable
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.call import WAIT, WHOLE_BODY, Deadlines, NextStep, Outcome, Waiter
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.tasks import BackgroundTasks

logger = logging.getLogger(__name__)

MAX_OPERATION_BYTES = 65_536
GRACE_S = 2.0  # after an operation's own time-out, which is reported first


class DeferredReply:
    """A Call (see torchmoor.proxy.http.call) that goes to no instance. The body of a signed request is verified first.

    The operation continues if the client leaves. late: the message after its time-out.
    """

    late = "The instance has not answered in time."

    def __init__(
        self,
        dispatchers: Dispatchers,
        request: Request,
        request_id: bytes,
        begin: Begin,
        render_error: Callable[[ApiError, bytes], Reply],
        *,
        too_large: ValidationError,
        max_body_bytes: int,
        timeout_s: float = 60.0,
    ) -> None:
        """render_error: given the request's id, too. too_large: the error for a body above max_body_bytes.

        timeout_s: longer than the operation's own time-out, which is reported first.
        """
        self.max_body_bytes = max_body_bytes
        self.deadlines = Deadlines(timeout_s, timeout_s)
        self.wait_ends_at = 0.0  # set when the operation begins
        self._dispatchers = dispatchers
        self._request = request
        self._request_id = request_id
        self._begin = begin
        self._render_error = render_error
        self._too_large = too_large
        self.source = ""  # the client's address, once the operation begins
        self._waiter: Waiter | None = None
        self._reply: Reply | None = None

    num_read_bytes = WHOLE_BODY

    def route(self, body: bytes, waiter: Waiter) -> NextStep:
        """Verify the body and begin the operation."""
        self.source = waiter.source
        self.wait_ends_at = waiter.complete_at + self.deadlines.total_s
        try:
            if self._request.body_check is not None:
                self._request.body_check.verify(body)
            self._begin(self, body)
        except ApiError as error:
            return self._refuse(error)
        if self._reply is not None:
            return self._deliver(self._reply)
        self._waiter = waiter
        return WAIT

    def end(self, reply: Reply) -> None:
        self._reply = reply
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.resume(self._deliver(reply))

    def fail(self, error: ApiError) -> None:
        self.end(self._render_error(error, self._request_id))

    async def end_with(self, work: Coroutine[Any, Any, Reply]) -> None:
        """End with the reply that the work returns, or with the error that it raises."""
        try:
            self.end(await work)
        except ApiError as error:
            self.fail(error)
        except BaseException as error:
            request_id = self._request_id.decode()
            self.fail(InternalFailure(f"The proxy failed. Request id {request_id}."))
            if not isinstance(error, Exception):  # it was cancelled
                raise
            logger.exception("fault request_id=%s", request_id)

    def on_wait_over(self) -> Reply:
        """Answer the client although the operation has not ended: its own time-out failed."""
        self._waiter = None
        return self._refuse(ServiceUnavailable(self.late))

    def on_body_too_large(self) -> Reply:
        return self._refuse(self._too_large)

    def on_body_dropped(self) -> Reply:
        return self._refuse(ServiceUnavailable(unavailable.TOO_MANY_BODIES))

    def limit_body(self, waiter: Waiter) -> None:
        """Do nothing: no instance will hold the body."""

    def _refuse(self, error: ApiError) -> Reply:
        return self._deliver(self._render_error(error, self._request_id))

    def _deliver(self, reply: Reply) -> Reply:
        """Observe the reply; the client gets it without a body if it sent HEAD."""
        self._dispatchers.observe_reply(self._request, self._request_id, reply)
        return Reply(reply.status, reply.headers) if self._request.method == b"HEAD" else reply

    def finish(self, outcome: Outcome) -> None:
        """Forget the client."""
        self._waiter = None


Begin = Callable[[DeferredReply, bytes], None]
"""Ends a deferred reply, or starts the operation that will; given the request's body; may raise ApiError."""


def in_task(tasks: BackgroundTasks, work: Callable[[bytes], Coroutine[Any, Any, Reply]], when_full: str) -> Begin:
    """Return what runs the work in one of the tasks. work: takes the request's body; returns the reply, or raises.

    when_full: the message of the 503 if as many are running as may run.
    """

    def begin(deferred: DeferredReply, body: bytes) -> None:
        if tasks.is_full:
            raise ServiceUnavailable(when_full)
        tasks.start(deferred.end_with(work(body)))

    return begin


def defer_operation(
    dispatchers: Dispatchers, request: Request, request_id: bytes, begin: Begin, *, timeout_s: float
) -> DeferredReply:
    """Make the call of a container's own operation. timeout_s: the operation's own."""
    too_large = ValidationError(f"The body may have up to {MAX_OPERATION_BYTES} bytes.", status=413)
    return DeferredReply(
        dispatchers,
        request,
        request_id,
        begin,
        container_error,
        too_large=too_large,
        max_body_bytes=MAX_OPERATION_BYTES,
        timeout_s=timeout_s + GRACE_S,
    )
