"""Runs the users, instances and proxies of routing.py in separate processes, which communicate over real sockets."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random
from time import perf_counter
from typing import cast

import uvloop

from benchmarks.routing_simulation import Run, service_time
from torchmoor.config.health import HealthSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.routing import EndpointSettings, LateBindingSettings, VariantSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.app import Proxy

ARMS = ("random", "least_outstanding", "late_binding")
PROCESSES = (1, 2, 4)
UNBOUNDED = 10_000  # capacity: requests wait in the instance's queue, not in the proxy's


@dataclass(frozen=True)
class Row:
    """A number of users and of instances, which take one request at a time."""

    users: int
    instances: int
    mean_s: float

    def endpoint(self, arm: str) -> str:
        return f"{arm.replace('_', '-')}-{self.users}-{self.instances}-{self.mean_s * 1000:.0f}ms"


class ServedRequests(asyncio.Protocol):
    """A connection of an instance. Each body is the request's service time in microseconds."""

    def __init__(self, instance: "ServingInstance") -> None:
        self._instance = instance
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET") or b"x-torchmoor-operation:" in head.lower():  # a probe or a status request
            self._data = b""
            self._answer(b"")
            return
        lines = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lines[0][15:])
        if len(body) >= length:
            self._data = b""
            self._instance.serve(int(body) / 1e6, lambda: self._answer(body))

    def _answer(self, body: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


class ServingInstance:
    """An instance that serves one request at a time, in the order of their arrival."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._free_at = 0.0

    def serve(self, service_s: float, answer: Callable[[], None]) -> None:
        self._free_at = max(self._free_at, self._loop.time()) + service_s
        self._loop.call_at(self._free_at, answer)


def serve_instances(num_instances: int, pipe: Connection) -> None:
    """Serve instances in this process and report their ports, until the parent ends it."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        ports = []
        for _ in range(num_instances):
            instance = ServingInstance(loop)
            server = await loop.create_server(lambda instance=instance: ServedRequests(instance), "127.0.0.1", 0)
            ports.append(server.sockets[0].getsockname()[1])
        pipe.send(ports)
        await loop.run_in_executor(None, pipe.recv)

    uvloop.run(serve())


def serve_proxy(rows: Sequence[Row], ports: Sequence[int], processes: int, pipe: Connection) -> None:
    """Run the proxy and send its port. Each row and arm has an endpoint; the arms of a row share its instances."""

    async def serve() -> None:
        endpoints, instances = [], []
        taken = 0  # ports of the rows before: all rows run at the same time
        for row in rows:
            own = ports[taken : taken + row.instances]
            taken += row.instances
            for arm in ARMS if processes == 1 else ARMS[:2]:  # late binding needs one process
                is_late = arm == "late_binding"
                name = row.endpoint(arm)
                strategy = "RANDOM" if arm == "random" else "LEAST_OUTSTANDING_REQUESTS"
                endpoints.append(
                    EndpointSettings(
                        name=name,
                        variants=(VariantSettings(model=name, routing_strategy=strategy),),
                        late_binding=LateBindingSettings(max_wait_s=60.0) if is_late else None,
                    )
                )
                instances += [
                    Instance(
                        name=f"{name}-{number}",
                        endpoint=name,
                        model=name,
                        port=port,
                        capacity=1 if is_late else UNBOUNDED,
                        state=InstanceState.READY,
                    )
                    for number, port in enumerate(own)
                ]
        settings = ProxySettings(
            endpoints=tuple(endpoints),
            listen=ListenSettings(port=0, admin_port=0, processes=processes),
            # Rare probes: many names share few ports, and the instances never fail.
            health=HealthSettings(ready_interval_s=600, status_interval_s=3600),
        )
        registry = Registry(settings.endpoints)
        for instance in instances:
            registry.add(instance)
        async with Proxy(settings, registry, rng=Random(5)) as proxy:
            pipe.send(proxy.port)
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)

    uvloop.run(serve())


@contextlib.contextmanager
def undisturbed() -> Iterator[bool]:
    """Give this process, and those that it starts meanwhile, priority over other work; yield whether that is allowed.

    Users, proxy and instances mostly wait. When other work uses all cores, waking up takes longer than choosing an
    instance, so the measurement would show the machine's scheduler instead.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, *before)


@contextlib.contextmanager
def stage(rows: Sequence[Row]) -> Iterator[dict[int, int]]:
    """Start the rows' instances and one proxy for each number of PROCESSES; yield the proxies' ports by that number."""
    context = get_context("spawn")
    with contextlib.ExitStack() as stack:

        def start(target: Callable[..., None], *args: object) -> object:
            here, there = context.Pipe()
            process = context.Process(target=target, args=(*args, there), daemon=True)
            process.start()
            stack.callback(process.join, 20)
            stack.callback(here.send, None)
            if not here.poll(60):
                raise RuntimeError(f"{target.__name__} did not start within 60 s")
            return here.recv()

        ports = start(serve_instances, sum(row.instances for row in rows))
        found = {}
        for number in PROCESSES:
            port = start(serve_proxy, list(rows), ports, number)
            assert isinstance(port, int)
            found[number] = port
        yield found


def ask(
    port: int,
    rows: Sequence[Row],
    arm: str,
    *,
    seed: int,
    duration_s: float,
    warm_up_s: float,
    is_roaming: bool = False,
) -> dict[Row, Run]:
    """Run all users of these rows at once against one arm. With the same seed, they send the same in every arm.

    is_roaming: each request uses its own connection, so any proxy process may get it.
    """

    async def run() -> dict[Row, Run]:
        loop = asyncio.get_running_loop()
        begin = loop.time() + warm_up_s
        found: dict[Row, list[float]] = {row: [] for row in rows}

        async def user(row: Row, number: int) -> None:
            rng = Random(f"{seed} {row} {number}")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            path = f"/endpoints/{row.endpoint(arm)}/invocations"
            try:
                while loop.time() < begin + duration_s:
                    body = b"%d" % max(1, round(service_time(rng, row.mean_s) * 1e6))
                    began = perf_counter()
                    writer.write(
                        b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
                        % (path.encode(), len(body), body)
                    )
                    head = await reader.readuntil(b"\r\n\r\n")
                    if not head.startswith(b"HTTP/1.1 200"):
                        raise RuntimeError(head.decode("latin-1"))
                    await reader.readexactly(len(body))
                    if begin <= loop.time() < begin + duration_s:
                        found[row].append(perf_counter() - began)
                    if is_roaming:
                        writer.close()
                        reader, writer = await asyncio.open_connection("127.0.0.1", port)
            finally:
                writer.close()

        users: list[Awaitable[None]] = [user(row, number) for row in rows for number in range(row.users)]
        await asyncio.gather(*users)
        return {row: Run(latencies, len(latencies) / duration_s) for row, latencies in found.items()}

    return uvloop.run(run())


Results = Mapping[Row, Mapping[str, Sequence[Run]]]
