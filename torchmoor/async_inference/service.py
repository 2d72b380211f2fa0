"""Asynchronous inference as the rest of the proxy sees it: submit, look, cancel; and the workers behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType

from torchmoor.async_inference.attempt import Means
from torchmoor.async_inference.instance_client import InstanceClient
from torchmoor.async_inference.locations import (
    ResultLocations,
    default_failure_path,
    default_output_path,
    locate_results,
)
from torchmoor.async_inference.metrics import AsyncMetrics
from torchmoor.async_inference.notices import Notifier, Topics
from torchmoor.async_inference.object_store import Download, ObjectStore
from torchmoor.async_inference.publication import Publisher
from torchmoor.async_inference.queue import Queue
from torchmoor.async_inference.request import AsyncRequest, Record, State
from torchmoor.async_inference.settings import AsyncEndpointSettings, AsyncInferenceSettings
from torchmoor.async_inference.slots import Slots
from torchmoor.async_inference.worker import Worker


@dataclass(frozen=True, slots=True)
class AsyncEndpoint:
    """An endpoint that takes asynchronous requests. variants: the names of them."""

    name: str
    settings: AsyncEndpointSettings
    variants: tuple[str, ...]
    slots: Slots

    def output_path(self, root: str) -> str:
        """Where its results go."""
        return self.settings.output_path or default_output_path(root, self.name)

    def failure_path(self, root: str) -> str:
        """Where its failures go."""
        return self.settings.failure_path or default_failure_path(
            root or self.settings.output_path.rstrip("/"), self.name
        )


class AsyncInference:
    """For as long as the context lasts. Closes the queue, the store and the notifier that it was given."""

    def __init__(
        self,
        settings: AsyncInferenceSettings,
        endpoints: Sequence[AsyncEndpoint],
        queue: Queue,
        store: ObjectStore,
        notifier: Notifier,
        *,
        connect_timeout_s: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.queue = queue
        self.store = store
        self._endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self._notifier = notifier
        self._client = InstanceClient(connect_timeout_s=connect_timeout_s)
        self._stack = AsyncExitStack()
        self.workers: Mapping[str, Worker] = {each.name: self._make_worker(each, wall) for each in endpoints}

    def _make_worker(self, endpoint: AsyncEndpoint, wall: Callable[[], float]) -> Worker:
        metrics = AsyncMetrics(endpoint.name, endpoint.variants, lambda: endpoint.slots.num_ready)
        config = endpoint.settings
        output_path = endpoint.output_path(self.settings.output_root)
        means = Means(
            store=self.store, client=self._client, settings=self.settings, metrics=metrics, output_path=output_path
        )
        publisher = Publisher(
            queue=self.queue,
            store=self.store,
            notifier=self._notifier,
            metrics=metrics,
            topics=Topics(
                success_topic=config.success_topic,
                error_topic=config.error_topic,
                include_response_in=config.include_response_in,
            ),
            output_path=output_path,
            max_delay_s=self.settings.max_backoff_s,
            wall=wall,
        )
        return Worker(endpoint.name, self.queue, endpoint.slots, means, publisher, wall)

    async def __aenter__(self) -> AsyncInference:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.queue.close)
            stack.push_async_callback(self.store.close)
            stack.push_async_callback(self._notifier.close)
            await stack.enter_async_context(self._client)
            for worker in self.workers.values():
                await stack.enter_async_context(worker)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def serves(self, endpoint: str) -> bool:
        """True if the endpoint takes asynchronous requests."""
        return endpoint in self._endpoints

    @property
    def endpoints(self) -> Sequence[str]:
        """The names of those that do."""
        return list(self._endpoints)

    def locate(self, endpoint: str, inference_id: str, *, filename: str, extension: str) -> ResultLocations:
        """Where a request's result or failure will be. Raises LocationRefused."""
        root, config = self.settings.output_root, self._endpoints[endpoint]
        locations = locate_results(
            config.output_path(root), config.failure_path(root), inference_id, filename=filename, extension=extension
        )
        self.store.check_output(locations.output)
        self.store.check_output(locations.failure)
        return locations

    async def submit(self, request: AsyncRequest) -> AsyncRequest:
        """As `Queue.submit`; a worker of this process looks at once."""
        stored = await self.queue.submit(request)
        self.workers[request.endpoint].wake()
        return stored

    async def cancel(self, inference_id: str) -> State | None:
        """As `Queue.cancel`; if a worker of this process has it, it stops at once."""
        state = await self.queue.cancel(inference_id)
        for worker in self.workers.values():
            worker.look(inference_id)
            worker.wake()
        return state

    async def open_result(self, record: Record) -> Download:
        """What was published for a request that has ended. Raises ObjectError."""
        request = record.request
        return await self.store.open(
            request.output_location if record.state is State.COMPLETED else request.failure_location
        )
