"""The admin plane's connections: their number, and how long each waits for a request or for its client to read.

aiohttp serves the requests. It bounds neither, so each of its connections is wrapped by one of these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

from torchmoor.config.limits import LimitSettings
from torchmoor.proxy.http.sweeper import LINGER_S, NEVER, Sweeper

SWEEP_INTERVAL_S = 0.25
MAX_LINGERING = 64  # further refused connections close at once, without descriptors for their answers
_TEXT = b"Too many admin connections: close some, or raise limits.max_admin_connections.\n"
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n\r\n%b" % (len(_TEXT), _TEXT)
)


class AdminConnection(asyncio.Protocol):
    """Passes one connection's events to aiohttp, and closes the connection at its deadline."""

    transport: asyncio.Transport

    def __init__(self, connections: AdminConnections, handler: asyncio.Protocol) -> None:
        self.deadline = NEVER
        self._connections = connections
        self._handler = handler
        self._is_refused = self._has_begun = self._is_serving = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._connections.try_admit(self):
            self._wait(self._connections.header_timeout_s)
            self._handler.connection_made(transport)
        else:
            self._is_refused = True
            self.transport.write(REFUSAL)
            if self.transport.can_write_eof() and self._connections.try_linger(self):
                self._wait(LINGER_S)
                self.transport.write_eof()  # but read on: a reset would lose the answer
            else:
                self.transport.close()  # with TLS, the transport reads on

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if not (self._is_serving or self._has_begun):
            self._has_begun = True
            self._wait(self._connections.header_timeout_s)
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._is_refused else self._handler.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.forget(self)
        if not self._is_refused:
            self._handler.connection_lost(error)

    def pause_writing(self) -> None:
        """Limit the wait for a client that does not read its answer."""
        self._wait(self._connections.idle_timeout_s)
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._is_serving:
            self.deadline = NEVER
        self._handler.resume_writing()

    # A request

    def begin(self) -> None:
        """Lift the deadline while a request is answered: operations have time-outs of their own."""
        self._is_serving = True
        self._has_begun = False
        self.deadline = NEVER

    def end(self) -> None:
        """Limit the wait until the answer is sent and the next request begins."""
        self._is_serving = False
        self._wait(self._connections.idle_timeout_s)

    def expire(self) -> None:
        self.transport.abort()

    def _wait(self, timeout_s: float) -> None:
        self.deadline = monotonic() + timeout_s


class AdminConnections:
    """Admits connections up to a number, and closes those that wait too long.

    open: connections by their transports. num_refused: since the start. Refused ones linger, and are not open.
    """

    def __init__(self, limits: LimitSettings, *, clock: Callable[[], float] = monotonic) -> None:
        self.num_refused = 0
        self.header_timeout_s = limits.header_timeout_s
        self.idle_timeout_s = limits.keep_alive_timeout_s
        self.sweeper = Sweeper(SWEEP_INTERVAL_S, clock=clock)
        self.max_connections = limits.max_admin_connections
        self.open: dict[asyncio.BaseTransport, AdminConnection] = {}
        self.lingering: set[AdminConnection] = set()

    def try_admit(self, connection: AdminConnection) -> bool:
        """Count a new connection, or refuse it if there are too many."""
        if len(self.open) >= self.max_connections:
            self.num_refused += 1
            return False
        self.open[connection.transport] = connection
        self.sweeper.watch(connection)
        return True

    def try_linger(self, connection: AdminConnection) -> bool:
        """Let a refused connection stay open until its deadline, unless there are too many."""
        if len(self.lingering) >= MAX_LINGERING:
            return False
        self.lingering.add(connection)
        self.sweeper.watch(connection)
        return True

    def forget(self, connection: AdminConnection) -> None:
        """Stop counting a connection that has ended."""
        self.open.pop(connection.transport, None)
        self.lingering.discard(connection)
        self.sweeper.forget(connection)

    def stop(self) -> None:
        """Close refused connections, and end all deadlines."""
        self.sweeper.stop()
        for connection in list(self.lingering):
            connection.transport.abort()

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note when a request begins and ends. The outermost middleware."""
        transport = request.transport
        connection = None if transport is None else self.open.get(transport)
        if connection is None:  # the client has left
            return await handler(request)
        connection.begin()
        try:
            return await handler(request)
        finally:
            connection.end()
