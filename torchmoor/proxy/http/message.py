"""Requests, answer heads and replies, shared by both sides of the data plane."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from time import time
from typing import Any, Protocol

from torchmoor.proxy.http.fields import Field
from torchmoor.proxy.http.head import Head, Layout

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # an interim answer
DATE = b"date"
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class BodyCheck(Protocol):
    """Verifies a request's body before any of it is used.

    is_head_verified: the caller is known, only the body is to be compared with its hash in the head.
    """

    max_body_bytes: int
    is_head_verified: bool

    def verify(self, body: bytes) -> None:
        """Raise the application's error if the head's signature does not cover this body. Called at most once."""
        ...


@dataclass(eq=False, slots=True)
class RequestLine:
    """A request's first line; never changed. path and query: as sent, the query without its question mark.

    handler: the application's handler of such requests.
    """

    method: bytes
    path: bytes
    query: bytes
    is_http10: bool
    handler: Any = None


class Request(Head):
    """A request's head.

    content_length: None when there is no body or it is chunked. received_at: monotonic seconds.

    principal: the caller, once it is known; "" without authentication. is_admitted: its credentials were verified, with
    its body if a signature covers that. body_check: verifies the whole body before the request has any effect; None if
    nothing is checked. answer_lines: header lines that every answer to the request gets.
    """

    __slots__ = (
        *("line", "method", "path", "content_length", "received_at"),
        *("principal", "is_admitted", "body_check", "answer_lines"),
    )

    def __init__(self, line: RequestLine, fields: list[Field], layout: Layout, received_at: float = 0.0) -> None:
        self.line = line
        self.method = line.method
        self.path = line.path
        self.fields = fields
        self.layout = layout
        length = layout.length
        self.content_length = None if length is None else fields[length].number
        self.received_at = received_at
        self.principal = ""
        self.is_admitted = False
        self.body_check: BodyCheck | None = None
        self.answer_lines = b""

    @property
    def is_chunked(self) -> bool:
        """True if the body's length is not declared."""
        return self.layout.is_chunked

    @property
    def is_expecting(self) -> bool:
        """True if the client waits for `100 Continue` before it sends the body."""
        return self.layout.is_expecting and not self.line.is_http10

    @property
    def query(self) -> bytes:
        return self.line.query

    @property
    def host(self) -> bytes:
        place = self.layout.host
        return b"" if place is None else self.fields[place].value

    @property
    def framing_line(self) -> bytes:
        """The header line that frames a body of declared length, or none, as it is forwarded."""
        place = self.layout.length
        if place is not None:
            return self.fields[place].line
        return b"" if self.method == b"GET" else b"content-length: 0\r\n"

    def __repr__(self) -> str:
        return f"<Request {self.method.decode()} {self.path.decode('latin-1')}>"


class AnswerLine:
    """An answer's first line; never changed. `client_line` is the line as the client gets it.

    is_interim: another head follows. is_bodiless: no body does, whatever the fields say.
    """

    __slots__ = ("status", "is_http10", "is_interim", "is_bodiless", "client_line")

    def __init__(self, status: int, reason: bytes, *, is_http10: bool) -> None:
        self.status = status
        self.is_http10 = is_http10
        self.is_interim = status < 200
        self.is_bodiless = status in (204, 304)
        self.client_line = status_line(status, reason)


class AnswerHead(Head):
    """The head of an instance's answer. content_length: None if it is not declared."""

    __slots__ = ("line", "status", "content_length")

    def __init__(self, line: AnswerLine, fields: list[Field], layout: Layout) -> None:
        self.line = line
        self.status = line.status
        self.fields = fields
        self.layout = layout
        length = layout.length
        self.content_length = None if length is None else fields[length].number

    @property
    def retry_after_s(self) -> int | None:
        """The seconds of Retry-After, if it has them."""
        return self.find_number(b"retry-after")


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer of the proxy itself."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""

    def render(self, *, keep_alive: bool, added_lines: bytes = b"", without_body: bool = False) -> bytes:
        """Render the bytes on the wire. added_lines: of the request that it answers. without_body: for HEAD.

        The client has the body of a 304 already, so only its length is sent.
        """
        lines = b"".join(b"%b: %b\r\n" % pair for pair in self.headers)
        length = b"content-length: %d\r\n" % len(self.body)
        close = b"" if keep_alive else b"connection: close\r\n"
        head = b"".join((status_line(self.status), date_line(), lines, added_lines, length, close, b"\r\n"))
        return head if without_body or self.status == 304 else head + self.body


def status_line(status: int, reason: bytes = b"") -> bytes:
    """Render the first line of an answer, with the usual phrase by default."""
    return b"HTTP/1.1 %d %b\r\n" % (status, reason or _REASONS.get(status, b"Unknown"))


def date_line() -> bytes:
    """Render the header line with the time, which every final answer has (RFC 9110 6.6.1)."""
    return _date_line(int(time()))


@lru_cache(maxsize=1)
def _date_line(second: int) -> bytes:
    return b"%b: %b\r\n" % (DATE, formatdate(second, usegmt=True).encode())
