"""A reply to a signed request: sent only after the body has been received and matches the signature."""

from __future__ import annotations

from collections.abc import Callable

from torchmoor.errors import ApiError, ValidationError
from torchmoor.proxy.http.call import WHOLE_BODY, Deadlines, Outcome, Waiter
from torchmoor.proxy.http.message import BodyCheck, Reply, Request

_DEADLINES = Deadlines(60.0, 60.0)  # not reached: the reply is ready


class VerifiedReply:
    """A Call (see torchmoor.proxy.http.call) that verifies the body, and goes to no target."""

    __slots__ = (
        "max_body_bytes",
        "body_need",
        "deadlines",
        "wait_ends_at",
        "_check",
        "_reply",
        "_say",
        "_tell",
        "_is_head",
    )

    def __init__(
        self,
        request: Request,
        check: BodyCheck,
        reply: Reply,
        say: Callable[[ApiError], Reply],
        tell: Callable[[Reply], None],
    ) -> None:
        """say: renders an error. tell: called with the reply."""
        self.max_body_bytes = check.max_body_bytes
        self.body_need = WHOLE_BODY
        self.deadlines = _DEADLINES
        self.wait_ends_at = 0.0
        self._check = check
        self._reply = reply
        self._say = say
        self._tell = tell
        self._is_head = request.method == b"HEAD"

    def route(self, body: bytes, waiter: Waiter) -> Reply:
        """Send the reply, or why the caller must not have it."""
        try:
            self._check.verify(body)
            reply = self._reply
        except ApiError as error:
            reply = self._say(error)
        self._tell(reply)
        return Reply(reply.status, reply.headers) if self._is_head else reply

    def on_body_too_large(self) -> Reply:
        """Answer a body above the limit for signed bodies."""
        reply = self._say(ValidationError(f"A signed body may have up to {self.max_body_bytes} bytes."))
        self._tell(reply)
        return reply

    def finish(self, outcome: Outcome) -> None:
        """Free the verification of the body."""
        self._check.release()

    def on_wait_over(self) -> Reply:
        raise AssertionError("it never waits")
