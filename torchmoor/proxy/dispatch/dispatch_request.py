"""A request as the dispatcher sees it."""

from __future__ import annotations

from typing import Protocol

from torchmoor.proxy.dispatch.choice import Choice
from torchmoor.proxy.http.message import Request
from torchmoor.proxy.routing.strategy import StrategyRequest
from torchmoor.wire.session_ids import SessionId


class DispatchRequest(Protocol):
    """The properties of a request that its instance's choice depends on.

    complete_at: when the request was whole, or its streamed answer was cut; its wait counts from then. target_model:
    None if the endpoint serves one model. num_body_bytes: of the body, times body_weight, which is above 1 for a form.
    was_lost: it was sent to an instance that is gone, and may be sent to that one's replacement, of the same name.
    """

    head: Request
    complete_at: float
    session: SessionId | None
    opens_session: bool
    num_body_bytes: int
    body_weight: int
    target_model: str | None
    strategy_request: StrategyRequest
    was_lost: bool

    def exclude_only(self, instances: frozenset[str]) -> None:
        """Allow all instances but these."""
        ...

    def go(self, choice: Choice) -> None:
        """End the wait and take this instance."""
        ...

    def route_again(self) -> None:
        """Choose again: the instance that it waited for is gone, and its ticket is void."""
        ...
