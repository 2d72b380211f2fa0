"""Interface through which a worker leases capacity at instances. The proxy's dispatch package implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class CapacityLease(Protocol):
    """Capacity for one request at an instance. Counts as the instance's load until it is released.

    max_body_bytes: the longest body that the instance can hold.
    """

    instance: str
    variant: str
    url: str
    max_body_bytes: int

    def try_hold_body(self, num_bytes: int) -> bool:
        """Count the bytes of the request's body. False if the instance has no room for them now."""

    def release(self) -> None:
        """Return the capacity. Later calls do nothing."""

    def on_answered(self) -> None:
        """Record that the instance answered, with any status."""

    def on_failed(self, *, is_dead: bool) -> None:
        """Record that the instance failed the request. is_dead: its worker or the instance itself may be gone."""

    def on_unreachable(self) -> None:
        """Record that no connection could be made."""

    def abandon(self, request_id: str) -> None:
        """Cancel a request at the instance: its answer is no longer needed."""


class Capacity(Protocol):
    """Capacity for one endpoint's asynchronous requests."""

    def try_take(self) -> CapacityLease | None:
        """Lease free capacity; None if there is none, or clients wait for it."""

    def try_take_of(self, session_id: str, principal: str) -> CapacityLease | None:
        """Lease free capacity at the instance that serves a session; None if there is none."""

    def find_url(self, session_id: str, principal: str) -> str | None:
        """Return where requests of a session are sent; None if no instance serves it."""

    def is_lost(self, session_id: str, principal: str) -> bool:
        """Return True if no instance can serve a session again: the key that signed its id is gone."""

    @property
    def max_running(self) -> int:
        """Return how many requests may run at once at all ready instances together."""

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever capacity may be free. Spurious calls are allowed."""
