"""Asynchronous inference as the rest of the proxy sees it: submit, look, cancel; and the workers behind it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType

from torchmoor.async_inference.notifications.notifier import NotificationTopics, Notifier
from torchmoor.async_inference.objects.locations import (
    ResultLocations,
    default_failure_path,
    default_output_path,
    locate_results,
)
from torchmoor.async_inference.objects.object_store import Download, LocationRefused, ObjectStore
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import AsyncRecord, AsyncRequest, AsyncState
from torchmoor.async_inference.workers.attempt import AttemptContext
from torchmoor.async_inference.workers.capacity import Capacity
from torchmoor.async_inference.workers.instance_client import InstanceClient
from torchmoor.async_inference.workers.publication import Publisher
from torchmoor.async_inference.workers.worker import Worker
from torchmoor.config.asynchronous import AsyncEndpointSettings, AsyncInferenceSettings
from torchmoor.errors import ApiError, ConfigError, InternalFailure, QueueUnavailable
from torchmoor.metrics.asynchronous import AsyncMetrics

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0  # at the backlog


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncParts:
    """What lies outside of this process, as functions that open it."""

    queue: Callable[[], Queue]
    store: Callable[[], ObjectStore]  # for inputs and results of requests
    results: Callable[[], ObjectStore]  # for those who may read every result
    notifier: Callable[[], Notifier]


class AsyncEndpointContext:
    """An endpoint that takes asynchronous requests.

    capacity: where this process runs them; None if another process does. root: of results without a path of their own.
    """

    def __init__(
        self, settings: AsyncEndpointSettings, metrics: AsyncMetrics, capacity: Capacity | None, *, root: str
    ) -> None:
        self.name = metrics.endpoint
        self.capacity = capacity
        self.metrics = metrics
        self.output_path = settings.output_path or default_output_path(root, self.name)
        self.failure_path = settings.failure_path or default_failure_path(root or settings.output_path, self.name)
        self.topics = NotificationTopics(
            success_topic=settings.success_topic,
            error_topic=settings.error_topic,
            include_response_in=settings.include_response_in,
        )


class AsyncInference:
    """For as long as the context lasts. wall: epoch seconds. on_submitted: told of each request's endpoint."""

    queue: Queue
    store: ObjectStore
    _results: ObjectStore

    def __init__(
        self,
        settings: AsyncInferenceSettings,
        endpoints: Sequence[AsyncEndpointContext],
        parts: AsyncParts,
        *,
        connect_timeout_s: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self.workers: dict[str, Worker] = {}
        self.on_submitted: Callable[[str], None] = _nobody
        self._parts = parts
        self._wall = wall
        self._client = InstanceClient(connect_timeout_s=connect_timeout_s)
        self._submitting: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> AsyncInference:
        async with AsyncExitStack() as stack:
            self.queue = self._parts.queue()
            stack.push_async_callback(self.queue.close)
            stack.push_async_callback(self._stop_submitting)
            self.store = self._parts.store()
            stack.push_async_callback(self.store.close)
            self._check_places()
            self._results = self._parts.results()
            stack.push_async_callback(self._results.close)
            notifier = self._parts.notifier()
            stack.push_async_callback(notifier.close)
            await stack.enter_async_context(self._client)
            for endpoint in self.endpoints.values():
                if endpoint.capacity is not None:
                    worker = self.workers[endpoint.name] = self._make_worker(endpoint, endpoint.capacity, notifier)
                    await stack.enter_async_context(worker)
            watching = asyncio.get_running_loop().create_task(self._watch())
            stack.push_async_callback(asyncio.wait, (watching,))
            stack.callback(watching.cancel)
            self._stack = stack.pop_all()
        return self

    def _check_places(self) -> None:
        """Raise ConfigError if an endpoint's results may not be written where they are to go."""
        for name in self.endpoints:
            try:
                self.locate(name, "any", filename="", extension="")
            except LocationRefused as error:
                raise ConfigError(f"AsyncInferenceConfig of endpoint {name!r}: {error}") from error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _stop_submitting(self) -> None:
        """The queue ends each in its time; whoever asked may have gone."""
        await asyncio.gather(*self._submitting, return_exceptions=True)

    def _make_worker(self, endpoint: AsyncEndpointContext, capacity: Capacity, notifier: Notifier) -> Worker:
        context = AttemptContext(
            store=self.store,
            client=self._client,
            settings=self.settings,
            metrics=endpoint.metrics,
            output_path=endpoint.output_path,
        )
        publisher = Publisher(
            queue=self.queue,
            store=self.store,
            notifier=notifier,
            metrics=endpoint.metrics,
            topics=endpoint.topics,
            output_path=endpoint.output_path,
            max_delay_s=self.settings.max_backoff_s,
            wall=self._wall,
        )
        return Worker(endpoint.name, self.queue, capacity, context, publisher, self._wall)

    async def _watch(self) -> None:
        """Look at the backlogs, for metrics; and have the queue forget what is old."""
        while True:
            try:
                for endpoint in self.endpoints.values():
                    endpoint.metrics.backlog = await self.queue.backlog(endpoint.name)
                while await self.queue.forget():
                    pass
            except QueueUnavailable as error:
                logger.warning("backlog unknown error=%s", error)
            except Exception:
                logger.exception("fault while looking at the backlog")
            await asyncio.sleep(LOOK_INTERVAL_S)

    def locate(self, endpoint: str, inference_id: str, *, filename: str, extension: str) -> ResultLocations:
        """Where a request's result or failure will be. Raises LocationRefused."""
        found = self.endpoints[endpoint]
        locations = locate_results(
            found.output_path, found.failure_path, inference_id, filename=filename, extension=extension
        )
        self.store.check_output(locations.output)
        self.store.check_output(locations.failure)
        return locations

    async def submit(self, request: AsyncRequest) -> AsyncRequest:
        """As `Queue.submit`; a worker of this process looks at once, another's soon."""
        stored = await self.queue.submit(request)
        worker = self.workers.get(request.endpoint)
        if worker is not None:
            worker.wake()
        self.on_submitted(request.endpoint)
        return stored

    def try_submit(self, request: AsyncRequest, on_done: Callable[[AsyncRequest | ApiError], None]) -> bool:
        """`submit` by and by; on_done is called once, unless we stop. False if too many are being submitted."""
        if len(self._submitting) >= self.settings.max_submitting:
            return False

        async def run() -> None:
            try:
                on_done(await self.submit(request))
            except ApiError as error:
                on_done(error)
            except Exception:
                logger.exception("fault inference_id=%s", request.inference_id)
                on_done(InternalFailure(f"The proxy failed to queue the request {request.inference_id}."))

        task = asyncio.get_running_loop().create_task(run())
        self._submitting.add(task)
        task.add_done_callback(self._submitting.discard)
        return True

    async def cancel(self, inference_id: str) -> AsyncState | None:
        """As `Queue.cancel`; if a worker of this process has it, it stops at once."""
        state = await self.queue.cancel(inference_id)
        for worker in self.workers.values():
            worker.look(inference_id)
            worker.wake()
        return state

    async def open_result(self, record: AsyncRecord) -> Download:
        """The result of a request that has completed. Raises ObjectError."""
        return await self._results.open(record.request.output_location)


def _nobody(endpoint: str) -> None:
    """Nobody starts instances here."""
