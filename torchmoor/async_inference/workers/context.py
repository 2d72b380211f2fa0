"""The parts that the worker of one endpoint uses in every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torchmoor.async_inference.backoff import Backoff
from torchmoor.async_inference.notifications.notifier import Notifier
from torchmoor.async_inference.objects.object_store import ObjectStore
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.workers.capacity import Capacity
from torchmoor.async_inference.workers.instance_client import InstanceClient
from torchmoor.config.async_inference import AsyncEndpointSettings, AsyncInferenceSettings
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
    ends_at: float = math.inf
