"""A request that is answered when an operation at an instance is done, and goes to no instance itself."""

from __future__ import annotations

from collections.abc import Callable

from torchmoor.errors import ApiError, ServiceUnavailable, ValidationError
from torchmoor.proxy.api.replies import container_error
from torchmoor.proxy.http.call import WAIT, WHOLE_BODY, Deadlines, Outcome, Placement, Waiter
from torchmoor.proxy.http.message import Reply, Request

MAX_BODY_BYTES = 65_536
GRACE_S = 2.0  # after the operation's own time-out, which is the one that shall be told


class DeferredReply:
    """A Call (see torchmoor.proxy.http.call) that is answered when an operation at an instance is done.

    The operation goes on if the client leaves: what it does is done all the same.
    """

    __slots__ = (
        "max_body_bytes",
        "body_need",
        "deadlines",
        "wait_ends_at",
        "_request",
        "_request_id",
        "_begin",
        "_tell",
        "_waiter",
        "_reply",
    )

    def __init__(
        self,
        request: Request,
        request_id: bytes,
        begin: Begin,
        *,
        timeout_s: float,
        tell: Callable[[Request, bytes, Reply], None],
    ) -> None:
        """begin: is given the body, and calls `end`, now or later; it may raise ApiError instead.

        timeout_s: of the operation. tell: called with what was answered, if anything was.
        """
        wait_s = timeout_s + GRACE_S
        self.max_body_bytes = MAX_BODY_BYTES
        self.body_need = WHOLE_BODY
        self.deadlines = Deadlines(wait_s, wait_s)
        self.wait_ends_at = request.received_at + wait_s
        self._request = request
        self._request_id = request_id
        self._begin = begin
        self._tell = tell
        self._waiter: Waiter | None = None
        self._reply: Reply | None = None

    def route(self, body: bytes, waiter: Waiter) -> Placement:
        """Begin, once the whole body is here and is what was signed, if it was."""
        try:
            if self._request.body_check is not None:
                self._request.body_check.verify(body)
            self._begin(self, body)
        except ApiError as error:
            return self._told(container_error(error, self._request_id))
        if self._reply is not None:
            return self._told(self._reply)
        self._waiter = waiter
        return WAIT

    def end(self, reply: Reply) -> None:
        """The operation is done."""
        self._reply = reply
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.resume(self._told(reply))

    def fail(self, error: ApiError) -> None:
        """The operation cannot be done."""
        self.end(container_error(error, self._request_id))

    def on_wait_over(self) -> Reply:
        """The operation's own time-out should have come first."""
        self._waiter = None
        late = ServiceUnavailable("The instance has not answered in time.")
        return self._told(container_error(late, self._request_id))

    def on_body_too_large(self) -> Reply:
        """HTTP's own status for it."""
        message = f"The body may have up to {MAX_BODY_BYTES} bytes."
        return self._told(container_error(ValidationError(message), self._request_id, status=413))

    def _told(self, reply: Reply) -> Reply:
        self._tell(self._request, self._request_id, reply)
        return reply

    def finish(self, outcome: Outcome) -> None:
        """Nobody waits any more."""
        self._waiter = None
        if self._request.body_check is not None:
            self._request.body_check.release()


Begin = Callable[[DeferredReply, bytes], None]
"""Begins the operation of a deferred reply, given the request's body; may raise ApiError."""
