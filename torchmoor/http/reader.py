"""Reads requests from a client's bytes and refuses what is no servable request.

llhttp is strict about framing (both lengths, obs-fold, bare line ends, bad chunk sizes). This module adds what it
leaves open: header bytes in all, one Host, `chunked` as the only coding, no Upgrade, no trailers, and no request
before the one before it has been dealt with.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Protocol

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from torchmoor.http.message import HOP_BY_HOP, Headers, Request, connection_options, without

logger = logging.getLogger(__name__)

MAX_URL_BYTES = 8_192

_SPECIAL = HOP_BY_HOP | {b"content-length", b"transfer-encoding", b"expect", b"host"}


class BadRequest(Exception):
    """The bytes are no servable request; nothing that follows them can be read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class RequestListener(Protocol):
    """Who is told of requests, in the order of their parts."""

    def on_request(self, request: Request) -> None:
        """A head is complete."""
        ...

    def on_request_piece(self, piece: bytes) -> None:
        """Part of the body."""
        ...

    def on_request_complete(self) -> None:
        """The body has ended."""
        ...


class RequestReader:
    """A client connection's parser. After a request, `expect_next` must be called before another may begin.

    keep_alive, is_http10, is_expecting: of the request whose head was told last.
    """

    __slots__ = (
        "keep_alive",
        "is_http10",
        "is_expecting",
        "is_in_head",
        "num_unparsed",
        "_listener",
        "_max_header_bytes",
        "_parser",
        "_url",
        "_headers",
        "_options",
        "_num_hosts",
        "_host",
        "_content_length",
        "_is_chunked",
    )

    def __init__(self, listener: RequestListener, max_header_bytes: int) -> None:
        self._listener = listener
        self._max_header_bytes = max_header_bytes
        self._parser = HttpRequestParser(self)
        self.keep_alive = True
        self.is_http10 = False
        self.expect_next()

    def expect_next(self) -> None:
        """The request has been dealt with: another may begin."""
        self._url = b""
        self._headers: Headers = []
        self._options: set[bytes] | None = None
        self._num_hosts = 0
        self._host = b""
        self._content_length: int | None = None
        self._is_chunked = self.is_expecting = False
        self.is_in_head = True
        self.num_unparsed = 0  # bytes taken since the last that were part of a body

    def feed(self, data: bytes) -> None:
        """Take bytes. Raises BadRequest, after which no more may be fed."""
        self.num_unparsed += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserCallbackError as error:
            if isinstance(error.__context__, BadRequest):
                raise error.__context__ from None
            logger.error("fault in a request's callback", exc_info=error.__context__ or error)
            raise BadRequest(500, "The request could not be handled.") from error
        except HttpParserUpgrade as error:
            raise BadRequest(400, "Upgrade and CONNECT are not supported.") from error
        except HttpParserError as error:
            raise BadRequest(400, f"Not a valid HTTP request: {error}.") from error
        # Many bytes without a body's: an endless head, chunk extension or trailer.
        if self.num_unparsed > self._max_header_bytes and (self.is_in_head or self._is_chunked):
            raise BadRequest(431, "The request's header fields are too large.")

    # httptools

    def on_url(self, url: bytes) -> None:
        if not self.is_in_head:
            raise BadRequest(400, "A request began before the answer to the one before it.")
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_in_head:  # a trailer
            return
        name = name.lower()
        if name not in _SPECIAL:
            self._headers.append((name, value))
        elif name == b"host":
            self._num_hosts += 1
            self._host = value
        elif name == b"content-length":
            self._content_length = int(value)
        else:
            self._on_special_header(name, value)

    def _on_special_header(self, name: bytes, value: bytes) -> None:
        if name == b"connection":
            options = connection_options(value)
            if options:
                self._options = (self._options or set()) | options
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise BadRequest(501, "The only transfer coding is chunked.")
            self._is_chunked = True
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise BadRequest(417, "The only expectation is 100-continue.")
            self.is_expecting = True

    def on_headers_complete(self) -> None:
        parser = self._parser
        if self.num_unparsed > self._max_header_bytes:
            num_bytes = sum(len(name) + len(value) + 4 for name, value in self._headers)
            if num_bytes > self._max_header_bytes:
                raise BadRequest(431, "The request's header fields are too large.")
        self.is_in_head = False
        self.keep_alive = parser.should_keep_alive()
        self.is_http10 = parser.get_http_version() != "1.1"
        self._check_head()
        if self._options:
            self._headers = without(self._headers, self._options)
        path, _, query = self._url.partition(b"?")
        self._listener.on_request(
            Request(
                parser.get_method(),
                path,
                query,
                self._headers,
                content_length=self._content_length,
                is_chunked=self._is_chunked,
                received_at=monotonic(),
                host=self._host,
            )
        )

    def _check_head(self) -> None:
        """Raise BadRequest for a head that llhttp lets through and we do not."""
        if self.is_http10:
            self.keep_alive = self.is_expecting = False
            if self._is_chunked:
                raise BadRequest(400, "HTTP/1.0 has no transfer codings.")
        elif self._num_hosts != 1:
            raise BadRequest(400, "A request needs one Host.")
        if self._parser.should_upgrade():
            raise BadRequest(400, "Upgrade and CONNECT are not supported.")
        url = self._url
        if not url.startswith(b"/"):
            scheme, _, rest = url.partition(b"://")
            if scheme.lower() not in (b"http", b"https"):
                raise BadRequest(400, "The request's target must be a path.")
            self._url = url = b"/" + rest.partition(b"/")[2]
        if len(url) > MAX_URL_BYTES:
            raise BadRequest(414, "The request's target is too long.")
        if not url.isascii():
            raise BadRequest(400, "The request's target must be ASCII.")

    def on_body(self, piece: bytes) -> None:
        self.num_unparsed = 0
        self._listener.on_request_piece(piece)

    def on_message_complete(self) -> None:
        self._listener.on_request_complete()
