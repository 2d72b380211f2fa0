"""A reply that is sent when an operation of the proxy has ended; the request itself goes to no instance."""

from __future__ import annotations

from collections.abc import Callable

from torchmoor.errors import ApiError, ServiceUnavailable, ValidationError
from torchmoor.proxy.api.replies import container_error
from torchmoor.proxy.http.call import WAIT, WHOLE_BODY, Deadlines, Outcome, Placement, Waiter
from torchmoor.proxy.http.message import Reply, Request

MAX_BODY_BYTES = 65_536
GRACE_S = 2.0  # after the operation's own time-out, which is reported first


class DeferredReply:
    """A Call (see torchmoor.proxy.http.call) that is answered when an operation has ended.

    The operation continues if the client leaves.
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
        """timeout_s: of the operation. tell: called with the reply."""
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
        """Verify the body and begin the operation."""
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
        """End with a reply."""
        self._reply = reply
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.resume(self._told(reply))

    def fail(self, error: ApiError) -> None:
        """End with an error."""
        self.end(container_error(error, self._request_id))

    def on_wait_over(self) -> Reply:
        """Answer if the operation's own time-out has failed to end it."""
        self._waiter = None
        late = ServiceUnavailable("The instance has not answered in time.")
        return self._told(container_error(late, self._request_id))

    def on_body_too_large(self) -> Reply:
        """Answer with HTTP's own status for it."""
        message = f"The body may have up to {MAX_BODY_BYTES} bytes."
        return self._told(container_error(ValidationError(message), self._request_id, status=413))

    def _told(self, reply: Reply) -> Reply:
        self._tell(self._request, self._request_id, reply)
        return reply

    def finish(self, outcome: Outcome) -> None:
        """Forget the client; free the verification of the body."""
        self._waiter = None
        if self._request.body_check is not None:
            self._request.body_check.release()


Begin = Callable[[DeferredReply, bytes], None]
"""Begins the operation of a deferred reply, given the request's body; may raise ApiError."""
