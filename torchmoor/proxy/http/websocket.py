"""A client's WebSocket connection: its messages are answered one after the other, each like a request over HTTP.

The library reads and writes frames; this module owns the socket, the order and the deadlines. While a message is being
answered, one more is received; then the client's socket is not read. A client that does not read its events pauses the
instance likewise, and is disconnected after the idle time-out of answers. The connection closes between two answers
when the proxy stops or the connection is too old.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from time import monotonic

from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request as Handshake
from websockets.protocol import State
from websockets.server import ServerProtocol

from torchmoor.proxy.http.call import Upgrade
from torchmoor.proxy.http.exchange import Exchange
from torchmoor.proxy.http.fields import BadMessage
from torchmoor.proxy.http.message import Request
from torchmoor.proxy.http.message_exchange import MessageExchange, SocketServer
from torchmoor.proxy.http.sweeper import LINGER_S, NEVER

# At the debug level, the library would log frames, which contain prompts.
_frames = logging.getLogger(f"{__name__}.frames")
_frames.setLevel(logging.WARNING)


def accept(request: Request, max_message_bytes: int) -> tuple[ServerProtocol, bytes]:
    """Make the opening handshake. Return the protocol that follows and the answer. Raises BadMessage."""
    handshake = ServerProtocol(logger=_frames)
    headers = Headers((field.name.decode(), field.value.decode("latin-1")) for field in request.fields)
    response = handshake.accept(Handshake(request.path.decode(), headers, request.method.decode()))
    if response.status_code != 101:
        why = handshake.handshake_exc if isinstance(handshake.handshake_exc, InvalidHandshake) else "not accepted"
        raise BadMessage(400, f"This is not a WebSocket handshake: {why}.")
    # A second protocol object: the one above would read the handshake itself.
    protocol = ServerProtocol(state=State.OPEN, max_size=max_message_bytes, logger=_frames)
    return protocol, response.serialize()


class WebSocketConnection(asyncio.Protocol):
    """Queues a client's messages, answers one at a time, and closes when either side is silent for too long."""

    def __init__(self, server: SocketServer, transport: asyncio.Transport, upgrade: Upgrade) -> None:
        self.transport = transport
        self.is_write_paused = False
        self._server = server
        self._protocol = upgrade.protocol
        self._handler = upgrade.handler
        self._settings = server.parts.websocket
        self._current: MessageExchange | None = None
        self._waiting: deque[bytes] = deque()
        self._received = bytearray()  # of a message; a list of its frames could take 20 times as much
        self._is_text = True
        self._num_unread = 0  # bytes received since the last whole message, or control frame between two messages
        self._is_reading_paused = False
        now = monotonic()
        self._ends_at = now + self._settings.max_lifetime_s
        self._idle_at = now + self._settings.idle_timeout_s
        self._ping_at = now + self._settings.ping_interval_s
        self._pong_by = self._closed_by = NEVER
        self._whole_by = NEVER  # a message that is arriving
        transport.write(upgrade.accepted)

    @property
    def exchange(self) -> Exchange | None:
        return None if self._current is None else self._current.exchange

    @property
    def source(self) -> str:
        address: str = (self.transport.get_extra_info("peername") or ("",))[0]
        return address

    @property
    def deadline(self) -> float:
        ends_at = self._ends_at if self._current is None else NEVER
        return min(self._closed_by, self._pong_by, self._whole_by, self._ping_at, self._idle_at, ends_at)

    @property
    def _is_closing(self) -> bool:
        return self._closed_by != NEVER

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        self._ping_at = monotonic() + self._settings.ping_interval_s
        self._pong_by = NEVER
        self._num_unread += len(data)
        self._protocol.receive_data(data)
        for frame in self._protocol.events_received():
            if isinstance(frame, Frame) and not self._is_closing:
                self._on_frame(frame)
        self._num_unread = max(self._num_unread, len(self._received) + len(self._protocol.reader.buffer))
        self._flush()
        if not self._is_closing and not self._handler.hold(self._num_unread + sum(map(len, self._waiting))):
            self.close(CloseCode.TRY_AGAIN_LATER, "Too many messages are being received. Try again later.")
            self._received, self._num_unread = bytearray(), 0
            self._pause_reading()  # what a closing connection still receives is not counted
        self._time_message()

    def _time_message(self) -> None:
        """Limit the time of a message that has begun to arrive, while the client's socket is read."""
        if not self._num_unread or self._is_reading_paused or self._is_closing:
            self._whole_by = NEVER
        elif self._whole_by == NEVER:
            self._whole_by = monotonic() + self._server.parts.limits.body_timeout_s

    def eof_received(self) -> bool:
        """Let the transport close: a WebSocket client ends both ways at once."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._server.forget(self)
        self._drop_current()
        self._handler.close()

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._pause_reading()  # otherwise pongs would be written without a limit
        if self.exchange is not None:
            self.exchange.on_client_write_paused(True)

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self._resume_reading()
        if self.exchange is not None:
            self.exchange.on_client_write_paused(False)

    def _pause_reading(self) -> None:
        if not self._is_reading_paused:
            self._is_reading_paused = True
            self._pong_by = NEVER  # the answer to a ping could not be read
            self._time_message()
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._is_reading_paused and not self.is_write_paused and not self._waiting:
            self._is_reading_paused = False
            self._time_message()
            if not self.transport.is_closing():
                self.transport.resume_reading()

    # Frames

    def _on_frame(self, frame: Frame) -> None:
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            if not self._received:
                self._num_unread = 0
            return  # the protocol answers pings and the client's end
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._received += frame.data
        if frame.fin:
            message, self._received = bytes(self._received), bytearray()
            self._num_unread, self._whole_by = 0, NEVER
            self._on_message(message)

    def _on_message(self, message: bytes) -> None:
        if not self._is_text:
            self.close(CloseCode.UNSUPPORTED_DATA, "Messages are texts.")
            return
        self._waiting.append(message)
        self._go_on()
        if self._waiting:
            self._pause_reading()

    def _send(self, messages: list[bytes]) -> None:
        if self._protocol.state is State.OPEN:
            for message in messages:
                self._protocol.send_text(message)
            self._flush()

    def _flush(self) -> None:
        """Write the protocol's pending bytes; an empty piece ends this side of the connection."""
        for data in self._protocol.data_to_send():
            if self.transport.is_closing():
                return
            if data:
                self.transport.write(data)
            else:
                self._begin_closing()
                if self.transport.can_write_eof():
                    self.transport.write_eof()
                else:
                    self.transport.close()

    # Answers

    def _go_on(self) -> None:
        """Begin with the next message, unless one is being answered; close if the time for it has come."""
        while self._current is None and not self._is_closing:
            self._idle_at = monotonic() + self._settings.idle_timeout_s
            if self._server.is_stopping:
                self.close(CloseCode.GOING_AWAY, "The server stops.")
            elif monotonic() >= self._ends_at:
                self._retire()
            elif self._waiting:
                self._begin(self._waiting.popleft())
            else:
                break
        self._resume_reading()

    def _begin(self, message: bytes) -> None:
        request = self._handler.begin(message)
        if isinstance(request, bytes):
            self._send([request])
            return
        self._idle_at = NEVER
        self._current = MessageExchange(self, request, self._server)
        self._current.start()

    def pass_on(self, status: int, piece: bytes) -> None:
        """Send the messages that a piece of the answer's body completes."""
        self._send(self._handler.on_answer(status, piece))

    def end_answer(self, answered: MessageExchange, *, is_whole: bool) -> None:
        """Send the last messages of an answer, and begin with the next message."""
        if self._current is answered:
            self._current = None
            self._send(self._handler.on_answer_end(is_whole=is_whole))
            self._go_on()

    def _drop_current(self) -> None:
        """Stop the answer whose client is leaving."""
        current, self._current = self._current, None
        if current is not None:
            current.drop()

    # The end

    def stop(self) -> None:
        """Close, once the current answer has ended."""
        self._go_on()

    def close(self, code: CloseCode, reason: str) -> None:
        """Begin the closing handshake."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason)
        self._begin_closing()
        self._flush()

    def _begin_closing(self) -> None:
        if not self._is_closing:
            self._closed_by = monotonic() + LINGER_S
            self._pong_by = self._whole_by = self._ping_at = self._idle_at = self._ends_at = NEVER
            self._waiting.clear()
            self._drop_current()
            self._resume_reading()

    def expire(self) -> None:
        """Act on the deadline that comes first."""
        due = self.deadline
        if due in (self._closed_by, self._pong_by):
            self.transport.abort()
        elif due == self._whole_by:
            self.close(CloseCode.POLICY_VIOLATION, "The message did not arrive in time.")
        elif due == self._idle_at:
            self.close(CloseCode.NORMAL_CLOSURE, "The connection was idle.")
        elif due == self._ping_at:
            self._ping(monotonic())
        else:
            self._retire()

    def _retire(self) -> None:
        self._send([self._handler.farewell])
        self.close(CloseCode.GOING_AWAY, "The connection is too old.")

    def _ping(self, now: float) -> None:
        self._ping_at = now + self._settings.ping_interval_s
        if not self._is_reading_paused:
            self._pong_by = min(self._pong_by, now + self._settings.ping_timeout_s)
            self._protocol.send_ping(b"")
            self._flush()

    def __repr__(self) -> str:
        return f"<WebSocketConnection {self._protocol.state.name} {self.exchange!r}>"
