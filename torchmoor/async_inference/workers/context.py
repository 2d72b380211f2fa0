"""The parts that the worker of one endpoint uses in every step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count

from torchmoor.async_inference.backoff import Backoff
from torchmoor.async_inference.notifications.notifier import Notifier
from torchmoor.async_inference.objects.object_store import ObjectStore
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import AsyncRequest
from torchmoor.async_inference.workers.capacity import Capacity
from torchmoor.async_inference.workers.instance_client import InstanceClient
from torchmoor.config.async_inference import AsyncEndpointSettings, AsyncInferenceSettings
from torchmoor.errors import QueueUnavailable
from torchmoor.fault_log import FaultLog
from torchmoor.metrics.backlog import AsyncMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """output_path: parent of the results. wall: epoch seconds. ends_at: when objects are abandoned, by `wall`."""

    settings: AsyncInferenceSettings
    queue: Queue
    capacity: Capacity
    store: ObjectStore
    client: InstanceClient
    notifier: Notifier
    endpoint: AsyncEndpointSettings
    metrics: AsyncMetrics
    output_path: str
    wall: Callable[[], float]
    backoff: Backoff
    faults: FaultLog
    ends_at: float

    def delay_since_s(self, request: AsyncRequest) -> float:
        """Return the seconds to wait before the next try. They grow with the request's age."""
        return self.backoff.delay_since_s(self.wall() - request.received_at)

    async def until_answered(self, call: Callable[[], Awaitable[bool]], request: AsyncRequest, fault: str) -> bool:
        """Repeat a call of the queue, without which the request cannot go on, until the queue answers.

        Returns the answer. fault: how the log names a call that the queue did not answer.
        """
        for failures in count(1):
            try:
                return await call()
            except QueueUnavailable as error:
                self.faults.add(fault, error, inference_id=request.inference_id)
                await asyncio.sleep(self.backoff.delay_s(failures))
        raise AssertionError("unreachable")
