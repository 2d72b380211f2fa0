"""Reads requests from a client's bytes, and refuses everything that is not a valid request.

A head ends at its first empty line and its lines are matched whole (see `fields`). What is not explicitly allowed is
refused: bare line ends, folded lines, both lengths, a second Host, codings other than `chunked`, Upgrade of a request
that has a body or is not a GET, and a request that begins before the one before it is answered. Trailers are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Protocol

from torchmoor.proxy.http.bounded_cache import BoundedCache
from torchmoor.proxy.http.chunks import ChunkedBody
from torchmoor.proxy.http.fields import BadMessage, FieldNote, note_nothing
from torchmoor.proxy.http.head import HeadBook, Layout
from torchmoor.proxy.http.message import Request, RequestLine

MAX_URL_BYTES = 8_192
MAX_KEPT_LINES = 1024
MAX_KEPT_LINE_BYTES = 256  # a longer request line is not kept
MAX_AT_ONCE = 16  # requests that are read from one piece before other connections get their turn

_END = b"\r\n\r\n"
_LINE_ENDS = b"\r\n"
_LINE = re.compile(rb"(GET|POST|PUT|HEAD|DELETE|OPTIONS|PATCH) ([\x21-\xff]+) HTTP/1\.([01])")
_ORIGIN = re.compile(rb"https?://[A-Za-z0-9._\-:\[\]]+(?=[/?]|\Z)", re.IGNORECASE)
_OF_THE_SERVER = b"OPTIONS", b"*"  # a request about no path: RFC 9110 9.3.7
_BEGINNING = re.compile(rb"[A-Z]{1,7}(?: |\Z)")
_BARE_LF = re.compile(rb"(?<!\r)\n")


def _handle_nothing(method: bytes, path: bytes) -> None:
    """Find no handler, for readers that only check bytes."""


def _read_request_line(find_handler: Callable[[bytes, bytes], Any], line: bytes) -> RequestLine:
    match = _LINE.fullmatch(line)
    if match is None:
        raise BadMessage(400, "Not a valid HTTP request.")
    url = match[2]
    if not url.startswith(b"/") and (match[1], url) != _OF_THE_SERVER:
        origin = _ORIGIN.match(url)
        if origin is None:
            raise BadMessage(400, "The request's target must be a path.")
        url = b"/" + url[origin.end() :].removeprefix(b"/")
    if len(url) > MAX_URL_BYTES:
        raise BadMessage(414, "The request's target is too long.")
    if not url.isascii() or b"\x7f" in url:
        raise BadMessage(400, "The request's target must be ASCII.")
    path, _, query = url.partition(b"?")
    handler = find_handler(match[1], path)
    return RequestLine(match[1], path, query, is_http10=match[3] == b"0", handler=handler)


class RequestCaches:
    """The request lines and heads that all readers of a server have seen before.

    note: returns how a field's name is treated; find_handler: returns the handler of a method and path.
    """

    def __init__(
        self,
        note: Callable[[bytes], FieldNote] = note_nothing,
        find_handler: Callable[[bytes, bytes], Any] = _handle_nothing,
    ) -> None:
        self.lines = BoundedCache(
            partial(_read_request_line, find_handler),
            MAX_KEPT_LINES,
            lambda line, read: len(line) <= MAX_KEPT_LINE_BYTES,
        )
        self.heads = HeadBook(note)


class RequestListener(Protocol):
    """Receives requests, in the order of their parts."""

    def on_request(self, request: Request, piece: bytes, *, is_complete: bool) -> None:
        """Receive a head. piece: what was received of the body with it; is_complete: that is all of it."""
        ...

    def on_request_piece(self, piece: bytes, *, is_complete: bool) -> None:
        """Receive more of the body."""
        ...

    def on_many(self) -> None:
        """Call `wait`, and later feed what `stop_waiting` returns: MAX_AT_ONCE requests have come in one piece."""
        ...


class RequestReader:
    """Cuts a client connection's bytes into requests. `expect_next` must be called before another may begin.

    keep_alive: False once the current request must be the connection's last. is_http10: the last request has HTTP/1.0.
    """

    def __init__(self, listener: RequestListener, caches: RequestCaches, max_header_bytes: int) -> None:
        self._listener = listener
        self._lines = caches.lines
        self._heads = caches.heads
        self._max_header_bytes = max_header_bytes
        self.keep_alive = True
        self.is_http10 = False
        self.is_in_head = True
        self._head = b""  # the beginning of a head without its end
        self._left = 0  # of a body with a declared length
        self._chunks: ChunkedBody | None = None
        self._is_dealt_with = True
        self._is_waiting = False
        self._held = b""  # received while it waited

    @property
    def has_begun(self) -> bool:
        return bool(self._head)

    def expect_next(self) -> None:
        """Allow the next request: the last one is answered."""
        self._is_dealt_with = True

    def wait(self) -> None:
        """Hold what was received after the last request until `stop_waiting`, instead of refusing it."""
        self._is_waiting = True

    def stop_waiting(self) -> bytes:
        """Allow the next request, and return the held bytes, which the caller must feed."""
        self._is_dealt_with, self._is_waiting = True, False
        held, self._held = self._held, b""
        return held

    def feed(self, data: bytes) -> None:
        """Read bytes. Raises BadMessage, after which no more may be fed."""
        num_read = 0
        while data:
            if self.is_in_head:
                if not self._is_dealt_with:
                    if self._is_waiting:
                        self._held += data
                        return
                    if data.strip(b"\r\n"):
                        raise BadMessage(400, "A request began before the answer to the one before it.")
                    return
                data = self._read_head(data)
                if data:
                    num_read += 1
                    if num_read >= MAX_AT_ONCE and self._is_dealt_with:
                        self._is_dealt_with = False
                        self._listener.on_many()
            elif self._chunks is not None:
                data = self._read_chunks(self._chunks, data)
            else:
                left = self._left
                piece = data if len(data) <= left else data[:left]
                data = data[left:]
                self._left = left - len(piece)
                self.is_in_head = is_complete = not self._left
                self._listener.on_request_piece(piece, is_complete=is_complete)

    def _read_head(self, data: bytes) -> bytes:
        """Return what follows the head and, if the whole body is there, what follows that."""
        if self._head:
            data, self._head = self._head + data, b""
        if data[0] in _LINE_ENDS:  # RFC 9112 2.2: ignored before a request
            data = data.lstrip(_LINE_ENDS)
        end = data.find(_END)
        if end < 0 or end > self._max_header_bytes:
            self._hold(data)
            return b""
        line, *lines = data[:end].split(b"\r\n")
        request_line = self._lines[line]
        fields, layout = self._heads.read(lines)
        request = Request(request_line, fields, layout, monotonic())
        start = end + 4
        if not layout.is_usual or request_line.is_http10:
            self._judge(request_line, layout)
            if layout.is_chunked:
                self.is_in_head = self._is_dealt_with = False
                self._chunks = ChunkedBody()
                self._listener.on_request(request, b"", is_complete=False)
                return data[start:]
        self._is_dealt_with = False
        stop = start + (request.content_length or 0)
        num_missing = stop - len(data)
        if not num_missing:
            self._listener.on_request(request, data[start:], is_complete=True)
            return b""
        if num_missing > 0:
            self.is_in_head = False
            self._left = num_missing
            self._listener.on_request(request, data[start:], is_complete=False)
            return b""
        self._listener.on_request(request, data[start:stop], is_complete=True)
        return data[stop:]

    def _judge(self, line: RequestLine, layout: Layout) -> None:
        """Apply an unusual head to its connection. Raises BadMessage."""
        if line.is_http10:
            self.is_http10 = True
            self.keep_alive = False
            if layout.is_chunked:
                raise BadMessage(400, "HTTP/1.0 has no transfer codings.")
        else:
            self.keep_alive = b"close" not in layout.options
        if layout.num_hosts != 1 and not (line.is_http10 and layout.num_hosts == 0):
            raise BadMessage(400, "A request needs one Host.")
        if layout.wants_upgrade and (line.method != b"GET" or line.is_http10 or layout.has_body):
            raise BadMessage(400, "Upgrade is not supported.")

    def _hold(self, data: bytes) -> None:
        """Keep the beginning of a head, unless it is already invalid."""
        if len(data) > self._max_header_bytes:
            raise BadMessage(431, "The request's header fields are too large.")
        if data and (not _BEGINNING.match(data.partition(b"\r")[0]) or _BARE_LF.search(data)):
            raise BadMessage(400, "Not a valid HTTP request.")
        self._head = data

    def _read_chunks(self, chunks: ChunkedBody, data: bytes) -> bytes:
        piece = chunks.feed(data)
        if chunks.fault is not None:
            raise BadMessage(400, chunks.fault)
        if chunks.num_unparsed > self._max_header_bytes:
            raise BadMessage(431, "The request's header fields are too large.")
        is_complete = chunks.is_complete
        if is_complete:
            self._chunks = None
            self.is_in_head = True
        if piece or is_complete:
            self._listener.on_request_piece(piece, is_complete=is_complete)
        return chunks.rest
