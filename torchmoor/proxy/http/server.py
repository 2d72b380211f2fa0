"""The data plane's listener."""

from __future__ import annotations

import asyncio
import ssl

from torchmoor.proxy.http.call import Application
from torchmoor.proxy.http.client import LINGER_S, ClientConnection
from torchmoor.proxy.http.exchange import HttpMeans
from torchmoor.proxy.http.reader import RequestCaches
from torchmoor.proxy.http.timeouts import Sweeper


class HttpServer:
    """Listens, and owns the connections that it accepts."""

    def __init__(self, application: Application, means: HttpMeans, sweeper: Sweeper) -> None:
        self.application = application
        self.means = means
        self.caches = RequestCaches(application.note, application.find_handler)
        self.is_stopping = False
        self.connections: set[ClientConnection] = set()
        self._sweeper = sweeper
        self._server: asyncio.Server | None = None
        self._all_gone = asyncio.Event()

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None, *, is_shared: bool = False) -> int:
        """Listen, with TLS if there is a context for it; return the port. is_shared: among processes."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ClientConnection(self),
            host,
            port,
            backlog=1024,
            reuse_port=is_shared,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.means.header_timeout_s,
            ssl_shutdown_timeout=None if tls is None else LINGER_S,
        )
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self, *, grace_s: float) -> None:
        """Accept no more connections, let running exchanges end within grace_s, then break them."""
        self.is_stopping = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            if connection.exchange is None:
                connection.transport.abort()
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
        self.connections.add(connection)
        self._sweeper.watch(connection)
        return len(self.connections) <= self.means.max_connections

    def forget(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        self._sweeper.forget(connection)
        if self.is_stopping and not self.connections:
            self._all_gone.set()
