"""A client's connection to the data plane: one request at a time, its exchange, and the end.

A malformed request gets one answer, then the connection closes: its sending side at once, the receiving side after a
while in which the client's bytes are read and dropped. So the client sees the answer instead of a reset.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from time import monotonic
from typing import Protocol, cast

from torchmoor.proxy.http.call import FastPath, RunningRequest
from torchmoor.proxy.http.client_state import HalfClosedProbe, has_unsent
from torchmoor.proxy.http.exchange import Exchange
from torchmoor.proxy.http.fields import BadMessage
from torchmoor.proxy.http.message import CONTINUE, Reply, Request
from torchmoor.proxy.http.message_exchange import SocketServer
from torchmoor.proxy.http.reader import RequestCaches, RequestReader
from torchmoor.proxy.http.sweeper import LINGER_S, NEVER
from torchmoor.proxy.http.websocket import WebSocketConnection

logger = logging.getLogger(__name__)

MAX_DRAINED_BYTES = 65_536  # a refused request's body up to this size is read, and the connection kept
MAX_LINGER_BYTES = 128 << 20
MAX_LINGERING_REFUSED = 64  # further refused connections close at once, without descriptors for their answers
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a reset ends the connection


class ClientServer(SocketServer, Protocol):
    """The server, as its clients' connections use it."""

    caches: RequestCaches
    fast_path: FastPath | None

    @property
    def num_above_limit(self) -> int: ...
    def try_admit(self, connection: ClientConnection) -> bool: ...
    def replace(self, connection: ClientConnection, successor: WebSocketConnection) -> None: ...


class ClientConnection(asyncio.Protocol):
    """A client's connection: its reader, its exchange (one at a time), and its deadline."""

    transport: asyncio.Transport

    def __init__(self, server: ClientServer) -> None:
        self._server = server
        self._reader = RequestReader(self, server.caches, server.parts.limits.max_header_bytes)
        self.exchange: RunningRequest | None = None
        self.keep_alive = True
        self.is_http10 = self.is_write_paused = self._is_held = False
        self._has_begun = False  # part of a head was received
        self._awaited: tuple[Request, bytes] | None = None  # its body may come with the next read, for the fast path
        self._reply: tuple[Request, Reply] | None = None  # sent at the end of the request
        self.is_reading_paused = self._is_deaf = self._is_lingering = False
        self._is_upgraded = False
        self._answered_at = -NEVER
        self._num_ignored = 0
        self._probe: HalfClosedProbe | None = None

    @property
    def is_idle(self) -> bool:
        return self._reader.is_in_head and not self._reader.has_begun

    @property
    def source(self) -> str:
        address: str = (self.transport.get_extra_info("peername") or ("",))[0]
        return address

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.deadline = monotonic() + self._server.parts.limits.header_timeout_s
        is_admitted = self._server.try_admit(self)
        if self._server.is_stopping:  # accepted just before the listener was closed
            self.transport.abort()
        elif not is_admitted:
            self._refuse(503, "Too many connections.")
            if self._server.num_above_limit > MAX_LINGERING_REFUSED:
                self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.begin_awaited()
        self._server.forget(self)
        if self._probe is not None:
            self._probe.stop()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.on_client_gone()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._num_ignored += len(data)
            if self._num_ignored > MAX_LINGER_BYTES:
                self.transport.abort()
            return
        reader = self._reader
        try:
            reader.feed(data)
        except BadMessage as error:
            if self._is_upgraded:  # frames came before the handshake was answered
                self.transport.abort()
            else:
                self._on_bad_request(error)
        except Exception:
            logger.exception("fault in a request")
            if not (self._is_deaf or self.transport.is_closing()):
                self._refuse(500, "The request could not be handled.")
        else:
            if self.exchange is None and reader.has_begun and not self._has_begun:
                self._has_begun = True
                self.deadline = monotonic() + self._server.parts.limits.header_timeout_s

    def _on_bad_request(self, error: BadMessage) -> None:
        exchange = self.exchange
        if exchange is not None and exchange.is_request_complete:
            # Bytes after the request, whether pipelined or malformed, are not served: answer the request, then close.
            self.keep_alive = False
            self._is_deaf = True
        elif not (self._is_deaf or self.transport.is_closing()):
            self._refuse(error.status, error.message)

    def eof_received(self) -> bool:
        """Find out whether a client that sends no more still reads; under TLS, both directions end at once."""
        self.begin_awaited()
        exchange = self.exchange
        can_be_half_closed = self.transport.can_write_eof() and not self.is_http10
        if exchange is None or not exchange.is_request_complete or not can_be_half_closed:
            return False
        self.keep_alive = False
        self._probe = HalfClosedProbe(
            self.transport.write, lambda: self.exchange is not None and not self.exchange.is_answered
        )
        self._probe.send()
        return True

    def pause_writing(self) -> None:
        self.is_write_paused = True
        if self.exchange is not None:
            self.exchange.on_client_write_paused(True)

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if self.exchange is not None:
            self.exchange.on_client_write_paused(False)
        else:
            self._serve_held()

    def _serve_held(self) -> None:
        """Go on with what was received after the last request, unless the client must take its answers first."""
        if self._is_held and not (self.is_write_paused or self._is_deaf or self.transport.is_closing()):
            self._is_held = False
            self.resume_reading()
            held = self._reader.stop_waiting()
            if held:
                self.data_received(held)

    # RequestListener

    def on_request(self, request: Request, piece: bytes, *, is_complete: bool) -> None:
        """Let the application decide, and begin an exchange, or reply once the request has ended."""
        server, reader = self._server, self._reader
        self.keep_alive = reader.keep_alive
        if request.layout.wants_upgrade:
            self._upgrade(request)
            return
        self.is_http10 = reader.is_http10
        if not is_complete and server.fast_path is not None and server.fast_path.may_take(request):
            self._awaited = request, piece
            self.deadline = request.received_at  # the next sweep begins it without its body
        else:
            self._begin(request, piece, is_complete=is_complete)

    def _begin(self, request: Request, piece: bytes, *, is_complete: bool) -> None:
        server = self._server
        if is_complete and server.fast_path is not None and server.fast_path.try_send(self, request, piece):
            return
        decision = server.application.handle(request)
        if isinstance(decision, Reply):
            self._reply = request, decision
            self.deadline = request.received_at + server.parts.limits.body_timeout_s
            is_long = request.is_chunked or (request.content_length or 0) > MAX_DRAINED_BYTES
            if is_long or (request.is_expecting and not is_complete):
                self._send_reply(close=True)
            elif is_complete:
                self._send_reply(close=False)
            return
        exchange = self.exchange = Exchange(self, request, decision, server.parts, piece, is_complete)
        exchange.start()
        if request.is_expecting and self.exchange is not None:
            self.transport.write(CONTINUE)

    def on_request_piece(self, piece: bytes, *, is_complete: bool) -> None:
        """Pass more of the body to the exchange; a pending reply is sent at its end."""
        if self._awaited is not None:
            self.begin_awaited(piece, is_complete=is_complete)
        elif self.exchange is not None:
            self.exchange.on_request_piece(piece, is_complete=is_complete)
        elif is_complete and self._reply is not None:
            self._send_reply(close=False)

    def begin_awaited(self, piece: bytes = b"", *, is_complete: bool = False) -> None:
        """Begin a request whose body is awaited for the fast path, if there is one. piece: more of its body."""
        if self._awaited is not None:
            (request, before), self._awaited = self._awaited, None
            self._begin(request, before + piece, is_complete=is_complete)

    def _upgrade(self, request: Request) -> None:
        """Leave the connection to another protocol, or refuse the request and close."""
        decision = self._server.application.upgrade(request)
        if isinstance(decision, Reply):
            self._reply = request, decision
            self.keep_alive = False
            self._send_reply(close=True)
        else:
            self._is_upgraded = True
            successor = WebSocketConnection(self._server, self.transport, decision)
            self._server.replace(self, successor)
            self.transport.set_protocol(successor)

    def on_many(self) -> None:
        """Go on in the loop's next turn: many requests came at once, and other connections wait."""
        self._hold()
        asyncio.get_running_loop().call_soon(self._serve_held)

    def _hold(self) -> None:
        self._is_held = True
        self._reader.wait()
        self.pause_reading()

    # Replies of the proxy

    def _send_reply(self, *, close: bool) -> None:
        """Send the pending reply. close: end the connection, because the rest of the body is not read."""
        if self._reply is None:
            return
        (request, reply), self._reply = self._reply, None
        if close:
            self.keep_alive = False
        is_head = request.method == b"HEAD"
        data = reply.render(keep_alive=self.keep_alive, added_lines=request.answer_lines, without_body=is_head)
        self.transport.write(data)
        self._end_request(is_request_complete=not close)

    def _refuse(self, status: int, message: str) -> None:
        """Refuse a request, and close."""
        reply = self._server.application.refuse(status, message)
        self.keep_alive = False
        self._reply = None
        exchange = self.exchange
        if exchange is not None:
            exchange.fault(reply)
        elif not self.transport.is_closing():
            self.transport.write(reply.render(keep_alive=False))
            self._linger()

    # ClientSide

    def write(self, data: bytes) -> None:
        """Send bytes to the client, unless it has gone."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def pause_reading(self) -> None:
        if not self.is_reading_paused:
            self.is_reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.is_reading_paused:
            self.is_reading_paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def abort(self) -> None:
        """Break the connection, so that the client sees that the answer is incomplete."""
        own: socket.socket | None = self.transport.get_extra_info("socket")
        if self.is_http10 and own is not None and not self.transport.is_closing():
            # Without chunks, the usual end of the connection is the end of the answer.
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def exchange_over(self, *, is_request_complete: bool) -> None:
        """End the request: the exchange's last byte was written."""
        self.exchange = None
        self._end_request(is_request_complete=is_request_complete)

    def _end_request(self, *, is_request_complete: bool) -> None:
        if self.is_reading_paused:
            self.resume_reading()
        if self.keep_alive and not self._server.is_stopping:
            self._has_begun = False
            self._answered_at = monotonic()
            self.deadline = self._answered_at + self._server.parts.limits.keep_alive_timeout_s
            if self.is_write_paused:  # the client has not read its answers: serve no more until it has
                self._hold()
            else:
                self._reader.expect_next()
        elif is_request_complete and not self._is_deaf:
            idle_s = 0.0 if self._server.is_stopping else self._server.parts.limits.keep_alive_timeout_s
            self._close(max(LINGER_S, idle_s))
        else:
            self._linger()

    def _close(self, timeout_s: float) -> None:
        """Close once the client has received what was written; cut it off after this time."""
        self._is_deaf = self._is_lingering = True
        self.deadline = monotonic() + timeout_s
        self.transport.close()

    def _linger(self) -> None:
        """Close, but read on for a while: a reset would lose the answer."""
        self._is_deaf = self._is_lingering = True
        self.deadline = monotonic() + LINGER_S
        if not self.transport.is_closing() and self.transport.can_write_eof():
            self.resume_reading()
            self.transport.write_eof()

    def stop(self) -> None:
        """Close, after the request that is being answered; what was written is still sent, within LINGER_S."""
        self.begin_awaited()
        if self.exchange is not None:
            self.keep_alive = False
            return
        has_tls = not self.transport.can_write_eof()
        # With TLS, the size does not count encrypted bytes.
        is_recent = self._is_lingering or monotonic() - self._answered_at < LINGER_S
        may_have_more = has_tls and (is_recent or has_unsent(self.transport))
        if not (self.transport.get_write_buffer_size() or may_have_more):
            self.transport.abort()
        elif has_tls:
            self._close(LINGER_S)
        else:
            self._linger()

    def expire(self) -> None:
        exchange = self.exchange
        if self._awaited is not None:
            self.begin_awaited()
        elif self._is_lingering:
            self.transport.abort()
        elif exchange is not None:
            exchange.expire(self._server.application.refuse(408, "The request's body did not come in time."))
        elif self.is_idle:
            self._close(LINGER_S)
        else:
            self._refuse(408, "The request did not come in time.")

    def __repr__(self) -> str:
        state = "lingering" if self._is_lingering else "idle" if self.is_idle else "busy"
        return f"<ClientConnection {state} {self.exchange!r}>"
