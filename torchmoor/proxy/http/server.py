"""The data plane's listener, which owns the connections that it accepts."""

from __future__ import annotations

import asyncio
from functools import partial

from torchmoor.proxy.http.call import Application, FastPath
from torchmoor.proxy.http.client_connection import MAX_LINGERING_REFUSED, ClientConnection
from torchmoor.proxy.http.connection_parts import ConnectionParts
from torchmoor.proxy.http.handshakes import GetContext, Handshakes
from torchmoor.proxy.http.reader import RequestCaches
from torchmoor.proxy.http.sweeper import LINGER_S, Sweeper
from torchmoor.proxy.http.websocket import WebSocketConnection


class HttpServer:
    """Listens until `stop`. fast_path: None if every request takes the general path."""

    fast_path: FastPath | None = None

    def __init__(self, application: Application, parts: ConnectionParts, sweeper: Sweeper) -> None:
        self.application = application
        self.parts = parts
        self.caches = RequestCaches(application.note, application.find_handler)
        self.is_stopping = False
        self.connections: set[ClientConnection | WebSocketConnection] = set()
        self.sweeper = sweeper
        self._server: asyncio.Server | None = None
        self._handshakes = Handshakes(
            partial(ClientConnection, self),
            lambda: not self.is_stopping and self.num_above_limit <= MAX_LINGERING_REFUSED,
            timeout_s=parts.limits.header_timeout_s,
            closing_timeout_s=max(LINGER_S, parts.limits.keep_alive_timeout_s),
        )
        self._all_gone = asyncio.Event()

    async def start(self, host: str, port: int, tls: GetContext | None = None, *, is_shared: bool = False) -> int:
        """Listen, with TLS if there are contexts for it; return the port. is_shared: among processes."""
        accept = partial(ClientConnection, self) if tls is None else partial(self._handshakes.accept, tls)
        self._server = await asyncio.get_running_loop().create_server(
            accept, host, port, backlog=1024, reuse_port=is_shared
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, *, grace_s: float) -> None:
        """Accept no more connections, let running exchanges end within grace_s, then break them."""
        self.is_stopping = True
        if self._server is not None:
            self._server.close()
        await self._handshakes.stop()
        for connection in list(self.connections):
            connection.stop()
        if not self.connections:
            return
        try:
            await asyncio.wait_for(self._all_gone.wait(), grace_s)
        except TimeoutError:
            for connection in list(self.connections):
                connection.transport.abort()
            await self._all_gone.wait()  # connection_lost is called in the next turns of the loop

    def try_admit(self, connection: ClientConnection) -> bool:
        """Count a new connection, or refuse it if there are too many."""
        self._handshakes.forget(connection)
        self.connections.add(connection)
        self.sweeper.watch(connection)
        return self.num_above_limit <= 0

    @property
    def num_above_limit(self) -> int:
        """Open connections above the limit, which are refused; negative below it."""
        return len(self.connections) + len(self._handshakes) - self.parts.max_connections

    def replace(self, connection: ClientConnection, successor: WebSocketConnection) -> None:
        """Count a connection whose protocol has changed as its successor."""
        self.connections.discard(connection)
        self.sweeper.forget(connection)
        self.connections.add(successor)
        self.sweeper.watch(successor)

    def forget(self, connection: ClientConnection | WebSocketConnection) -> None:
        """Remove a connection that has ended."""
        self.connections.discard(connection)
        self.sweeper.forget(connection)
        if self.is_stopping and not self.connections:
            self._all_gone.set()
