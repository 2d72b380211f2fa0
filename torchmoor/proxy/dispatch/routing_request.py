"""A request as whoever chooses an instance for it sees it."""

from __future__ import annotations

from typing import Protocol

from torchmoor.proxy.dispatch.choice import Choice
from torchmoor.proxy.routing.strategy import RouteRequest
from torchmoor.wire.session_ids import SessionId


class Applicant(Protocol):
    """Seen by its dispatcher.

    opens_session: it will open one. target_model: which of many it is for. wait_ends_at: in monotonic seconds.
    principal: who asks.
    """

    session: SessionId | None
    opens_session: bool
    target_model: str | None
    route_request: RouteRequest

    @property
    def wait_ends_at(self) -> float:
        """When the wait has been too long."""
        ...

    @property
    def principal(self) -> bytes:
        """Whose request it is, for taking turns."""
        ...

    @property
    def opening(self) -> bytes:
        """Of one that opens a session: the same when its client sends it again; b"" if that cannot be known."""
        ...

    @property
    def body_bytes(self) -> int:
        """The declared length of its body; 0 if it has none."""
        ...

    @property
    def num_waiting_bytes(self) -> int:
        """The most bytes of its body that are held while it waits."""
        ...

    def go(self, choice: Choice) -> None:
        """The wait is over: this instance is to be taken."""
        ...

    def route_again(self) -> None:
        """The instance that it waited for is gone; its ticket is void."""
        ...
