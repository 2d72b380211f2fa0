"""Asynchronous inference for the rest of the proxy: submit, find and cancel requests; run the workers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from torchmoor.async_inference.backoff import Backoff
from torchmoor.async_inference.notifications.notifier import Notifier
from torchmoor.async_inference.objects.locations import ResultLocations, endpoint_paths, locate_results
from torchmoor.async_inference.objects.object_store import (
    Download,
    LocationRefused,
    ObjectError,
    ObjectMissing,
    ObjectStore,
)
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import AsyncOutcome, AsyncRecord, AsyncRequest, AsyncState, CallerShare
from torchmoor.async_inference.workers.capacity import Capacity
from torchmoor.async_inference.workers.context import WorkerContext
from torchmoor.async_inference.workers.instance_client import InstanceClient
from torchmoor.async_inference.workers.removal import NoCapacity, Removal
from torchmoor.async_inference.workers.worker import Worker
from torchmoor.config.async_inference import AsyncEndpointSettings, AsyncInferenceSettings
from torchmoor.errors import (
    ApiError,
    ConfigError,
    DiskFull,
    InternalFailure,
    QueueUnavailable,
    ResultLocationInUse,
    UnknownEndpoint,
    ValidationError,
)
from torchmoor.fault_log import FaultLog
from torchmoor.metrics.backlog import AsyncMetrics
from torchmoor.metrics.invocations import InvocationMetrics
from torchmoor.tasks import BackgroundTasks, cancel_all

logger = logging.getLogger(__name__)

BACKLOG_INTERVAL_S = 1.0  # between two readings of the backlog


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncParts:
    """Functions that connect to stores outside this process."""

    queue: Callable[[], Queue]
    store: Callable[[], ObjectStore]  # for inputs and results of requests
    results: Callable[[], ObjectStore]  # for the admin plane, which may read every result
    notifier: Callable[[], Notifier]


class AsyncEndpointContext:
    """An endpoint that accepts asynchronous requests.

    capacity: where this process runs them; None if another process does. root: default parent of the results.
    """

    def __init__(
        self, settings: AsyncEndpointSettings, metrics: AsyncMetrics, capacity: Capacity | None, *, root: str
    ) -> None:
        self.name = metrics.endpoint
        self.capacity = capacity
        self.metrics = metrics
        self.output_path, self.failure_path = endpoint_paths(settings, root, self.name)
        self.settings = settings


class AsyncInference:
    """Accepts asynchronous requests and runs them, within its context.

    wall: epoch seconds.
    on_submitted: called with the endpoint of each new request.
    """

    queue: Queue
    store: ObjectStore
    _results: ObjectStore

    def __init__(
        self,
        settings: AsyncInferenceSettings,
        parts: AsyncParts,
        *,
        connect_timeout_s: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.endpoints: dict[str, AsyncEndpointContext] = {}
        self.workers: dict[str, Worker] = {}
        self._notifier: Notifier | None = None  # while it runs
        self._draining: dict[asyncio.Task[None], Worker] = {}  # workers of endpoints that are gone
        self._num_result_bytes = 0  # as last measured
        self.on_submitted: Callable[[str], None] = lambda endpoint: None
        self._parts = parts
        self._wall = wall
        self._client = InstanceClient(connect_timeout_s=connect_timeout_s)
        self._submitting = BackgroundTasks(settings.max_submitting)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> AsyncInference:
        async with AsyncExitStack() as stack:
            self.queue = self._parts.queue()
            stack.push_async_callback(self.queue.close)
            stack.push_async_callback(self._submitting.finish)  # the queue bounds each in time
            self.store = self._parts.store()
            stack.push_async_callback(self.store.close)
            self._check_locations()
            self._results = self._parts.results()
            stack.push_async_callback(self._results.close)
            notifier = self._notifier = self._parts.notifier()
            stack.push_async_callback(notifier.close)
            await stack.enter_async_context(self._client)
            stack.push_async_callback(self._stop_workers)
            for endpoint in self.endpoints.values():
                self._start_worker(endpoint)
            loops = [asyncio.create_task(work) for work in (self._watch_queue(), self._sweep_store())]
            stack.push_async_callback(cancel_all, loops)
            self._stack = stack.pop_all()
        return self

    def add(self, endpoint: AsyncEndpointContext) -> None:
        """Accept the requests of one more endpoint, and run those that are in the queue already."""
        self.endpoints[endpoint.name] = endpoint
        endpoint.metrics.num_result_bytes = self._num_result_bytes
        if self._notifier is not None:
            self._start_worker(endpoint)

    def remove(self, name: str, drain_timeout_s: float) -> None:
        """Accept no further requests of an endpoint; what runs for longer than this returns to the queue."""
        self.endpoints.pop(name, None)
        worker = self.workers.pop(name, None)
        if worker is not None:
            task = asyncio.create_task(worker.drain(drain_timeout_s))
            self._draining[task] = worker
            task.add_done_callback(self._draining.pop)

    async def end_requests(self, name: str, settings: AsyncEndpointSettings, reason: str, timeout_s: float) -> None:
        """Cancel what a removed endpoint has left in the queue, and write the failure objects.

        Abandons objects that cannot be written within timeout_s. Returns when the last request has ended; may be
        repeated after a crash. Does nothing if an endpoint of this name accepts requests. reason: for the client.
        """
        if name in self.endpoints or self._notifier is None:
            return
        draining = [task for task, worker in self._draining.items() if worker.endpoint == name]
        await asyncio.gather(*map(asyncio.shield, draining), self._submitting.finish(), return_exceptions=True)
        metrics = AsyncMetrics(name, {"": InvocationMetrics(name, "")}, lambda: 0)  # counts that no page shows
        endpoint = AsyncEndpointContext(settings, metrics, NoCapacity(), root=self.settings.output_root)
        worker = self._make_worker(endpoint, ends_at=self._wall() + timeout_s)
        outcome = AsyncOutcome(state=AsyncState.CANCELLED, reason=reason)
        await Removal(worker, self.queue, outcome).run()

    async def _stop_workers(self) -> None:
        self._notifier = None
        draining = list(self._draining)
        await asyncio.gather(*(worker.stop() for worker in (*self.workers.values(), *self._draining.values())))
        await asyncio.gather(*draining)

    def _check_locations(self) -> None:
        """Raise ConfigError if the results of an endpoint cannot be written."""
        for name in self.endpoints:
            try:
                self.locate(name, "any", filename="", extension="")
            except LocationRefused as error:
                raise ConfigError(f"AsyncInferenceConfig of endpoint {name!r}: {error}") from error

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _start_worker(self, endpoint: AsyncEndpointContext) -> None:
        """Start the worker of an endpoint whose requests run in this process."""
        if endpoint.capacity is not None:
            worker = self.workers[endpoint.name] = self._make_worker(endpoint)
            worker.start()

    def _make_worker(self, endpoint: AsyncEndpointContext, ends_at: float = math.inf) -> Worker:
        assert self._notifier is not None  # it runs
        assert endpoint.capacity is not None
        context = WorkerContext(
            settings=self.settings,
            queue=self.queue,
            capacity=endpoint.capacity,
            store=self.store,
            client=self._client,
            notifier=self._notifier,
            endpoint=endpoint.settings,
            metrics=endpoint.metrics,
            output_path=endpoint.output_path,
            wall=self._wall,
            backoff=Backoff(self.settings.min_backoff_s, self.settings.max_backoff_s),
            faults=FaultLog(logger, endpoint.name),
            ends_at=ends_at,
        )
        return Worker(context)

    async def _watch_queue(self) -> None:
        """Read the backlogs for the metrics, and drop old requests from the queue."""
        faults = FaultLog(logger)
        while True:
            try:
                num_bytes = await self.queue.size_bytes()
                for endpoint in list(self.endpoints.values()):
                    backlog, metrics = await self.queue.backlog(endpoint.name), endpoint.metrics
                    metrics.num_waiting, metrics.num_running = backlog.waiting, backlog.running
                    metrics.oldest_age_s = backlog.oldest_age_s
                    metrics.num_queue_bytes = num_bytes
                while await self.queue.forget():
                    pass
            except Exception as error:
                faults.add("backlog unknown", error, has_trace=not isinstance(error, QueueUnavailable))
            await asyncio.sleep(BACKLOG_INTERVAL_S)

    async def _sweep_store(self) -> None:
        """Measure the stored results, and remove what killed processes left."""
        while True:
            try:
                self._num_result_bytes = await self.store.sweep()
                for endpoint in self.endpoints.values():
                    endpoint.metrics.num_result_bytes = self._num_result_bytes
            except Exception:
                logger.exception("results could not be measured")
            await asyncio.sleep(self.settings.sweep_interval_s)

    def locate(self, endpoint: str, inference_id: str, *, filename: str, extension: str) -> ResultLocations:
        """Return where a request's result or failure will be stored. Raises LocationRefused, UnknownEndpoint."""
        found = self._find_endpoint(endpoint)
        locations = locate_results(
            found.output_path, found.failure_path, inference_id, filename=filename, extension=extension
        )
        self.store.check_output(locations.output)
        self.store.check_output(locations.failure)
        return locations

    def _find_endpoint(self, name: str) -> AsyncEndpointContext:
        found = self.endpoints.get(name)
        if found is None:  # removed since the request arrived
            raise UnknownEndpoint(name)
        return found

    async def submit(self, request: AsyncRequest, share: CallerShare | None = None) -> AsyncRequest:
        """Queue a request, as `Queue.submit`, and wake this process's worker. Other processes poll for it.

        Raises UnknownEndpoint if its endpoint was removed.
        """
        self._find_endpoint(request.endpoint)
        stored = await self.queue.submit(request, refusal=await self._find_refusal(request), share=share)
        worker = self.workers.get(request.endpoint)
        if worker is not None:
            worker.wake()
        self.on_submitted(request.endpoint)
        return stored

    async def _find_refusal(self, request: AsyncRequest) -> ApiError | None:
        """Return why the store would not take the request's result, if it can say so in time."""
        if request.response_id:  # an instance keeps it
            return None
        try:
            async with asyncio.timeout(self.settings.check_timeout_s):
                if any(await asyncio.gather(*map(self.store.is_taken, request.locations))):
                    return ResultLocationInUse()
                shortage = await self.store.find_shortage(request.output_location)
        except LocationRefused as error:
            return ValidationError(str(error))
        except (ObjectError, TimeoutError):
            return None  # publication finds out
        return None if shortage is None else DiskFull(shortage)

    def try_submit(
        self,
        request: AsyncRequest,
        on_done: Callable[[AsyncRequest | ApiError], None],
        share: CallerShare | None,
    ) -> bool:
        """Submit in the background; on_done is called once, unless the proxy stops. Returns False at max_submitting."""
        if self._submitting.is_full:
            return False

        async def run() -> None:
            try:
                on_done(await self.submit(request, share))
            except ApiError as error:
                on_done(error)
            except Exception:
                logger.exception("submit failed inference_id=%s", request.inference_id)
                on_done(InternalFailure(f"The proxy failed to queue the request {request.inference_id}."))

        self._submitting.start(run())
        return True

    async def cancel(self, inference_id: str) -> AsyncState | None:
        """Cancel a request, as `Queue.cancel`. If a worker of this process runs it, it stops at once."""
        state = await self.queue.cancel(inference_id)
        for worker in (*self.workers.values(), *self._draining.values()):
            worker.check_claim(inference_id)
            worker.wake()
        return state

    async def open_result(self, record: AsyncRecord) -> Download:
        """Open the result of a completed request. Raises ObjectError."""
        if record.request.response_id:
            raise ObjectMissing("This is a response in the background, which its instance keeps for its client.")
        return await self._results.open(record.request.output_location)
