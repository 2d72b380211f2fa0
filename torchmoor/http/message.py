"""Requests and replies, shared by both sides of the data plane."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from torchmoor.http.fields import Headers

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class BodyCheck(Protocol):
    """Judges a request's body before any of it is used."""

    max_body_bytes: int

    def verify(self, body: bytes) -> None:
        """Raises the application's error if this is not the body that the head promised. At most once."""
        ...

    def release(self) -> None:
        """The body will not be verified; may be called after `verify`, and again."""
        ...


class Request:
    """A request's head.

    path and query: as sent, the query without its question mark. received_at: monotonic seconds.
    content_length: None when there is no body or is_chunked. host: the Host field.

    principal: who sends it, once that is known; "" where nobody is asked. body_check: the request must not be acted
    upon before this has seen the whole body; None if nothing has to be checked.
    """

    __slots__ = (
        "method",
        "path",
        "query",
        "headers",
        "content_length",
        "is_chunked",
        "received_at",
        "host",
        "principal",
        "body_check",
    )

    def __init__(
        self,
        method: bytes,
        path: bytes,
        query: bytes,
        headers: Headers,
        content_length: int | None = None,
        is_chunked: bool = False,
        received_at: float = 0.0,
        host: bytes = b"",
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.content_length = content_length
        self.is_chunked = is_chunked
        self.received_at = received_at
        self.host = host
        self.principal = ""
        self.body_check: BodyCheck | None = None

    def __repr__(self) -> str:
        return f"<Request {self.method.decode()} {self.path.decode('latin-1')}>"


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer that the proxy gives itself."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""

    def render(self, *, keep_alive: bool, without_body: bool = False) -> bytes:
        """The bytes on the wire; without_body answers a HEAD."""
        lines = b"".join(b"%b: %b\r\n" % pair for pair in self.headers)
        close = b"" if keep_alive else b"connection: close\r\n"
        head = b"%b%bcontent-length: %d\r\n%b\r\n" % (status_line(self.status), lines, len(self.body), close)
        return head if without_body else head + self.body


def status_line(status: int, reason: bytes = b"") -> bytes:
    """The first line of an answer, with the usual phrase if none is given."""
    return b"HTTP/1.1 %d %b\r\n" % (status, reason or _REASONS.get(status, b"Unknown"))
