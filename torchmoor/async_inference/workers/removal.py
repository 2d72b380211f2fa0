"""The end of the requests that an endpoint leaves in the queue when it is removed.

They are decided as cancelled and then published like all others. So each has its failure object, and a later endpoint
of the same name does not run them. Requests that arrive meanwhile stay: they come from another proxy that shares the
queue and serves an endpoint of this name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import AsyncOutcome, AsyncState
from torchmoor.async_inference.workers.worker import Worker
from torchmoor.errors import QueueUnavailable
from torchmoor.fault_log import FaultLog

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 100  # requests that are cancelled together
POLL_S = 0.1


class NoCapacity:
    """The Capacity (see capacity.py) of an endpoint without instances: its worker only publishes."""

    max_running = 0

    def try_take(self) -> None:
        """Lease nothing."""

    def try_take_of(self, session_id: str, principal: str) -> None:
        """Lease nothing."""

    def find_url(self, session_id: str, principal: str) -> None:
        """Find nothing."""

    def is_lost(self, session_id: str, principal: str) -> bool:
        """Return True: the sessions have ended with their instances."""
        return True

    def listen(self, wake: Callable[[], None]) -> None:
        """Do nothing: there will never be capacity."""


class Removal:
    """Ends a removed endpoint's requests. worker: without capacity; not started. outcome: for undecided requests."""

    def __init__(self, worker: Worker, queue: Queue, outcome: AsyncOutcome) -> None:
        self._worker = worker
        self._queue = queue
        self._outcome = outcome
        self._newest: int | None = None  # the arrival of the last request that the endpoint has left
        self._faults = FaultLog(logger, worker.endpoint)

    async def run(self) -> None:
        """Cancel and publish until nothing is left; repeats what a store refuses now."""
        self._worker.start()
        try:
            while True:
                if not await self._has_more():
                    return
                await asyncio.sleep(POLL_S)
        finally:
            await self._worker.stop()

    async def _has_more(self) -> bool:
        """Cancel all undecided requests. Returns whether any request has not ended."""
        try:
            if self._newest is None:
                newest = await self._queue.list(self._worker.endpoint, limit=1, is_newest_first=True)
                self._newest = newest[0].arrival if newest else 0
            for state in (AsyncState.RUNNING, AsyncState.WAITING):  # another worker may return one from the first
                while ids := await self._list(state):
                    await asyncio.gather(*(self._queue.cancel(each, self._outcome) for each in ids))
                    self._worker.wake()
            states = (AsyncState.RUNNING, AsyncState.WAITING, AsyncState.DECIDED)
            return any([await self._list(state) for state in states])
        except QueueUnavailable as error:
            self._faults.add("requests of a removed endpoint not ended yet", error)
            return True

    async def _list(self, state: AsyncState) -> list[str]:
        """Return ids of the first requests in a state, without those that have arrived since the removal began."""
        assert self._newest is not None
        records = await self._queue.list(self._worker.endpoint, state, limit=MAX_AT_ONCE)
        return [each.request.inference_id for each in records if each.arrival <= self._newest]
