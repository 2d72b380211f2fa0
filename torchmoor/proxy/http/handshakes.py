"""TLS handshakes of a listener, which count as connections.

An asyncio server with TLS reports a connection only when its handshake has ended, so clients that send nothing could
use up the descriptors. Here the server accepts a connection without TLS, and the handshake follows.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import cast

logger = logging.getLogger(__name__)

GetContext = Callable[[], ssl.SSLContext]
"""Returns the context for a new connection, which may have a renewed certificate."""


class Handshakes:
    """Makes each accepted connection one with TLS.

    make: makes the connection's protocol. may_begin: returns False if there are too many connections; a new one is
    closed then. A handshake counts until it has ended, or `forget` is called.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        may_begin: Callable[[], bool],
        *,
        timeout_s: float,
        closing_timeout_s: float,
    ) -> None:
        """closing_timeout_s: of a connection that is closed, for its last bytes and the client's end of it."""
        self._make = make
        self._may_begin = may_begin
        self._timeout_s = timeout_s
        self._closing_timeout_s = closing_timeout_s
        self._running: dict[asyncio.BaseProtocol, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def accept(self, get_context: GetContext) -> asyncio.Protocol:
        """Return the protocol of an accepted connection. For `create_server`."""
        return _Accepted(self, get_context)

    def begin(self, accepted: socket.socket, tls: ssl.SSLContext) -> None:
        """Begin a connection's handshake, or close the connection."""
        if self._may_begin():
            protocol = self._make()
            self._running[protocol] = asyncio.create_task(self._run(protocol, accepted, tls))
        else:
            accepted.close()

    async def _run(self, protocol: asyncio.Protocol, accepted: socket.socket, tls: ssl.SSLContext) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=tls,
                ssl_handshake_timeout=self._timeout_s,
                ssl_shutdown_timeout=self._closing_timeout_s,
            )
        except OSError as error:  # it failed, or did not end in time
            logger.debug("no TLS handshake error=%s", error)
        finally:
            self.forget(protocol)

    def forget(self, protocol: asyncio.BaseProtocol) -> None:
        """Stop counting a handshake."""
        self._running.pop(protocol, None)

    async def stop(self) -> None:
        """End all handshakes."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Accepted(asyncio.Protocol):
    def __init__(self, handshakes: Handshakes, get_context: GetContext) -> None:
        self._handshakes = handshakes
        self._get_context = get_context

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Continue with a copy of the socket; this transport has not read anything yet."""
        try:
            copy = transport.get_extra_info("socket").dup()
        except OSError:  # no free descriptor
            copy = None
        cast(asyncio.Transport, transport).abort()
        if copy is not None:
            self._handshakes.begin(copy, self._get_context())
