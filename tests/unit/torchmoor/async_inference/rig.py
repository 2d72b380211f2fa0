"""Asynchronous inference with a real queue, directory and HTTP, and instances with scripted behaviour."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.proxy.fake_instance import Behaviour, FakeInstance, Gate, Received, Wire
from tests.waiting import DEADLINE_S
from torchmoor.async_inference.notifications.notification import Notification
from torchmoor.async_inference.notifications.notifier import Notifier
from torchmoor.async_inference.objects.directory_store import DirectoryStore
from torchmoor.async_inference.objects.object_store import ObjectStore
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.queues.queue_url import open_queue
from torchmoor.async_inference.queues.sqlite_queue import SqliteQueue
from torchmoor.async_inference.request import AsyncRecord, AsyncRequest
from torchmoor.async_inference.service import AsyncEndpointContext, AsyncInference, AsyncParts
from torchmoor.config.async_inference import AsyncEndpointSettings, AsyncInferenceSettings
from torchmoor.config.async_queue import AsyncQueueSettings
from torchmoor.config.objects import ObjectSettings
from torchmoor.metrics.backlog import AsyncMetrics
from torchmoor.metrics.invocations import InvocationMetrics

QUICK = AsyncInferenceSettings(
    lease_s=20.0, poll_interval_s=0.02, min_backoff_s=0.01, max_backoff_s=0.02, max_inline_bytes=1000
)


class Places:
    """Capacity (see torchmoor.async_inference.workers.capacity) of a test's instances; num_free: at each instance."""

    def __init__(self, instances: list[FakeInstance], num_free: int = 4) -> None:
        self.instances = instances
        self.num_free = num_free
        self.held: list[Place] = []
        self.most_held = 0
        self.abandoned: list[str] = []
        self.failures: list[tuple[str, bool]] = []  # instance, whether it seemed dead
        self._wakes: list[Callable[[], None]] = []

    def try_take(self) -> Place | None:
        by_load = sorted(self.instances, key=lambda each: sum(place.instance == each.name for place in self.held))
        for instance in by_load:
            if sum(place.instance == instance.name for place in self.held) < self.num_free:
                place = Place(self, instance)
                self.held.append(place)
                self.most_held = max(self.most_held, len(self.held))
                return place
        return None

    @property
    def max_running(self) -> int:
        return len(self.instances) * self.num_free

    def listen(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    def wake(self) -> None:
        for wake in self._wakes:
            wake()


class Place:
    def __init__(self, places: Places, instance: FakeInstance) -> None:
        self.instance = instance.name
        self.variant = "AllTraffic"
        self.url = f"http://127.0.0.1:{instance.port}/predictions/llava"
        self.max_body_bytes = 1 << 40
        self._places = places

    def try_hold_body(self, num_bytes: int) -> bool:
        return True

    def release(self) -> None:
        if self in self._places.held:
            self._places.held.remove(self)
            self._places.wake()

    def on_answered(self) -> None:
        pass

    def on_failed(self, *, is_dead: bool) -> None:
        self._places.failures.append((self.instance, is_dead))

    def on_unreachable(self) -> None:
        self._places.failures.append((self.instance, True))

    def abandon(self, request_id: str) -> None:
        self._places.abandoned.append(request_id)


class Listener(Notifier):
    """Records its notifications and reports the first `num_failed` of each as failed."""

    def __init__(self) -> None:
        self.notices: list[Notification] = []
        self.num_failed = 0

    async def notify(self, notice: Notification, endpoint: AsyncEndpointSettings) -> int:
        self.notices.append(notice)
        return self.num_failed

    async def close(self) -> None:
        pass


class Rig:
    """A folder with a queue and results, and any number of services on it, each standing for a process."""

    def __init__(self, folder: Path, settings: AsyncInferenceSettings = QUICK) -> None:
        self.folder = folder
        self.settings = settings
        self.objects = ObjectSettings(
            input_directories=(str(folder / "inputs"),),
            output_directories=(str(folder / "results"),),
            max_output_bytes=4 << 20,
        )
        self.instance = FakeInstance("a")
        self.places = Places([self.instance])
        self.listener = Listener()
        self.now: Callable[[], float] | None = None  # the queue's clock, if not the usual one
        self.make_store: Callable[[], ObjectStore] = self.directory
        self.wrap_queue: Callable[[Queue], Queue] = lambda queue: queue
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Rig:
        (self.folder / "inputs").mkdir(parents=True, exist_ok=True)
        (self.folder / "results").mkdir(exist_ok=True)
        await self.instance.start()
        self._stack.push_async_callback(self.instance.stop)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()
        assert self.places.held == [], "a place was not given back"

    def directory(self) -> DirectoryStore:
        return DirectoryStore(self.objects)

    def make_queue(self) -> Queue:
        clock = {} if self.now is None else {"clock": self.now}
        return self.wrap_queue(SqliteQueue(self.folder / "queue.db", AsyncQueueSettings(), **clock))

    def make_service(self, **changes: Any) -> AsyncInference:
        counts = {"AllTraffic": InvocationMetrics("llava", "AllTraffic")}
        endpoint = AsyncEndpointContext(
            AsyncEndpointSettings(),
            AsyncMetrics("llava", counts, lambda: len(self.places.instances)),
            self.places,
            root=(self.folder / "results").as_uri(),
        )
        parts = AsyncParts(
            queue=self.make_queue, store=self.make_store, results=self.directory, notifier=lambda: self.listener
        )
        wall = {"wall": self.now} if self.now is not None else {}
        settings = self.settings.replace(**changes)
        service = AsyncInference(settings, parts, connect_timeout_s=1.0, **wall)
        service.add(endpoint)
        return service

    async def start(self, **changes: Any) -> AsyncInference:
        """Start a service that runs until the rig ends."""
        return await self._stack.enter_async_context(self.make_service(**changes))

    def request(self, inference_id: str, body: bytes | None = b"{}", **changes: Any) -> AsyncRequest:
        results = self.folder / "results"
        outputs, failures = results / "async-endpoint-outputs/llava", results / "async-endpoint-failures/llava"
        return AsyncRequest(
            inference_id=inference_id,
            endpoint="llava",
            output_location=(outputs / f"{inference_id}.out").as_uri(),
            failure_location=(failures / f"{inference_id}-error.out").as_uri(),
            body=None if "input_location" in changes else body,
            **changes,
        )

    def input(self, name: str, content: bytes) -> str:
        """Write an input object and return its URL."""
        path = self.folder / "inputs" / name
        path.write_bytes(content)
        return path.as_uri()

    def results(self) -> dict[str, bytes]:
        """Return all objects by name, including staged and unfinished ones."""
        root = self.folder / "results"
        return {path.name: path.read_bytes() for path in root.rglob("*") if path.is_file()}

    async def until_ended(self, service: AsyncInference, inference_id: str) -> AsyncRecord:
        found: list[AsyncRecord] = []

        async def has_ended() -> bool:
            record = await service.queue.get(inference_id)
            if record is not None and record.state.is_end:
                found.append(record)
            return bool(found)

        await until(has_ended, f"{inference_id} has ended")
        return found[0]

    async def run_one(self, **settings: Any) -> AsyncRecord:
        """Start a service, and have it bring the request `one` to its end."""
        service = await self.start(**settings)
        await service.submit(self.request("one"))
        return await self.until_ended(service, "one")


class UrlRig(Rig):
    """A rig on any kind of queue."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder, QUICK.replace(output_root=(folder / "results").as_uri()))
        self._url = url

    def make_queue(self) -> Queue:
        return open_queue(self._url, AsyncQueueSettings())


def never_answering(gate: Gate) -> Behaviour:
    """Return a behaviour that answers nothing until its client leaves. gate: is reached by each request."""

    async def behave(received: Received, wire: Wire) -> None:
        gate.reached.set()
        await wire.until_closed()

    return behave


async def until(condition: Callable[[], Awaitable[bool] | bool], what: str) -> None:
    """Repeat a check until it holds."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        said = condition()
        if (said if isinstance(said, bool) else await said) is True:
            return
        assert asyncio.get_running_loop().time() < deadline, f"never came: {what}"
        await asyncio.sleep(0.01)
