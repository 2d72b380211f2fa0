"""What every queue of asynchronous requests promises; the queues themselves are in modules of their own.

Rules that all of them keep:
* What `submit`, `decide` and `cancel` have answered survives a kill -9 of anything (Redis: as its own settings say).
* Requests of an endpoint are claimed in the order of their arrival, among those that are due.
* A claim is fenced by its token, not by time: a lease that has lapsed only lets others take the request. Until one
  does, its holder may still extend it or decide. So a clock that steps costs at most an attempt, never exactness.
* Times are the queue's: those of one injectable clock (SQLite), or of the server (Redis). Callers give spans.
* Every method raises QueueUnavailable if the store cannot be reached or written in its time; nothing is half done then,
  but a call whose answer was lost may have been done. Each may be called again: the second time does no harm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torchmoor.async_inference.request import AsyncOutcome, AsyncRecord, AsyncRequest, AsyncState, Backlog, Claim


class Queue(ABC):
    """Asynchronous requests of all endpoints. One object a process, used from one event loop."""

    @abstractmethod
    async def submit(self, request: AsyncRequest) -> AsyncRequest:
        """Store it, with `received_at` stamped. Idempotent on endpoint, principal and invocation id.

        Returns the request as it was stored first, so of a client's retry the one with the first inference id.
        Raises InferenceIdInUse if another invocation's request has its inference id and is remembered; QueueFull.
        """

    @abstractmethod
    async def claim(self, endpoint: str, lease_s: float) -> Claim | None:
        """The next thing to do at an endpoint: what `claim_decided` gives, else the oldest request that is due.

        Due is what waits and whose delay is over, and what runs under a lapsed lease. Counts an attempt.
        """

    @abstractmethod
    async def claim_decided(self, endpoint: str, lease_s: float) -> Claim | None:
        """The next thing to do that needs no instance; its `decided` is set.

        That is a decided request that nobody holds (its worker died, or it was cancelled), or a request whose time to
        live has passed before a worker came: it is decided as EXPIRED here and now.
        """

    @abstractmethod
    async def extend(self, claim: Claim, lease_s: float, *, instance: str = "") -> bool:
        """Let the lease end `lease_s` from now. False: it is lost (taken by another, cancelled, ended); stop.

        instance: remembered for those who ask where it runs, if given.
        """

    @abstractmethod
    async def decide(self, claim: Claim, outcome: AsyncOutcome) -> bool:
        """Settle how it ends, once and durably; the lease goes on. True: this outcome is the one.

        The same holder may decide again with the same outcome, after an answer that was lost. False: another holder
        has it, or it has been cancelled; whatever was staged for this outcome is to be deleted.
        """

    @abstractmethod
    async def finish(self, claim: Claim) -> bool:
        """Its objects are published and its notices sent: it ends in the state that was decided, and bodies go.

        False: the claim was lost, and whoever has it will finish it. Raises ValueError if it is not decided.
        """

    @abstractmethod
    async def retry(self, claim: Claim, delay_s: float, reason: str, *, counts: bool = True) -> bool:
        """Give it back, to be claimed again after a delay: an attempt anew, or the publication of what is decided.

        counts: False if this was no attempt (a worker that shuts down, an instance without room). False: it was lost.
        """

    @abstractmethod
    async def cancel(self, inference_id: str) -> AsyncState | None:
        """Decide it as CANCELLED unless it is decided. Its holder learns so by `extend` or `decide`.

        Returns CANCELLED (it is, though its failure object may be yet to come), the state that came before
        (DECIDED, COMPLETED, FAILED, EXPIRED), or None for an unknown one. Idempotent.
        """

    @abstractmethod
    async def get(self, inference_id: str) -> AsyncRecord | None:
        """What is known of one request."""

    @abstractmethod
    async def list(
        self,
        endpoint: str,
        state: AsyncState | None = None,
        after: str | None = None,
        limit: int = 100,
        *,
        is_newest_first: bool = False,
    ) -> Sequence[AsyncRecord]:
        """Requests of an endpoint by arrival, those that follow the inference id `after` there; at most `limit`.

        An `after` that has been forgotten begins again with the first.
        """

    @abstractmethod
    async def backlog(self, endpoint: str) -> Backlog:
        """How much is to be done. Cheap, however much it is."""

    @abstractmethod
    async def forget(self) -> int:
        """Drop ended requests that are remembered long enough, and the oldest of too many. Returns how many.

        Does a bounded amount of work; call it now and then, and again at once while it returns more than 0.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of the store. What is under way ends first."""
