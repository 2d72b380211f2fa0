"""Connections to instances: kept alive, one exchange at a time, the latest used first.

A connection is idle (in its target's `idle` list), busy (it has an exchange), or closed. It returns to idle only if the
answer ended where its framing said, nothing followed it, and the request was sent whole; everything else closes it.
Taking an idle connection is a synchronous `pop()`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from time import monotonic
from typing import Protocol, cast

from torchmoor.config.limits import LimitSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.http.answer import Loss
from torchmoor.proxy.http.bounded_cache import BoundedCache
from torchmoor.proxy.http.call import Target
from torchmoor.proxy.http.chunks import ChunkedBody
from torchmoor.proxy.http.fields import BadMessage, FieldNote, note_nothing
from torchmoor.proxy.http.head import HeadBook
from torchmoor.proxy.http.long_body_queue import LongBodyQueue
from torchmoor.proxy.http.message import AnswerHead, AnswerLine
from torchmoor.proxy.http.patient_timeout import patient_timeout
from torchmoor.proxy.http.spool import SpooledBody, SpoolSender
from torchmoor.proxy.http.sweeper import NEVER, Sweeper
from torchmoor.wire.connection_errors import is_shortage

logger = logging.getLogger(__name__)

_END = b"\r\n\r\n"
_HTTP = b"HTTP/1."
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?")
MAX_KEPT_STATUSES = 256
ANSWER_HEAD_FACTOR = 4  # the length of an answer's head, relative to limits.max_header_bytes


def _read_status_line(line: bytes) -> AnswerLine:
    match = _STATUS.fullmatch(line)
    if match is None or match[2] == b"101":  # the proxy does not ask for another protocol
        raise BadMessage(502, "Not a valid HTTP answer.")
    return AnswerLine(int(match[2]), match[3] or b"", is_http10=match[1] == b"0")


class AnswerCaches:
    """The status lines and heads that all connections to instances have seen before. note: of answers' fields."""

    def __init__(self, note: Callable[[bytes], FieldNote] = note_nothing) -> None:
        self.lines = BoundedCache(_read_status_line, MAX_KEPT_STATUSES)
        self.heads = HeadBook(note)


class AnswerReceiver(Protocol):
    """Receives the answer on a busy connection."""

    def on_answer(self, head: AnswerHead, piece: bytes, *, is_complete: bool) -> None:
        """Receive a final answer's head. piece: what was received of the body with it; is_complete: that is all."""
        ...

    def on_answer_piece(self, piece: bytes, *, is_complete: bool) -> None:
        """Receive more of the body, perhaps nothing. is_complete: the answer has ended."""
        ...

    def on_lost(self, loss: Loss) -> None:
        """Handle the end of the connection before the answer's end. It is closed and has no exchange."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One connection to one instance. exchange: set while it is busy.

    is_reused: it has carried an answer, and nothing of the next one, so the peer may be closing it.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        target: Target,
        sweeper: Sweeper,
        caches: AnswerCaches,
        *,
        siblings: set[UpstreamConnection],
        long_bodies: LongBodyQueue,
        max_header_bytes: int,
        idle_timeout_s: float,
    ) -> None:
        """siblings: contains this connection while it is open. long_bodies: of the target's connections."""
        self.target = target
        self.exchange: AnswerReceiver | None = None
        self.deadline = NEVER
        self.is_reused = False
        self._max_header_bytes = max_header_bytes
        self._idle_timeout_s = idle_timeout_s
        self._sweeper = sweeper
        self._siblings = siblings
        self._long_bodies = long_bodies
        self._lines = caches.lines
        self._heads = caches.heads
        self._is_reading_paused = self._is_writing_paused = False
        self._sender: SpoolSender | None = None  # while a body is sent from a file
        self._head = b""  # the beginning of a head without its end
        self._is_in_head = True
        self._left: int | None = 0  # of a body with a declared length; None: it ends with the connection
        self._chunks: ChunkedBody | None = None
        self._is_complete = self._can_reuse = False

    @property
    def is_sending(self) -> bool:
        """True while a body is sent from its file."""
        return self._sender is not None

    # Called by a request delivery or a subrequest

    def send(self, data: bytes, file: SpooledBody | None) -> None:
        """Write a request. file: has its body, if that is not in data; it may have to wait for others."""
        self.transport.write(data)
        if file is not None:
            self._sender = SpoolSender(self.transport, file, self._end_sending)
            self._sender.is_paused = self._is_writing_paused
            self._long_bodies.add(self._sender)

    def _end_sending(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            self._long_bodies.remove(sender)

    def release(self, *, can_reuse: bool) -> None:
        """End the exchange: return to idle if the request was sent and its answer was whole, else close."""
        self.exchange = None
        transport = self.transport
        is_sent = self._sender is None and not transport.get_write_buffer_size()
        if not (can_reuse and self._can_reuse and self._is_complete and is_sent) or transport.is_closing():
            transport.abort()
            return
        self.is_reused = self._is_in_head = True
        self._is_complete = False
        if self._is_reading_paused:
            self.resume_reading()
        self.deadline = monotonic() + self._idle_timeout_s
        self.target.idle.append(self)

    def close(self) -> None:
        self.transport.abort()

    def pause_reading(self) -> None:
        """Stop reading: the client does not keep up."""
        if not self._is_reading_paused:
            self._is_reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again: the client has caught up."""
        if self._is_reading_paused:
            self._is_reading_paused = False
            self.transport.resume_reading()

    def expire(self) -> None:
        """Close an unused connection; a busy one has its exchange's deadline."""
        if self.exchange is None:
            self.transport.abort()
        else:
            self.deadline = NEVER

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # If the client has left meanwhile, the connection is never taken.
        self.deadline = monotonic() + self._idle_timeout_s
        self._sweeper.watch(self)
        self._siblings.add(self)

    def pause_writing(self) -> None:
        self._is_writing_paused = True
        if self._sender is not None:
            self._sender.is_paused = True

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        if self._sender is not None:
            self._sender.is_paused = False
            self._long_bodies.go_on(self._sender)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # unrequested bytes
            self.transport.abort()
            return
        head = None
        try:
            if self._is_in_head:
                self.is_reused = False
                head, data = self._read_head(data)
                if head is None:
                    return
            data = self._read_body(data)
        except BadMessage as error:
            logger.debug("bad answer instance=%s error=%s", self.target.name, error)
            self._lose()
            return
        if head is None:
            self.target.num_pieces += 1
            exchange.on_answer_piece(data, is_complete=self._is_complete)
        else:
            exchange.on_answer(head, data, is_complete=self._is_complete)
        chunks = self._chunks
        if chunks is not None and chunks.num_unparsed and self.exchange is not None:  # so the body has not ended
            self._judge_chunks(chunks)

    def _judge_chunks(self, chunks: ChunkedBody) -> None:
        if chunks.fault is not None or chunks.num_unparsed > self._max_header_bytes:
            self._lose()

    def _read_head(self, data: bytes) -> tuple[AnswerHead | None, bytes]:
        """Return the head, if it is complete, and what follows it. Raises BadMessage."""
        if self._head:
            data, self._head = self._head + data, b""
        while True:
            end = data.find(_END)
            if end < 0 or end > self._max_header_bytes:
                if len(data) > self._max_header_bytes or not data.startswith(_HTTP[: len(data)]):
                    raise BadMessage(502, "Not a valid HTTP answer, or its header fields are too large.")
                self._head = data
                return None, b""
            line, *lines = data[:end].split(b"\r\n")
            data = data[end + 4 :]
            answer_line = self._lines[line]
            fields, layout = self._heads.read(lines)
            if not answer_line.is_interim:
                break
            if answer_line.is_http10 or layout.has_body:
                raise BadMessage(502, "Not an interim answer.")
        head = AnswerHead(answer_line, fields, layout)
        self._can_reuse = not (answer_line.is_http10 or (layout.options and b"close" in layout.options))
        self._is_in_head = False
        if answer_line.is_bodiless:
            self._chunks, self._left = None, 0
        elif layout.is_chunked:
            self._chunks = ChunkedBody()
        else:
            self._chunks, self._left = None, head.content_length
        return head, data

    def _read_body(self, data: bytes) -> bytes:
        if self._is_complete:
            self._can_reuse = False  # a second answer was not requested
            return b""
        chunks, left = self._chunks, self._left
        if chunks is not None:
            data = chunks.feed(data)
            if chunks.is_complete:
                self._is_complete = True
                if chunks.rest:
                    self._can_reuse = False
        elif left is None:
            self._can_reuse = False
        elif len(data) < left:
            self._left = left - len(data)
        else:
            self._is_complete = True
            if len(data) > left:
                self._can_reuse = False
                return data[:left]
        return data

    def eof_received(self) -> bool:
        exchange = self.exchange
        is_until_close = not self._is_in_head and self._chunks is None and self._left is None
        if exchange is not None and is_until_close and not self._is_complete:
            self._is_complete = True
            exchange.on_answer_piece(b"", is_complete=True)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._sweeper.forget(self)
        self._siblings.discard(self)
        self._end_sending()
        if self.exchange is not None:
            self._lose()
        elif self in self.target.idle:
            self.target.idle.remove(self)

    def _lose(self) -> None:
        exchange, self.exchange = self.exchange, None
        self.transport.abort()
        if exchange is not None:
            exchange.on_lost(Loss.RESET)

    def __repr__(self) -> str:
        state = "closed" if self.transport.is_closing() else "idle" if self.exchange is None else "busy"
        return f"<UpstreamConnection {self.target.name} {state}>"


class Connector:
    """Opens connections to instances. At max_connections it closes idle ones for new ones; busy ones stay.

    note: returns how a field of an answer is treated.
    """

    def __init__(
        self,
        sweeper: Sweeper,
        limits: LimitSettings,
        timeouts: TimeoutSettings,
        *,
        max_connections: int,
        note: Callable[[bytes], FieldNote],
    ) -> None:
        self._open: set[UpstreamConnection] = set()
        self._max_connections = max_connections
        self._sweeper = sweeper
        self._caches = AnswerCaches(note)
        self._limits = limits
        self._timeouts = timeouts

    async def connect(self, target: Target) -> UpstreamConnection:
        """Open a connection. Raises OSError (TimeoutError is one)."""
        if len(self._open) >= self._max_connections:
            self._close_idle()
        loop = asyncio.get_running_loop()
        long_bodies = target.long_bodies
        if long_bodies is None:
            long_bodies = target.long_bodies = LongBodyQueue(self._limits.max_long_body_bytes_per_s)
        async with patient_timeout(self._timeouts.connect_timeout_s):
            _, connection = await loop.create_connection(
                lambda: UpstreamConnection(
                    target,
                    self._sweeper,
                    self._caches,
                    siblings=self._open,
                    long_bodies=long_bodies,
                    max_header_bytes=ANSWER_HEAD_FACTOR * self._limits.max_header_bytes,
                    idle_timeout_s=self._timeouts.pool_idle_timeout_s,
                ),
                target.host,
                target.port,
            )
        return connection

    async def connect_for(
        self, target: Target, on_open: Callable[[UpstreamConnection], None], on_lost: Callable[[Loss], None]
    ) -> None:
        """Open a connection and pass it on, or report why there is none."""
        try:
            connection = await self.connect(target)
        except OSError as error:
            logger.debug("instance unreachable instance=%s error=%s", target.name, error)
            on_lost(_loss_of(error))
        except Exception:  # otherwise it ends only the caller's task, and the client waits
            logger.exception("connection not opened instance=%s", target.name)
            on_lost(Loss.UNROUTED)
        else:
            try:
                on_open(connection)
            except Exception:  # a part of the request may have been written
                logger.exception("request not sent instance=%s", target.name)
                connection.exchange = None
                connection.close()
                on_lost(Loss.RESET)

    def _close_idle(self) -> None:
        """Close the connections that have been idle for longest: a 16th of all, so that a search for them is rare."""
        idle = [each for each in self._open if each.exchange is None and each.is_reused]
        idle.sort(key=lambda each: each.deadline)
        for connection in idle[: 1 + self._max_connections // 16]:
            self._open.discard(connection)  # not counted again before the loop has closed it
            connection.close()


def _loss_of(error: OSError) -> Loss:
    """Return the kind of loss for a connection error."""
    if is_shortage(error):
        return Loss.SHORTAGE
    if isinstance(error, ConnectionRefusedError):
        return Loss.UNREACHABLE
    return Loss.UNANSWERED if isinstance(error, TimeoutError) else Loss.UNROUTED
