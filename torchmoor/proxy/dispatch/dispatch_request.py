"""A request as the dispatcher sees it."""

from __future__ import annotations

from typing import Protocol

from torchmoor.proxy.dispatch.choice import Choice
from torchmoor.proxy.routing.strategy import StrategyRequest
from torchmoor.wire.session_ids import SessionId


class DispatchRequest(Protocol):
    """What the choice of an instance depends on. target_model: None if the endpoint serves one model."""

    session: SessionId | None
    opens_session: bool
    target_model: str | None
    strategy_request: StrategyRequest

    @property
    def wait_ends_at(self) -> float:
        """When the request stops waiting, in monotonic seconds."""
        ...

    @property
    def principal(self) -> bytes:
        """The caller; callers take turns in the queue."""
        ...

    @property
    def opening(self) -> bytes:
        """The identity of a request that opens a session, the same when it is sent again; b"" if unknown."""
        ...

    @property
    def body_bytes(self) -> int:
        """The declared length of its body; 0 if it has none."""
        ...

    @property
    def num_waiting_bytes(self) -> int:
        """The most bytes of its body that are kept while it waits."""
        ...

    def go(self, choice: Choice) -> None:
        """End the wait and take this instance."""
        ...

    def route_again(self) -> None:
        """Choose again: the instance that it waited for is gone, and its ticket is void."""
        ...
