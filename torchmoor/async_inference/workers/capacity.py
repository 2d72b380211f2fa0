"""Where a worker's requests run, as the worker sees it: places at instances, leased one by one.

Routing owns the instances; what is here is only what both sides agree on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class CapacityLease(Protocol):
    """A place at an instance, for one request. It counts as the instance's load until it is released."""

    instance: str
    variant: str
    url: str

    def release(self) -> None:
        """Give the place back; later calls do nothing."""
        ...

    def on_answered(self) -> None:
        """The instance has answered, whatever it said."""
        ...

    def on_failed(self, *, is_dead: bool) -> None:
        """The instance has failed the request. is_dead: perhaps it has no worker any more, or is gone."""
        ...

    def on_unreachable(self) -> None:
        """No connection came about."""
        ...

    def abandon(self, request_id: str) -> None:
        """The instance shall stop working on a request: nobody waits for it any more."""
        ...


class Capacity(Protocol):
    """The places for one endpoint's requests."""

    def try_take(self) -> CapacityLease | None:
        """A free place; None if there is none now, or somebody else waits for it: clients who wait go first."""
        ...

    @property
    def num_ready(self) -> int:
        """Instances that may be sent work."""
        ...

    @property
    def max_running(self) -> int:
        """Requests that may run at a time, at all ready instances together."""
        ...

    def listen(self, wake: Callable[[], None]) -> None:
        """Have `wake` called whenever a place may have become free; it may be called for nothing."""
        ...
