"""What a routing strategy sees and must do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol

from torchmoor.proxy.routing.pool import C, Pool


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What is known of a request.

    excluded: the instances that have refused or failed it already. prefix: the body's first bytes, as many as the
    strategy asks for, or the whole body if that is shorter. prefix_id: the client's word on what shares a prefix.
    """

    excluded: frozenset[str] = frozenset()
    prefix: bytes = b""
    prefix_id: bytes = b""


FIRST_ATTEMPT = RouteRequest()


class Pick(NamedTuple, Generic[C]):
    """A chosen instance, and why: the reason is told to the client."""

    instance: C
    reason: str


class Strategy(Protocol):
    """Chooses among the instances of a variant. num_prefix_bytes: how much of a body it wants to see; 0 for nothing."""

    num_prefix_bytes: int

    def choose(self, request: RouteRequest, pool: Pool[C]) -> Pick[C] | None:
        """The instance to send to, or None if none can take the request now."""
        ...
