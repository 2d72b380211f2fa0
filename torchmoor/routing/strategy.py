"""What a routing strategy sees and must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """An instance as routing sees it.

    last_chosen counts the choices made; the smallest was chosen longest ago.
    """

    name: str
    capacity: int
    outstanding: int
    last_chosen: int

    @property
    def is_ready(self) -> bool:
        """True if new work may be sent there."""
        ...


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What is known of a request. excluded: the instances that have refused or failed it already."""

    excluded: frozenset[str] = frozenset()


FIRST_ATTEMPT = RouteRequest()


class Strategy(Protocol):
    """Chooses among instances. `reason` is told to the client."""

    reason: str

    def choose(self, request: RouteRequest, instances: Sequence[C]) -> C | None:
        """The instance to send to, or None if none can take it."""
        ...


def can_take(request: RouteRequest, instance: Candidate) -> bool:
    """True if the instance is ready, has room, and has not failed this request before."""
    return instance.is_ready and instance.outstanding < instance.capacity and instance.name not in request.excluded
