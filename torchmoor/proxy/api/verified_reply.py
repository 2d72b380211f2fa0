"""A reply to a signed request whose body has not come yet: nobody is told anything before the signature is right."""

from __future__ import annotations

from collections.abc import Callable

from torchmoor.errors import ApiError, ValidationError
from torchmoor.proxy.http.call import WHOLE_BODY, Deadlines, Outcome, Waiter
from torchmoor.proxy.http.message import BodyCheck, Reply, Request

_DEADLINES = Deadlines(60.0, 60.0)  # of an answer that is there at once


class VerifiedReply:
    """A Call (see torchmoor.proxy.http.call) that takes the body, checks it, and goes to no target."""

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
        """say: how an error is told. tell: called with what was answered, if anything was."""
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
        """The reply, or why its reader is not to have it."""
        try:
            self._check.verify(body)
            reply = self._reply
        except ApiError as error:
            reply = self._say(error)
        self._tell(reply)
        return Reply(reply.status, reply.headers) if self._is_head else reply

    def on_body_too_large(self) -> Reply:
        """More than may be signed."""
        reply = self._say(ValidationError(f"A signed body may have up to {self.max_body_bytes} bytes."))
        self._tell(reply)
        return reply

    def finish(self, outcome: Outcome) -> None:
        """The body is not awaited any more."""
        self._check.release()

    def on_wait_over(self) -> Reply:
        """Never asked."""
        raise AssertionError
