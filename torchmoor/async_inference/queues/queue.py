"""Interface of a queue of asynchronous requests.

Every queue keeps these rules:
* What `submit`, `decide` and `cancel` have confirmed survives a kill -9 of any process (Redis: as its settings say).
* An endpoint's requests are claimed in the order of their arrival, among those that are due.
* A claim is fenced by its token, not by time. A lapsed lease only allows others to claim the request; until one does,
  its holder may still extend or decide. So a clock that steps costs at most an attempt, never correctness.
* Times come from the queue's clock: one injectable clock (SQLite) or the server's (Redis). Callers pass durations.
* Every method raises QueueUnavailable if the store cannot be reached or written in time. Nothing is half done then, but
  a call whose answer was lost may have succeeded. Every call may be repeated without harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchmoor.async_inference.request import (
    CANCELLED,
    AsyncOutcome,
    AsyncRecord,
    AsyncRequest,
    AsyncState,
    Backlog,
    CallerShare,
    Claim,
)
from torchmoor.errors import ApiError

CLOCK_TOLERANCE_S = 1.0  # a lease that begins later than this from now shows that the clock went back


class Queue(Protocol):
    """Holds the asynchronous requests of all endpoints. Each process uses one object from one event loop."""

    async def submit(
        self, request: AsyncRequest, *, refusal: ApiError | None = None, share: CallerShare | None = None
    ) -> AsyncRequest:
        """Store a request with its `received_at`. Idempotent on endpoint, principal and invocation id.

        Its locations are reserved until it ends: no other request may have one of them, a folder above it or an object
        below it. refusal: raised instead of storing a new request. share: counts a new request until it ends.
        Returns the stored request; for a client's retry, the first one with its inference id.
        Raises InferenceIdInUse if a request of another invocation has its inference id; ResultLocationInUse;
        CallerLimited; QueueFull; DiskFull.
        """

    async def claim(self, endpoint: str, lease_s: float, *, may_begin: bool = True) -> Claim | None:
        """Claim a request that needs only publication, or else the oldest due one, and count an attempt.

        The first is a decided request without a holder (its worker died, or it was cancelled), or one whose time to
        live passed before an attempt: this call decides it as EXPIRED. The claim's `decided` is set then. A request is
        due if it waits and its delay is over, or if it runs under a lapsed lease. may_begin: False for no attempt.
        """

    async def extend(self, claim: Claim, lease_s: float, *, instance: str = "") -> bool:
        """Let the lease end `lease_s` from now. Returns False if the claim is lost.

        instance: if given, stored as the place where the request runs.
        """

    async def decide(self, claim: Claim, outcome: AsyncOutcome) -> bool:
        """Fix the outcome durably, once; the lease continues. Returns whether this outcome is the fixed one.

        After a lost answer the same holder may decide again with the same outcome. False means that the claim is lost
        or the request cancelled; the caller deletes what it staged.
        """

    async def replace(self, claim: Claim, outcome: AsyncOutcome) -> bool:
        """Replace a decided outcome by one without a body, durably.

        outcome: a failure if the result can never be published, or the same outcome marked as published. May be
        repeated. Returns False if the claim is lost.
        """

    async def finish(self, claim: Claim) -> bool:
        """End a request after its publication, in the decided state, and delete its bodies.

        Returns False if the claim is lost: its new holder will finish it. Raises ValueError if it is not decided.
        """

    async def retry(self, claim: Claim, delay_s: float, reason: str, *, counts: bool = True) -> bool:
        """Return a claim, to be claimed again after a delay. Returns False if it was lost.

        counts: False if this was not an attempt (the worker stops, the instance has no capacity).
        """

    async def cancel(self, inference_id: str, outcome: AsyncOutcome = CANCELLED) -> AsyncState | None:
        """Decide a request as CANCELLED, unless it is decided. Its holder learns it by `extend` or `decide`.

        outcome: a CANCELLED outcome, if its reason is not the usual one.
        Returns CANCELLED (the failure object may still be missing), the state if the request was decided before
        (DECIDED, COMPLETED, FAILED, EXPIRED), or None if the request is unknown.
        """

    async def size_bytes(self) -> int:
        """Return the bytes that are used on this machine's disk; 0 for a server's."""

    async def get(self, inference_id: str) -> AsyncRecord | None:
        """Return one request's record."""

    async def list(
        self,
        endpoint: str,
        state: AsyncState | None = None,
        after: str | None = None,
        limit: int = 100,
        *,
        is_newest_first: bool = False,
    ) -> Sequence[AsyncRecord]:
        """Return at most `limit` requests by arrival, starting after the inference id `after`.

        If `after` has been forgotten, the list starts at the beginning.
        """

    async def backlog(self, endpoint: str) -> Backlog:
        """Return the endpoint's backlog. Cheap at any size."""

    async def forget(self) -> int:
        """Drop ended requests that are old enough, and the oldest of too many. Returns how many were dropped.

        Does a bounded amount of work; call it again while it returns more than 0.
        """

    async def close(self) -> None:
        """Close the store after the running calls."""
