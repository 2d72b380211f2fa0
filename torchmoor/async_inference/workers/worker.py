"""One endpoint's worker: takes requests from the queue, as many as there are places for, and sees each to its end.

A place at an instance is taken first and a request then: what waits, waits in the queue, for whichever worker of
whichever process has a place. What is decided already needs none. A worker may be killed at any point: whatever it
held is taken by another when its lease has lapsed, and goes on from what is in the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from torchmoor.async_inference.objects.object_store import ObjectError
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import AsyncOutcome, Claim
from torchmoor.async_inference.workers.attempt import Attempt, AttemptContext, RetryableFailure, give_up
from torchmoor.async_inference.workers.capacity import Capacity, CapacityLease
from torchmoor.async_inference.workers.lease_renewal import ClaimLost, LeaseRenewal
from torchmoor.async_inference.workers.publication import Publisher, PublishLater
from torchmoor.errors import QueueUnavailable

logger = logging.getLogger(__name__)

DECIDE_AGAIN_S = 1.0


class Worker:
    """For as long as the context lasts; then what runs is given back, to be taken by another."""

    def __init__(
        self,
        endpoint: str,
        queue: Queue,
        capacity: Capacity,
        context: AttemptContext,
        publisher: Publisher,
        wall: Callable[[], float],
    ) -> None:
        """wall: epoch seconds."""
        self.endpoint = endpoint
        self.metrics = context.metrics
        self._queue = queue
        self._capacity = capacity
        self._context = context
        self._settings = context.settings
        self._publisher = publisher
        self._wall = wall
        self._awake = asyncio.Event()
        self._holds: dict[str, LeaseRenewal] = {}  # by inference id
        self._serving: set[asyncio.Task[None]] = set()
        self._taking: asyncio.Task[None] | None = None
        capacity.listen(self.wake)

    @property
    def num_serving(self) -> int:
        """Requests that this worker has."""
        return len(self._serving)

    def wake(self) -> None:
        """There may be something to do."""
        self._awake.set()

    def look(self, inference_id: str) -> None:
        """A request was cancelled: if it is here, it ends now and not when its lease is extended."""
        hold = self._holds.get(inference_id)
        if hold is not None:
            hold.look()

    async def __aenter__(self) -> Worker:
        self._taking = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._taking is not None
        for group in ([self._taking], self._serving.copy()):
            for task in group:
                task.cancel()
            await asyncio.gather(*group, return_exceptions=True)

    # Taking

    async def _run(self) -> None:
        while True:
            self._awake.clear()
            try:
                has_more = await self._take_one()
            except QueueUnavailable as error:
                logger.warning("queue unavailable endpoint=%s error=%s", self.endpoint, error)
                has_more = False
            except Exception:
                logger.exception("worker's fault endpoint=%s", self.endpoint)
                has_more = False
            if not has_more:
                with suppress(TimeoutError):  # not wait_for: Python 3.11's can lose a cancellation
                    async with asyncio.timeout(self._settings.poll_interval_s):
                        await self._awake.wait()

    async def _take_one(self) -> bool:
        """Take the next request and start with it. False if there is none, or no room for it."""
        if len(self._serving) >= self._capacity.max_running + self._settings.max_publishing:
            return False
        lease = self._capacity.try_take()
        try:
            take = self._queue.claim_decided if lease is None else self._queue.claim
            claim = await take(self.endpoint, self._settings.lease_s)
        except BaseException:
            self._return(lease)
            raise
        if claim is None or claim.decided is not None:
            self._return(lease)
            lease = None
        if claim is None:
            return False
        task = asyncio.get_running_loop().create_task(self._serve(claim, lease))
        self._serving.add(task)
        task.add_done_callback(self._on_served)
        return True

    def _return(self, lease: CapacityLease | None) -> None:
        """Give back a place that was not needed. That it is free is no news, and wakes nobody here."""
        if lease is None:
            return
        is_awake = self._awake.is_set()
        lease.release()
        if not is_awake:
            self._awake.clear()

    def _on_served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self.wake()

    # Serving

    async def _serve(self, claim: Claim, lease: CapacityLease | None) -> None:
        """See one request to its end, or as far as it goes now."""
        inference_id = claim.request.inference_id
        hold = self._holds[inference_id] = LeaseRenewal(self._queue, claim, self._settings.lease_s)
        try:
            async with hold.kept():
                await self._go_on(claim, lease, hold)
        except ClaimLost as lost:
            logger.info("claim lost inference_id=%s reason=%s", inference_id, lost)
        except asyncio.CancelledError:  # the proxy stops
            await self._give_back(claim, 0.0, "The proxy was stopped.", counts=False)
            raise
        except Exception as error:
            logger.exception("fault inference_id=%s", inference_id)
            await self._give_back(claim, self._delay_s(claim), f"The proxy failed: {type(error).__name__}")
        finally:
            if self._holds.get(inference_id) is hold:
                del self._holds[inference_id]
            if lease is not None:
                lease.release()

    async def _go_on(self, claim: Claim, lease: CapacityLease | None, hold: LeaseRenewal) -> None:
        outcome, variant = claim.decided, None
        if outcome is None:
            assert lease is not None
            variant, hold.instance = lease.variant, lease.instance
            outcome = await self._answer(claim, lease)
            if outcome is None:
                return
        try:
            await self._publisher.publish(claim, outcome, variant)
        except PublishLater as later:
            logger.warning("result waits inference_id=%s reason=%s", claim.request.inference_id, later.reason)
            await self._give_back(claim, later.delay_s, f"The result could not be published: {later.reason}")

    async def _answer(self, claim: Claim, lease: CapacityLease) -> AsyncOutcome | None:
        """What the request has been decided to end with; None if it has not."""
        if claim.attempt == 1:
            waited_s = max(0.0, self._wall() - claim.request.received_at)
            self.metrics.of(lease.variant).async_time_in_backlog.observe(waited_s)
        attempt = Attempt(self._context, claim, lease)
        try:
            try:
                outcome = await self._try(attempt, claim)
            except RetryableFailure as again:
                if not again.counts or claim.attempt < self._settings.max_attempts:
                    self.metrics.of(lease.variant).async_repeated += 1
                    delay_s = self._delay_s(claim) if again.delay_s is None else again.delay_s
                    await self._give_back(claim, delay_s, again.reason, counts=again.counts)
                    return None
                outcome = give_up(claim.request, claim.attempt, again.reason)
            lease.release()
            if await self._decide(claim, outcome):
                return outcome
            raise ClaimLost("another worker has decided it, or it was cancelled")
        except BaseException:
            if attempt.staged is not None:
                await asyncio.shield(self._discard(claim, attempt.staged))
            raise

    async def _try(self, attempt: Attempt, claim: Claim) -> AsyncOutcome:
        """Raises RetryableFailure. A request whose workers died one after the other may be what they died of."""
        if claim.attempt > self._settings.max_attempts:
            return give_up(claim.request, claim.attempt - 1, "Its worker was lost.")
        try:
            return await attempt.run()
        except (RetryableFailure, ClaimLost):
            raise
        except Exception as error:
            logger.exception("fault inference_id=%s", claim.request.inference_id)
            raise RetryableFailure(f"The proxy failed: {type(error).__name__}") from error

    async def _decide(self, claim: Claim, outcome: AsyncOutcome) -> bool:
        """Settle it. What the queue has not confirmed is said again, for as long as the claim is held."""
        while True:
            try:
                return await self._queue.decide(claim, outcome)
            except QueueUnavailable as error:
                logger.warning("not decided yet inference_id=%s error=%s", claim.request.inference_id, error)
                await asyncio.sleep(DECIDE_AGAIN_S)

    async def _discard(self, claim: Claim, staged: str) -> None:
        """Remove an answer that nobody will ever ask for.

        A decision whose confirmation was lost may be one all the same: what the queue says is what counts, and what
        it does not say is left for whoever publishes the request.
        """
        try:
            record = await self._queue.get(claim.request.inference_id)
            if record is not None and record.outcome is not None and record.outcome.staged != staged:
                await self._context.store.delete(staged)
        except (QueueUnavailable, ObjectError) as error:
            logger.warning("staged object left behind url=%s error=%s", staged, error)

    async def _give_back(self, claim: Claim, delay_s: float, reason: str, *, counts: bool = True) -> None:
        """To be taken again. If the queue does not hear of it, its lease lapses."""
        try:
            await asyncio.shield(self._queue.retry(claim, delay_s, reason, counts=counts))
        except QueueUnavailable as error:
            logger.warning("not given back inference_id=%s error=%s", claim.request.inference_id, error)

    def _delay_s(self, claim: Claim) -> float:
        """Doubled with each attempt."""
        settings = self._settings
        return float(min(settings.max_backoff_s, settings.min_backoff_s * 2 ** min(claim.attempt, 16) / 2))
