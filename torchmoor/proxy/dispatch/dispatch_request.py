"""A request as the dispatcher sees it."""

from __future__ import annotations

from typing import Protocol

from torchmoor.proxy.dispatch.choice import Choice
from torchmoor.proxy.http.message import Request
from torchmoor.proxy.routing.strategy import StrategyRequest
from torchmoor.wire.session_ids import SessionId


class DispatchRequest(Protocol):
    """What the choice of an instance depends on.

    target_model: None if the endpoint serves one model. num_body_bytes: as declared, or as received without a
    declared length; times body_weight, which is above 1 for a form.
    """

    head: Request
    session: SessionId | None
    opens_session: bool
    num_body_bytes: int
    body_weight: int
    target_model: str | None
    strategy_request: StrategyRequest

    def go(self, choice: Choice) -> None:
        """End the wait and take this instance."""
        ...

    def route_again(self) -> None:
        """Choose again: the instance that it waited for is gone, and its ticket is void."""
        ...
