"""Renewal of a claim's lease while its request is worked on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import Claim
from torchmoor.errors import QueueUnavailable, TorchmoorError
from torchmoor.fault_log import FaultLog
from torchmoor.tasks import wait_at_most

EXTENSIONS_PER_LEASE = 3
FIRST_EXTENSION_S = 1.0  # most requests end sooner, and need no extension
RETRY_S = 1.0  # after a failed extension, so that a short outage of the queue costs no lease


class ClaimLost(TorchmoorError):
    """Raised when another worker has claimed the request, or it was cancelled: the work's result is not used."""


class LeaseRenewal:
    """Extends one claim's lease in time. instance: stored in the queue as the place where the request runs."""

    def __init__(self, queue: Queue, claim: Claim, lease_s: float, faults: FaultLog) -> None:
        self.instance = ""
        self._faults = faults
        self._queue = queue
        self._claim = claim
        self._lease_s = lease_s
        self._is_due = asyncio.Event()

    def check_now(self) -> None:
        """Extend the lease at once, to find out whether the claim still stands."""
        self._is_due.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Renew the lease within the context, which ends with ClaimLost when the claim is lost.

        While the queue cannot be reached the work continues: no other worker can claim the request then, and the
        claim's token, not time, decides whose outcome counts.
        """
        limit = asyncio.timeout(None)
        try:
            async with limit:
                renewing = asyncio.create_task(self._renew(limit))
                try:
                    yield
                finally:
                    renewing.cancel()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ClaimLost(f"the claim of {self._claim.request.inference_id} is lost") from error

    async def _renew(self, limit: asyncio.Timeout) -> None:
        interval_s = self._lease_s / EXTENSIONS_PER_LEASE
        wait_s = min(FIRST_EXTENSION_S, interval_s)
        while True:
            await wait_at_most(wait_s, self._is_due)
            wait_s = interval_s
            self._is_due.clear()
            try:
                is_ours = await self._queue.extend(self._claim, self._lease_s, instance=self.instance)
            except Exception as error:
                has_trace = not isinstance(error, QueueUnavailable)
                inference_id = self._claim.request.inference_id
                self._faults.add("lease not extended", error, inference_id=inference_id, has_trace=has_trace)
                wait_s = min(RETRY_S, interval_s)
                continue
            if not is_ours and not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
                return
