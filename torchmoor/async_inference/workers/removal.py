"""The end of the requests that an endpoint leaves in the queue when it is removed.

They are decided as cancelled and then published like all others, so each has one object, and nothing is left that a
later endpoint of the same name would run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import AsyncOutcome, AsyncState
from torchmoor.async_inference.workers.fault_log import FaultLog
from torchmoor.async_inference.workers.worker import Worker
from torchmoor.errors import QueueUnavailable

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 100  # requests that are cancelled together
POLL_S = 0.1


class NoCapacity:
    """The Capacity (see capacity.py) of an endpoint without instances: its worker only publishes."""

    num_ready = 0
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
    """Ends a removed endpoint's requests. worker: without capacity; not started. outcome: of undecided requests."""

    def __init__(self, worker: Worker, queue: Queue, outcome: AsyncOutcome) -> None:
        self._worker = worker
        self._queue = queue
        self._outcome = outcome
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
            for state in (AsyncState.RUNNING, AsyncState.WAITING):  # another worker may return one from the first
                while records := await self._queue.list(self._worker.endpoint, state, limit=MAX_AT_ONCE):
                    ids = [record.request.inference_id for record in records]
                    await asyncio.gather(*(self._queue.cancel(each, self._outcome) for each in ids))
                    self._worker.wake()
            backlog = await self._queue.backlog(self._worker.endpoint)
        except QueueUnavailable as error:
            self._faults.add("requests of a removed endpoint not ended yet", error)
            return True
        return bool(backlog.waiting or backlog.running or backlog.decided)
