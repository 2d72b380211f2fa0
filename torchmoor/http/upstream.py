"""Connections to instances: kept alive, one exchange at a time, the latest used first.

A connection is idle (in its target's `idle` list), busy (it has an exchange), or closed. It returns to idle only
if the answer ended where its framing said, nothing came after it, and the request was sent whole; everything else
closes it. Taking an idle one is a synchronous `pop()`.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from torchmoor.http.call import Loss, Target
from torchmoor.http.message import HOP_BY_HOP, Headers, connection_options, without
from torchmoor.http.sweeper import NEVER, Sweeper

logger = logging.getLogger(__name__)

_FRAMING = HOP_BY_HOP | {b"content-length", b"transfer-encoding"}


class AnswerReceiver(Protocol):
    """Who waits for the answer on a busy connection."""

    def on_answer_head(self, status: int, reason: bytes, headers: Headers, content_length: int | None) -> None:
        """A final status line and its fields are there. content_length None: the end will be told."""
        ...

    def on_answer_piece(self, piece: bytes) -> None:
        """Part of the body."""
        ...

    def on_received(self, *, is_complete: bool) -> None:
        """Everything of one received piece was told; if is_complete, the answer has ended."""
        ...

    def on_lost(self, loss: Loss) -> None:
        """The connection ended before the answer did; it is closed and has no exchange any more."""
        ...

    def on_upstream_write_paused(self, is_paused: bool) -> None:
        """The instance takes bytes more slowly than they come, or does again."""
        ...


class _Detached(Exception):
    """Raised in a parser callback to stop parsing for an exchange that has left."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to one instance."""

    __slots__ = (
        "target",
        "exchange",
        "transport",
        "deadline",
        "num_answers",
        "_max_header_bytes",
        "_idle_timeout_s",
        "_sweeper",
        "_parser",
        "_headers",
        "_reason",
        "_options",
        "_content_length",
        "_is_chunked",
        "_is_in_head",
        "_is_complete",
        "_is_until_close",
        "_can_reuse",
        "_num_unparsed",
        "_is_reading_paused",
    )

    transport: asyncio.Transport

    def __init__(self, target: Target, sweeper: Sweeper, *, max_header_bytes: int, idle_timeout_s: float) -> None:
        self.target = target
        self.exchange: AnswerReceiver | None = None
        self.deadline = NEVER
        self.num_answers = 0
        self._max_header_bytes = max_header_bytes
        self._idle_timeout_s = idle_timeout_s
        self._sweeper = sweeper
        self._parser = HttpResponseParser(self)
        self._is_reading_paused = False
        self._options: set[bytes] | None = None
        self._expect_answer()

    def _expect_answer(self) -> None:
        self._headers: Headers = []
        self._reason = b""
        self._content_length: int | None = None
        self._is_chunked = self._is_complete = self._is_until_close = self._can_reuse = False
        self._is_in_head = True
        self._num_unparsed = 0

    # What an exchange does

    @property
    def is_usable(self) -> bool:
        """False if the connection has ended without our having noticed yet."""
        return not self.transport.is_closing()

    @property
    def is_reused(self) -> bool:
        """True if it has carried an answer before: the peer may be closing it at this moment."""
        return self.num_answers > 0

    def take(self, exchange: AnswerReceiver) -> None:
        """Make the connection busy."""
        self.exchange = exchange
        self.deadline = NEVER

    def release(self, *, can_reuse: bool) -> None:
        """The exchange is over: go back to idle if the answer was whole, else close."""
        self.exchange = None
        if not (can_reuse and self._can_reuse and self._is_complete) or self.transport.is_closing():
            self.transport.abort()
            return
        self.num_answers += 1
        self.resume_reading()
        self._expect_answer()
        self.deadline = monotonic() + self._idle_timeout_s
        self.target.idle.append(self)

    def close(self) -> None:
        """Close an idle connection."""
        self.transport.abort()

    def pause_reading(self) -> None:
        """The client takes bytes more slowly than they come."""
        if not self._is_reading_paused:
            self._is_reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """The client takes bytes again."""
        if self._is_reading_paused:
            self._is_reading_paused = False
            self.transport.resume_reading()

    def expire(self) -> None:
        """Unused for too long."""
        self.transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # Whoever asked for the connection may have left in this very moment: then nobody takes it.
        self.deadline = monotonic() + self._idle_timeout_s
        self._sweeper.watch(self)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # bytes that nobody asked for
            self.transport.abort()
            return
        self._num_unparsed += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if error.__context__ is not None and not isinstance(error.__context__, _Detached):
                logger.error("fault in an answer's callback target=%s", self.target.name, exc_info=error)
            if self.exchange is not exchange:
                return
            self._can_reuse = False
            if not self._is_complete:
                exchange.on_received(is_complete=False)
                self._lose()
                return
        if self.exchange is not exchange:  # the request went elsewhere when the head was judged
            return
        if self._num_unparsed > self._max_header_bytes and not self._is_complete:
            self._lose()  # an endless head or trailer
        else:
            exchange.on_received(is_complete=self._is_complete)

    def eof_received(self) -> bool:
        if self.exchange is not None and self._is_until_close and not self._is_complete:
            self._is_complete = True
            self.exchange.on_received(is_complete=True)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._sweeper.forget(self)
        if self.exchange is not None:
            self._lose()
        elif self in self.target.idle:
            self.target.idle.remove(self)

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.on_upstream_write_paused(True)

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.on_upstream_write_paused(False)

    def _lose(self) -> None:
        exchange, self.exchange = self.exchange, None
        self.transport.abort()
        if exchange is not None:
            exchange.on_lost(Loss.RESET)

    # httptools

    def on_status(self, reason: bytes) -> None:
        if self._is_complete:  # a second answer: nobody asked for it
            raise _Detached
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head or self._is_complete:  # a trailer
            return
        name = name.lower()
        if name not in _FRAMING:
            self._headers.append((name, value))
        elif name == b"content-length":
            self._content_length = int(value)
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise _Detached
            self._is_chunked = True
        elif name == b"connection":
            self._options = connection_options(value) or None

    def on_headers_complete(self) -> None:
        if self._is_complete or self.exchange is None:
            raise _Detached
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                raise _Detached
            self._expect_answer()
            return
        if self._options:
            self._headers = without(self._headers, self._options)
            self._options = None
        self._is_in_head = False
        # Asked here and only here: llhttp forgets the framing once the message is complete.
        self._can_reuse = self._parser.should_keep_alive()
        self._is_until_close = self._content_length is None and not self._is_chunked and status not in (204, 304)
        self.exchange.on_answer_head(status, self._reason, self._headers, self._content_length)

    def on_body(self, piece: bytes) -> None:
        if self.exchange is None:
            raise _Detached
        self._num_unparsed = 0
        self.exchange.on_answer_piece(piece)

    def on_message_complete(self) -> None:
        if self.exchange is None:
            raise _Detached
        if not self._is_in_head:  # an interim answer is none
            self._is_complete = True

    def __repr__(self) -> str:
        state = "closed" if self.transport.is_closing() else "idle" if self.exchange is None else "busy"
        return f"<UpstreamConnection {self.target.name} {state} {self.num_answers} answers>"


class Connector:
    """Opens connections to instances."""

    def __init__(
        self, sweeper: Sweeper, *, connect_timeout_s: float, idle_timeout_s: float, max_header_bytes: int
    ) -> None:
        self._sweeper = sweeper
        self._connect_timeout_s = connect_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._max_header_bytes = max_header_bytes

    async def connect(self, target: Target) -> UpstreamConnection:
        """A fresh connection. Raises OSError (TimeoutError is one)."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await loop.create_connection(
                lambda: UpstreamConnection(
                    target,
                    self._sweeper,
                    max_header_bytes=self._max_header_bytes,
                    idle_timeout_s=self._idle_timeout_s,
                ),
                target.host,
                target.port,
            )
        return connection
