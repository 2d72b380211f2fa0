"""Who is told of each request: the seam between the dialects and what writes logs and traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torchmoor.proxy.http.call import Outcome, Waiter
from torchmoor.proxy.http.message import Reply, Request

if TYPE_CHECKING:
    from torchmoor.proxy.api.invocation import Invocation


TRACEPARENT = b"traceparent"  # W3C Trace Context


class Trace(Protocol):
    """A request's place in a trace."""

    @property
    def line(self) -> bytes:
        """The header line that tells the instance of it, in the place of the client's own."""
        ...


class Observer(Protocol):
    """None of its methods may wait, raise, or keep what it is given."""

    def begin_trace(self, request: Request) -> Trace | None:
        """An invocation begins; None if it is not traced."""
        ...

    def on_end(self, invocation: Invocation, waiter: Waiter | None, outcome: Outcome) -> None:
        """An invocation is over. waiter: None if it ended before it was routed."""
        ...

    def on_reply(self, request: Request, request_id: bytes, reply: Reply) -> None:
        """The proxy answers a request itself: it has an error, or asks for nothing that an instance knows."""
        ...
