"""Connections to the admin plane: their number and time-outs, with a clock that the test sets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any
from unittest.mock import create_autospec

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from tests.waiting import until
from torchmoor.admin.collectors import FleetCollector
from torchmoor.admin.connections import AdminConnection, AdminConnections
from torchmoor.config.limits import LimitSettings
from torchmoor.fleet.data_plane_view import DataPlaneView
from torchmoor.proxy.instances.registry import Registry

LIMITS = LimitSettings(max_admin_connections=2, header_timeout_s=10, keep_alive_timeout_s=75)
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b"it answers"


class Plane:
    """A server of `/` on loopback that answers once the gate is open."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.connections = AdminConnections(LIMITS, clock=lambda: monotonic() + self.ahead_s)
        self.reached = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.port = 0
        self.clients: list[asyncio.StreamWriter] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.reached.set()
        await self.gate.wait()
        return web.Response(body=BODY)

    def pass_time(self, seconds: float) -> None:
        """Act on each deadline that is due within `seconds`."""
        self.ahead_s = seconds
        self.connections.sweeper.sweep()
        self.ahead_s = 0.0

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(writer)
        writer.write(data)
        return reader, writer


def make_idle_fleet() -> Any:
    """Return a data plane without endpoints."""
    view = create_autospec(DataPlaneView, instance=True, async_inference=None)
    view.traffic.return_value, view.counts.return_value = [], {}
    return view


@asynccontextmanager
async def served() -> AsyncIterator[Plane]:
    """Yield a plane; at its end no connection may be counted."""
    plane = Plane()
    app = web.Application(middlewares=[plane.connections.watch])
    app.router.add_get("/", plane.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    serve = runner.server
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: AdminConnection(plane.connections, serve()), "127.0.0.1", 0)
    plane.port = server.sockets[0].getsockname()[1]
    yield plane
    for client in plane.clients:
        client.close()
    server.close()
    await runner.cleanup()
    await until(lambda: not plane.connections.open)


async def until_open(plane: Plane, number: int) -> None:
    await until(lambda: len(plane.connections.open) == number)


async def test_a_silent_connection_is_closed() -> None:
    """A connection without a request is closed after the time for a head."""
    async with served() as plane:
        reader, _ = await plane.connect()
        await until_open(plane, 1)
        plane.pass_time(9)
        assert len(plane.connections.open) == 1

        plane.pass_time(11)

        assert await reader.read() == b""
        await until_open(plane, 0)


async def test_an_unfinished_head_is_closed_and_an_idle_connection_stays() -> None:
    """An unfinished head is closed before an idle connection, which may wait longer for its next request."""
    async with served() as plane:
        reader, writer = await plane.connect(GET)
        assert (await reader.readuntil(BODY)).startswith(b"HTTP/1.1 200")
        plane.pass_time(70)
        writer.write(GET)
        await reader.readuntil(BODY)
        assert len(plane.connections.open) == 1

        plane.pass_time(76)

        assert await reader.read() == b""
        reader, writer = await plane.connect(GET)
        await reader.readuntil(BODY)
        [connection] = plane.connections.open.values()
        idle_until = connection.deadline
        writer.write(GET[:10])
        await until(lambda: connection.deadline != idle_until)
        plane.pass_time(11)
        assert await reader.read() == b""


async def test_a_running_request_has_no_deadline() -> None:
    """A running request has no deadline of the connection, because an operation has its own."""
    async with served() as plane:
        plane.gate.clear()
        reader, _ = await plane.connect(GET)
        await plane.reached.wait()
        plane.pass_time(100_000)
        plane.gate.set()

        assert (await reader.readuntil(BODY)).startswith(b"HTTP/1.1 200")


async def test_connections_above_the_limit_are_refused_and_counted() -> None:
    """A connection beyond the limit gets a 503 with Retry-After; a freed place is used again."""
    async with served() as plane:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(FleetCollector(Registry(()), make_idle_fleet(), plane.connections))
        _, writer = await plane.connect()
        await plane.connect()
        await until_open(plane, 2)

        refused, _ = await plane.connect()
        answer = await refused.read()

        assert answer.startswith(b"HTTP/1.1 503")
        assert b"Retry-After: 1\r\n" in answer
        page = generate_latest(registry).decode()
        assert "AdminConnections 2.0" in page
        assert "AdminConnectionsRefused_total 1.0" in page
        writer.close()
        await until_open(plane, 1)
        reader, _ = await plane.connect(GET)
        assert (await reader.readuntil(BODY)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("end", [lambda plane: plane.pass_time(6), lambda plane: plane.connections.stop()])
async def test_a_refused_connection_is_not_reset(end: Callable[[Plane], None]) -> None:
    """A refused connection whose request is already there gets the 503; it is closed after a while, and at the stop.

    A reset would lose the answer.
    """
    async with served() as plane:
        for _ in range(2):
            await plane.connect()
        await until_open(plane, 2)
        with socket.create_connection(("127.0.0.1", plane.port)) as early:  # the plane accepts it after the request
            early.sendall(GET)
            reader, writer = await asyncio.open_connection(sock=early)
            plane.clients.append(writer)
            assert (await reader.read()).startswith(b"HTTP/1.1 503")
            plane.pass_time(4)
            assert plane.connections.lingering

            end(plane)

            await until(lambda: not plane.connections.lingering)
