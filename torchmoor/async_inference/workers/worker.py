"""Worker that claims an endpoint's requests and sees each to its end.

A worker leases capacity at an instance first and claims a request then. So waiting requests stay in the queue, where
any worker of any process with capacity finds them. Publishing a decided request needs no capacity. A worker may be
killed at any point: once its lease lapses, another worker continues from what the queue holds.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial

from torchmoor.async_inference.objects.object_store import ObjectError
from torchmoor.async_inference.request import AsyncOutcome, AsyncRequest, AsyncState, Claim
from torchmoor.async_inference.workers.attempt import Attempt, RetryableFailure, fail_exhausted
from torchmoor.async_inference.workers.capacity import CapacityLease
from torchmoor.async_inference.workers.context import WorkerContext
from torchmoor.async_inference.workers.lease_renewal import ClaimLost, LeaseRenewal
from torchmoor.async_inference.workers.publication import Publication, PublishLater, ResponsePublication
from torchmoor.errors import QueueUnavailable
from torchmoor.tasks import cancel_all, wait_at_most

logger = logging.getLogger(__name__)

STOPPED = "The proxy was stopped."
FAILED_WITH_SESSION = AsyncOutcome(
    state=AsyncState.FAILED,
    reason="The response's session is lost: its id was signed with a key that is gone. To keep responses across "
    "restarts, set TORCHMOOR_SESSION_KEYS and a journal.",
)


class Worker:
    """Runs one endpoint's requests from `start` to `stop`, which returns what runs to the queue."""

    def __init__(self, context: WorkerContext) -> None:
        self.endpoint = context.metrics.endpoint
        self._context = context
        self._queue = context.queue
        self._capacity = context.capacity
        self._settings = context.settings
        self._backoff = context.backoff
        self._faults = context.faults
        self._is_awake = asyncio.Event()
        self._renewals: dict[str, LeaseRenewal] = {}  # by inference id
        self._serving: set[asyncio.Task[None]] = set()
        self._claiming: asyncio.Task[None] | None = None
        context.capacity.listen(self.wake)

    def wake(self) -> None:
        """Look for work at once."""
        self._is_awake.set()

    def check_claim(self, inference_id: str) -> None:
        """Stop a request at once if it was cancelled, rather than when its lease is extended."""
        renewal = self._renewals.get(inference_id)
        if renewal is not None:
            renewal.check_now()

    def start(self) -> None:
        """Claim requests from now on."""
        self._claiming = asyncio.create_task(self._claim_all())

    async def drain(self, timeout_s: float) -> None:
        """Claim no more requests, wait for what runs, and return to the queue what runs for longer."""
        assert self._claiming is not None
        await cancel_all([self._claiming])
        if self._serving:
            await asyncio.wait(self._serving, timeout=timeout_s)
        await self.stop()

    async def stop(self) -> None:
        """Claim no more requests, and return what runs to the queue."""
        assert self._claiming is not None
        for group in ([self._claiming], self._serving.copy()):
            await cancel_all(group)

    # Claiming

    async def _claim_all(self) -> None:
        failures = 0
        while True:
            self._is_awake.clear()
            pause_s = self._settings.poll_interval_s
            try:
                has_more = await self._claim_one()
                failures = 0
            except Exception as error:
                has_trace = not isinstance(error, QueueUnavailable)
                self._faults.add("nothing claimed", error, has_trace=has_trace)
                has_more = False
                failures += 1
                pause_s = max(pause_s, self._backoff.delay_s(failures))
            if not has_more:
                await wait_at_most(pause_s, self._is_awake)

    async def _claim_one(self) -> bool:
        """Claim and start the next request. Returns False if there is none, or no capacity for it."""
        if len(self._serving) >= self._capacity.max_running + self._settings.max_publishing:
            return False
        lease = self._capacity.try_take()
        claim_next = self._queue.claim(self.endpoint, self._settings.lease_s, may_begin=lease is not None)
        claiming = asyncio.ensure_future(claim_next)
        try:
            claim = await asyncio.shield(claiming)
        except asyncio.CancelledError:  # the queue makes the claim all the same
            self._release_unused(lease)
            with suppress(Exception):
                if (claim := await claiming) is not None:
                    await self._return(claim, 0.0, STOPPED, counts=False)
            raise
        except BaseException:
            self._release_unused(lease)
            raise
        if claim is None or claim.decided is not None:
            self._release_unused(lease)
            lease = None
        if claim is None:
            return False
        task = asyncio.create_task(self._serve(claim, lease))
        self._serving.add(task)
        task.add_done_callback(self._on_served)
        return True

    def _release_unused(self, lease: CapacityLease | None) -> None:
        """Release capacity that was not needed, without waking this worker for it."""
        if lease is None:
            return
        is_awake = self._is_awake.is_set()
        lease.release()
        if not is_awake:
            self._is_awake.clear()

    def _on_served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self.wake()

    # Serving

    async def _serve(self, claim: Claim, lease: CapacityLease | None) -> None:
        """See one request to its end, or return it to the queue."""
        inference_id = claim.request.inference_id
        renewal = LeaseRenewal(self._queue, claim, self._settings.lease_s, self._faults)
        self._renewals[inference_id] = renewal
        try:
            async with renewal.running():
                await self._finish(claim, lease, renewal)
        except ClaimLost as lost:
            logger.info("claim lost inference_id=%s reason=%s", inference_id, lost)
        except asyncio.CancelledError:  # the proxy stops
            await self._return(claim, 0.0, STOPPED, counts=False)
            raise
        except Exception as error:
            self._faults.add("request failed in the proxy", error, inference_id=inference_id, has_trace=True)
            await self._return_later(claim, _describe(error))
        finally:
            if self._renewals.get(inference_id) is renewal:
                del self._renewals[inference_id]
            if lease is not None:
                lease.release()

    async def _finish(self, claim: Claim, lease: CapacityLease | None, renewal: LeaseRenewal) -> None:
        outcome, variant = claim.decided, None
        if outcome is None and self._is_lost(claim.request):
            assert lease is not None
            lease.release()
            outcome = await self._decide(claim, FAILED_WITH_SESSION)
        elif outcome is None:
            assert lease is not None
            lease = await self._lease_for(claim, lease)
            if lease is None:
                return
            variant, renewal.instance = lease.variant, lease.instance
            try:
                outcome = await self._run(claim, lease)
            finally:
                lease.release()
            if outcome is None:
                return
        make = ResponsePublication if claim.request.response_id else Publication
        try:
            await make(self._context, claim, outcome, variant).run()
        except PublishLater as later:
            self._faults.add("result not published yet", later, inference_id=claim.request.inference_id)
            await self._return_later(claim, f"The result could not be published: {later}")

    def _is_lost(self, request: AsyncRequest) -> bool:
        return bool(request.session_id) and self._capacity.is_lost(request.session_id, request.principal)

    async def _lease_for(self, claim: Claim, lease: CapacityLease) -> CapacityLease | None:
        """Replace the lease of a request that only one instance can run. Returns None if that has no capacity now."""
        request = claim.request
        if not request.session_id:
            return lease
        lease.release()
        own = self._capacity.try_take_of(request.session_id, request.principal)
        if own is None:
            reason = "The instance that has the response has no capacity now."
            await self._return(claim, self._settings.min_backoff_s, reason, counts=False)
        return own

    async def _run(self, claim: Claim, lease: CapacityLease) -> AsyncOutcome | None:
        """Run one attempt. Returns the decided outcome; None if the request will be tried again."""
        if claim.attempt == 1:
            waited_s = max(0.0, self._context.wall() - claim.request.received_at)
            self._context.metrics.of(lease.variant).async_time_in_backlog.observe(waited_s)
        attempt = Attempt(self._context, claim, lease)
        try:
            try:
                outcome = await self._try(attempt, claim)
            except RetryableFailure as failure:
                if not failure.counts or claim.attempt < self._settings.max_attempts:
                    self._context.metrics.of(lease.variant).async_repeated += 1
                    delay_s = self._backoff.delay_s(claim.attempt) if failure.delay_s is None else failure.delay_s
                    await self._return(claim, delay_s, failure.reason, counts=failure.counts)
                    return None
                outcome = fail_exhausted(claim.request, claim.attempt, failure)
            lease.release()
            return await self._decide(claim, outcome)
        except (asyncio.CancelledError, ClaimLost):
            if attempt.staged is not None:
                await asyncio.shield(self._discard(claim, attempt.staged, 0.0, STOPPED, counts=False))
            raise
        except Exception as error:
            if attempt.staged is not None:
                delay_s = self._context.delay_since_s(claim.request)
                await asyncio.shield(self._discard(claim, attempt.staged, delay_s, _describe(error)))
            raise

    async def _try(self, attempt: Attempt, claim: Claim) -> AsyncOutcome:
        """Run the attempt, unless too many workers died with this request: it may be the cause."""
        if claim.attempt > self._settings.max_attempts:
            return fail_exhausted(claim.request, claim.attempt - 1, RetryableFailure("Its worker was lost."))
        try:
            return await attempt.run()
        except (RetryableFailure, ClaimLost):
            raise
        except Exception as error:
            logger.exception("attempt failed in the proxy inference_id=%s", claim.request.inference_id)
            raise RetryableFailure(_describe(error)) from error

    async def _decide(self, claim: Claim, outcome: AsyncOutcome) -> AsyncOutcome:
        """Decide the outcome and return it. Raises ClaimLost."""
        decide = partial(self._queue.decide, claim, outcome)
        if not await self._context.until_answered(decide, claim.request, "not decided yet"):
            raise ClaimLost("another worker has decided it, or it was cancelled")
        return outcome

    async def _discard(self, claim: Claim, staged: str, delay_s: float, reason: str, *, counts: bool = True) -> None:
        """Return the request to the queue, and remove a staged answer that was not decided upon.

        After the return it cannot be decided upon; before, a decision may stand although its confirmation was lost. If
        the queue does not answer, the object stays until publication removes it.
        """
        try:
            await self._queue.retry(claim, delay_s, reason, counts=counts)
            record = await self._queue.get(claim.request.inference_id)
            if record is None or record.outcome is None or record.outcome.staged != staged:
                await self._context.store.delete(staged)
        except (QueueUnavailable, ObjectError) as error:
            self._faults.add("staged object not removed", error, inference_id=claim.request.inference_id)

    async def _return_later(self, claim: Claim, reason: str) -> None:
        """Return a request to the queue, to be tried again after a delay that grows with its age."""
        await self._return(claim, self._context.delay_since_s(claim.request), reason)

    async def _return(self, claim: Claim, delay_s: float, reason: str, *, counts: bool = True) -> None:
        """Return a request to the queue. If that fails, its lease lapses."""
        try:
            await asyncio.shield(self._queue.retry(claim, delay_s, reason, counts=counts))
        except QueueUnavailable as error:
            logger.warning("claim not returned inference_id=%s error=%s", claim.request.inference_id, error)


def _describe(error: Exception) -> str:
    return f"The proxy failed: {type(error).__name__}"
