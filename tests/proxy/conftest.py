"""Run a proxy and its instances in a background event loop; tests use them over real sockets."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

import boto3
import pytest
import requests
import uvloop
from botocore.config import Config

from tests.decision_limits import leave_out_usual
from tests.proxy.fake_instance import FakeInstance
from tests.waiting import DEADLINE_S
from torchmoor.config.access import AccessSettings
from torchmoor.config.async_inference import AsyncEndpointSettings, AsyncInferenceSettings
from torchmoor.config.body_heap import DEFAULT_INFLIGHT_BODY_BYTES
from torchmoor.config.callers import CallerSettings
from torchmoor.config.chat_page import ChatPageSettings
from torchmoor.config.container import ContainerSettings
from torchmoor.config.credentials import Credentials
from torchmoor.config.health import HealthSettings
from torchmoor.config.limits import LimitSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.objects import ObjectSettings
from torchmoor.config.observe import ObserveSettings
from torchmoor.config.recovery import RecoverySettings
from torchmoor.config.routing import EndpointSettings, LateBindingSettings, MultiModelSettings, VariantSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.config.websocket import WebSocketSettings
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.app import Proxy
from torchmoor.run.data_plane import DataPlane
from torchmoor.wire.session_ids import compose

T = TypeVar("T")

PATH, GENERAL, FAST = "TORCHMOOR_TEST_PATH", "general", "fast"  # the variable that is a stage's `path`, and its values
KEY = b"0123456789abcdef0123456789abcdef"
CHUNKS_END = b"\r\n0\r\n\r\n"
LISTEN = ListenSettings(allowed_hosts=("x",), port=0, admin_port=0)
# Probes are off unless a test wants them: the tests check what the proxy notices by itself.
NO_PROBES = HealthSettings(starting_interval_s=3600, ready_interval_s=3600)


def make_session_id(
    instance: str,
    *,
    endpoint: str = "llava",
    key: bytes = KEY,
    nonce: str = "abcdefghijklmnop",
    principal: str = "",
) -> str:
    """Return an id as the handler of that instance would mint it."""
    expiry, key_id = "7fffffff", "k1"
    return compose(
        key, endpoint=endpoint, principal=principal, nonce=nonce, expiry=expiry, instance=instance, key_id=key_id
    )


class ProxyClock:
    """Monotonic time that a test can advance."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Stage:
    """A running proxy with two fake instances, `a` and `b`, of endpoint and model `llava`."""

    def __init__(
        self,
        *,
        limits: LimitSettings | None = None,
        callers: CallerSettings | None = None,
        timeouts: TimeoutSettings | None = None,
        health: HealthSettings = NO_PROBES,
        recovery: RecoverySettings | None = None,
        strategy: str = "LEAST_OUTSTANDING_REQUESTS",
        variants: tuple[VariantSettings, ...] = (),
        late_binding: LateBindingSettings | None = None,
        homes: Mapping[str, str] | None = None,  # the variants of instances, where there are several
        multi_model: MultiModelSettings | None = None,
        container: ContainerSettings | None = None,
        prepare: Callable[[Mapping[str, FakeInstance]], object] | None = None,  # before the proxy sees the instances
        endpoints: Mapping[str, str] | None = None,  # the endpoints of instances, where not all are of llava
        capacity: int = 64,
        max_inflight_body_bytes: int = DEFAULT_INFLIGHT_BODY_BYTES,
        names: tuple[str, ...] = ("a", "b"),
        are_journaled: bool = False,
        listen: ListenSettings = LISTEN,
        access: AccessSettings | None = None,
        credentials: Credentials | None = None,
        observe: ObserveSettings | None = None,
        chat_page: ChatPageSettings | None = None,
        websocket: WebSocketSettings | None = None,
        wall: Callable[[], float] = time.time,
        async_folder: Path | None = None,  # of inputs, results and the queue; None: the endpoints are not asynchronous
        async_config: AsyncEndpointSettings | None = None,
        path: str = os.environ.get(PATH, ""),
    ) -> None:
        """path: GENERAL, without the fast path; FAST, where no decision of a usual request is kept; else as it is."""
        variants = variants or (VariantSettings(model="llava", routing_strategy=strategy),)
        models = {variant.name: variant.model for variant in variants}
        self._endpoints = {name: (endpoints or {}).get(name, "llava") for name in names}
        self._homes = {name: (homes or {}).get(name, variants[0].name) for name in names}
        self._models = {name: models[self._homes[name]] for name in names}
        self.settings = ProxySettings(
            endpoints=tuple(
                EndpointSettings(
                    name=name,
                    variants=variants,
                    late_binding=late_binding,
                    multi_model=multi_model,
                    async_inference=async_config or (None if async_folder is None else AsyncEndpointSettings()),
                )
                for name in dict.fromkeys(self._endpoints.values())
            ),
            listen=listen,
            limits=limits or LimitSettings(),
            callers=callers or CallerSettings(),
            timeouts=timeouts or TimeoutSettings(sweep_interval_s=0.02),
            health=health,
            recovery=recovery or RecoverySettings(),
            sessions=SessionIdSettings(keys={"k1": KEY}, are_journaled=are_journaled),
            access=access or AccessSettings(),
            credentials=credentials or Credentials(),
            container=container or ContainerSettings(),
            **({} if async_folder is None else asynchronous(async_folder)),
            observe=observe or ObserveSettings(),
            chat_page=chat_page or ChatPageSettings(),
            websocket=websocket or WebSocketSettings(),
        )
        self._path = path
        self._wall = wall
        self._clock = ProxyClock()
        self.registry = Registry(self.settings.endpoints)
        self.instances = {name: FakeInstance(name) for name in names}
        if prepare is not None:
            prepare(self.instances)
        self._capacity = capacity
        self._max_inflight_body_bytes = max_inflight_body_bytes
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._closables: list[Any] = []
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    @property
    def a(self) -> FakeInstance:
        return self.instances["a"]

    @property
    def b(self) -> FakeInstance:
        return self.instances["b"]

    # Life

    def __enter__(self) -> Stage:
        self._thread.start()
        assert self._ready.wait(60)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self

    def __exit__(self, *exc: object) -> None:
        for thing in reversed(self._closables):
            thing.close()
        with suppress(RuntimeError):  # the loop is closed if a test has stopped the proxy itself
            self.loop.call_soon_threadsafe(self.stopping.set)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the proxy did not stop"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            uvloop.run(self._main())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.stopping = asyncio.Event()
        self.faults: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda loop, context: self.faults.append(context))
        for fake in self.instances.values():
            await fake.start()
            self.registry.add(
                Instance(
                    name=fake.name,
                    endpoint=self._endpoints[fake.name],
                    variant=self._homes[fake.name],
                    model=self._models[fake.name],
                    port=fake.port,
                    capacity=self._capacity,
                    max_inflight_body_bytes=self._max_inflight_body_bytes,
                    state=InstanceState.READY,
                )
            )
        proxy = Proxy(self.settings, self.registry, rng=Random(7), wall=self._wall, clock=self._clock)
        if isinstance(proxy.data, DataPlane):
            if self._path == GENERAL:
                proxy.data.server.fast_path = None
            elif self._path == FAST:
                leave_out_usual(proxy.data.dispatchers.decisions, self.settings.observe)
        async with proxy as self.proxy:
            await asyncio.sleep(0)
            # The first probe, which no setting prevents; wait until it has ended.
            while self.proxy.health.is_probing and self.settings.health is NO_PROBES:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            self._usual_tasks = set(asyncio.all_tasks())
            self._ready.set()
            await self.stopping.wait()
        for fake in self.instances.values():
            await fake.stop()

    # From the test's thread

    def run(self, work: Awaitable[T]) -> T:
        """Run a coroutine in the proxy's loop."""

        async def wrapped() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(wrapped(), self.loop).result(2 * DEADLINE_S)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the proxy's loop."""

        async def called() -> T:
            return function(*arguments)

        return self.run(called())

    def set_state(self, state: InstanceState, *names: str) -> None:
        """Set the state of these instances, or of all, as a probe does."""

        def change() -> None:
            for name in names or self.instances:
                self.registry.set_state(name, state)

        self.call(change)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Return as soon as the condition holds in the proxy's loop; fail after DEADLINE_S."""

        async def watch() -> bool:
            deadline = self.loop.time() + DEADLINE_S
            while not condition():
                if self.loop.time() > deadline:
                    return False
                await asyncio.sleep(0.002)
            return True

        assert self.run(watch()), f"never came: {what}; unusual tasks: {self.extra_tasks()}"

    def pass_time(self, seconds: float) -> None:
        """Have the proxy act on each deadline and breaker that is due within `seconds`, without waiting for it.

        What the proxy begins later has its full time again.
        """

        def look_ahead() -> None:
            self._clock.ahead_s = seconds
            with patch("torchmoor.proxy.http.exchange.monotonic", self._clock):
                self.proxy.data.sweeper.sweep()
                self.proxy.data.tick()
            self._clock.ahead_s = 0.0

        self.call(look_ahead)

    def instance(self, name: str) -> Instance:
        found = self.registry.find(name)
        assert found is not None
        return found

    def outstanding(self) -> int:
        return sum(instance.outstanding for instance in self.registry.instances())

    def check_clean(self) -> None:
        """Assert that no exchange, lease, kept byte or task is left and that every pooled connection is usable."""
        server = self.proxy.data.server
        self.until(lambda: all(c.exchange is None for c in server.connections), "all exchanges over")
        self.until(lambda: self.outstanding() == 0, "all leases released")
        self.until(lambda: self.extra_tasks() == [], "no task left")
        assert self.proxy.data.parts.budget.used_bytes == self.proxy.data.parts.continuations.used_bytes == 0
        assert self.proxy.data.parts.arriving.num_bytes == self.proxy.data.parts.spool.num_bytes == 0
        callers = self.proxy.data.dispatchers.callers
        assert callers is None or not callers.num_requests
        for instance in self.registry.instances():
            assert instance.inflight_body_bytes == 0
            for connection in instance.idle:
                assert not connection.transport.is_closing()
                assert connection.exchange is None
            assert len(set(map(id, instance.idle))) == len(instance.idle)
        for dispatcher in self.proxy.data.dispatchers.all():
            dispatcher.variant.pool.check_integrity()
            assert dispatcher.num_waiting == 0
            models = dispatcher.variant.models
            if models is not None:
                models.check_integrity()
                assert models.num_outstanding == 0
        assert self.proxy.data.dispatchers.waiting_bytes.used_bytes == 0
        sockets = self.proxy.data.application.sockets
        self.until(lambda: sockets.num_open == sockets.budget.used_bytes == 0, "no WebSocket connection left")
        assert self.faults == []

    def extra_tasks(self) -> list[str]:
        """Return the tasks of the proxy that an idle one does not have."""
        fakes = {task for fake in self.instances.values() for task in fake.tasks}
        left = asyncio.all_tasks(self.loop) - self._usual_tasks - fakes
        return [repr(task) for task in left if "Stage." not in repr(task)]

    # Clients

    def client(
        self,
        *,
        key_id: str = "AKIAEXAMPLE",
        secret: str = "secret",
        session_token: str | None = None,
        verify: str | None = None,
        **config: Any,
    ) -> Any:
        """Return an unmodified boto3 sagemaker-runtime client. verify: the certificate that it trusts."""
        client = boto3.client(
            "sagemaker-runtime",
            endpoint_url=self.proxy.runtime_url,
            region_name="us-east-1",
            aws_access_key_id=key_id,
            aws_secret_access_key=secret,
            aws_session_token=session_token,
            verify=verify,
            config=Config(retries={"total_max_attempts": 1}, read_timeout=DEADLINE_S, **config),
        )
        self._closables.append(client)
        return client

    def close_later(self, thing: Any) -> None:
        """Close a client or an answer's body when the stage ends."""
        self._closables.append(thing)

    def http(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.port, timeout=DEADLINE_S)
        self._closables.append(connection)
        return connection

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = {}
    ) -> http.client.HTTPResponse:
        """Send a request on a connection of its own. Return the answer, whose body is not read yet."""
        connection = self.http()
        connection.request(method, path, body, headers)
        return connection.getresponse()

    def admin(self, path: str, method: str = "GET", **options: Any) -> requests.Response:
        """Send a request to the admin plane. options: of requests."""
        return requests.request(method, self.proxy.admin_url + path, timeout=DEADLINE_S, **options)

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.proxy.port), timeout=DEADLINE_S)

    def send(self, data: bytes) -> socket.socket:
        """Send bytes on a connection of its own, which the stage closes; return the connection."""
        sock = self.socket()
        self._closables.append(sock)
        sock.sendall(data)
        return sock

    def raw(self, data: bytes) -> bytes:
        """Send bytes, and read until the proxy closes or a complete answer with Content-Length has arrived."""
        with self.socket() as sock:
            sock.sendall(data)
            return read_answer(sock)


MakeStage = Callable[..., Stage]


def asynchronous(folder: Path) -> dict[str, Any]:
    """Return the groups of ProxySettings that keep a queue, inputs and results in a folder."""
    (folder / "inputs").mkdir(exist_ok=True)
    return {
        "async_inference": AsyncInferenceSettings(
            queue=f"sqlite://{folder}/queue.db",
            output_root=(folder / "results").as_uri(),
            poll_interval_s=0.02,
            min_backoff_s=0.02,
        ),
        "objects": ObjectSettings(
            input_directories=(str(folder / "inputs"),), output_directories=(str(folder / "results"),)
        ),
    }


def instance_of(answer: bytes) -> str:
    """Return the instance of a successful answer."""
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return answer.partition(b"x-torchmoor-instance: ")[2].partition(b"\r\n")[0].decode()


def read_answer(sock: socket.socket, *, to_end: bool = False) -> bytes:
    """Read until one answer with Content-Length ends or, with `to_end`, until the connection ends."""
    data = bytearray()
    while True:
        if not to_end:
            head, end, body = bytes(data).partition(b"\r\n\r\n")
            lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if end and lengths and len(body) >= int(lengths[0]):
                break
        piece = sock.recv(65536)
        if not piece:
            break
        data += piece
    return bytes(data)


def read_until(sock: socket.socket, text: bytes) -> bytes:
    """Read until the text has come, and return all that was read. Fails if the connection ends before."""
    data = b""
    while text not in data:
        piece = sock.recv(65536)
        assert piece, data
        data += piece
    return data


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Return the default stage; assert at teardown that it is clean."""
    with Stage() as running:
        yield running
        running.check_clean()


@pytest.fixture
def make_stage() -> Iterator[MakeStage]:
    """Return a function that makes stages with other settings; assert at teardown that each is clean."""
    stages: list[Stage] = []

    def make(**options: Any) -> Stage:
        running = Stage(**options).__enter__()
        stages.append(running)
        return running

    yield make
    for running in stages:
        try:
            running.check_clean()
        finally:
            running.__exit__(None, None, None)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Restore the handlers of signals: uvloop leaves its own, with which SIGTERM does not end the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def quick_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the dashboard of each stage take samples, and its page ask for them, ten times as often as usual."""
    monkeypatch.setattr("torchmoor.admin.dashboard.page.INTERVAL_S", 0.2)
