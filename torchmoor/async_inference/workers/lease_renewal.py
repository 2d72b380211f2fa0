"""Keeps a claim while it is worked on: the lease is extended in time, and the work ends as soon as it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import Claim
from torchmoor.errors import QueueUnavailable, TorchmoorError

logger = logging.getLogger(__name__)

EXTENSIONS_PER_LEASE = 3
FIRST_EXTENSION_S = 1.0  # most requests are over by then, and cost the queue no extension


class ClaimLost(TorchmoorError):
    """Somebody else has the request now, or it has been cancelled: nothing that is done for it counts any more."""


class LeaseRenewal:
    """One claim's lease. `look` has it asked at once whether the claim still stands; instance: where it runs."""

    def __init__(self, queue: Queue, claim: Claim, lease_s: float) -> None:
        self.instance = ""
        self._queue = queue
        self._claim = claim
        self._lease_s = lease_s
        self._asked = asyncio.Event()

    def look(self) -> None:
        """Something may have happened to the request."""
        self._asked.set()

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """What is done in it ends with ClaimLost when the claim is lost.

        While the queue cannot be reached the work goes on: nobody else can take the request then, and what counts is
        decided by the claim's token, not by time.
        """
        limit = asyncio.timeout(None)
        try:
            async with limit:
                beating = asyncio.get_running_loop().create_task(self._beat(limit))
                try:
                    yield
                finally:
                    beating.cancel()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ClaimLost(f"the claim of {self._claim.request.inference_id} is lost") from error

    async def _beat(self, limit: asyncio.Timeout) -> None:
        interval_s = self._lease_s / EXTENSIONS_PER_LEASE
        wait_s = min(FIRST_EXTENSION_S, interval_s)
        while True:
            with suppress(TimeoutError):  # not wait_for: Python 3.11's can lose a cancellation
                async with asyncio.timeout(wait_s):
                    await self._asked.wait()
            wait_s = interval_s
            self._asked.clear()
            try:
                is_ours = await self._queue.extend(self._claim, self._lease_s, instance=self.instance)
            except QueueUnavailable as error:
                logger.warning("lease not extended inference_id=%s error=%s", self._claim.request.inference_id, error)
                continue
            except Exception:
                logger.exception("lease not extended inference_id=%s", self._claim.request.inference_id)
                continue
            if not is_ours and not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
                return
