"""The exchange of one WebSocket message, which writes its answer as to an HTTP/1.0 client.

So a message takes the path of every other request. Only the bytes of its answer are parsed here.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from torchmoor.proxy.http.call import Application, MessageRequest
from torchmoor.proxy.http.connection_parts import ConnectionParts
from torchmoor.proxy.http.exchange import Exchange
from torchmoor.proxy.http.message import Reply
from torchmoor.proxy.http.sweeper import NEVER, Sweeper

_HEAD_END = b"\r\n\r\n"


class SocketServer(Protocol):
    """The server, as its WebSocket connections use it."""

    application: Application
    parts: ConnectionParts
    sweeper: Sweeper
    is_stopping: bool

    def forget(self, connection: Any) -> None: ...


class MessageConnection(Protocol):
    """A WebSocket connection, as its messages' exchanges use it."""

    transport: asyncio.Transport
    is_write_paused: bool

    @property
    def source(self) -> str: ...

    def pass_on(self, status: int, piece: bytes) -> None:
        """Receive a piece of an answer's body."""
        ...

    def end_answer(self, answered: Any, *, is_whole: bool) -> None:
        """Receive the end of an exchange's answer, unless it is no longer the current one."""
        ...


class MessageExchange:
    """The client's side of the exchange. Ends later than the call that ends it, so that no calls nest."""

    is_http10 = True
    keep_alive = False

    def __init__(self, connection: MessageConnection, request: MessageRequest, server: SocketServer) -> None:
        self.deadline = NEVER
        self.exchange: Exchange | None = None
        self._connection = connection
        self._request = request
        self._server = server
        self._head = b""  # the beginning of a head without its end
        self._status = 0  # once the head is there
        self._is_broken = self._is_over = False

    @property
    def source(self) -> str:
        return self._connection.source

    @property
    def is_write_paused(self) -> bool:
        return self._connection.is_write_paused

    def start(self) -> None:
        """Answer a refused message, or begin the exchange."""
        request, decision = self._request.request, self._request.decision
        if isinstance(decision, Reply):
            self.write(decision.render(keep_alive=False))
            self._end()
            return
        self._server.sweeper.watch(self)
        body, parts = self._request.body, self._server.parts
        self.exchange = Exchange(self, request, decision, parts, body, is_complete=True)
        self.exchange.start()

    # ClientSide

    def write(self, data: bytes) -> None:
        if not self._status:
            head, end, data = (self._head + data).partition(_HEAD_END)
            if not end:
                self._head = head
                return
            self._head = b""
            self._status = int(head.split(b" ", 2)[1])
        if data and not self._is_over:
            self._connection.pass_on(self._status, data)

    def abort(self) -> None:
        """End an answer that is not whole; a client that does not read loses its connection."""
        self._is_broken = True
        if self.is_write_paused:
            self._connection.transport.abort()
        self._end()

    def exchange_over(self, *, is_request_complete: bool) -> None:
        self._end()

    # The end

    def expire(self) -> None:
        if self.exchange is not None:
            self.exchange.expire(self._server.application.refuse(408, "The events were not read in time."))

    def drop(self) -> None:
        """End the exchange of a client that is leaving."""
        if not self._is_over:
            self._is_over = True
            self._server.sweeper.forget(self)
            if self.exchange is not None:
                self.exchange.on_client_gone()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._server.sweeper.forget(self)
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._connection.end_answer(self, is_whole=not self._is_broken)
