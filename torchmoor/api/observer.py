"""Who is told of each request: the seam between the dialects and what writes logs and traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torchmoor.http.call import Outcome, Waiter
from torchmoor.http.message import Reply, Request

if TYPE_CHECKING:
    from torchmoor.api.invocation import Invocation


class Trace(Protocol):
    """A request's place in a trace."""

    def mark(self, lines: Sequence[bytes]) -> bytes:
        """The request's header lines for the instance, with this place instead of the one that they name."""
        ...


class Observer(Protocol):
    """None of its methods may wait, or keep what it is given."""

    def begin_trace(self, request: Request) -> Trace | None:
        """An invocation begins; None if it is not traced."""
        ...

    def on_end(self, invocation: Invocation, waiter: Waiter | None, outcome: Outcome, now: float) -> None:
        """An invocation is over. waiter: None if it ended before it was routed. now: in monotonic seconds."""
        ...

    def on_reply(self, request: Request, request_id: bytes, reply: Reply) -> None:
        """The proxy answers a request itself: it has an error, or asks for nothing that an instance knows."""
        ...
