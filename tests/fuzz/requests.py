"""RequestReader against llhttp: it may refuse more, but never parses a request differently."""

import re

import httptools

from tests.fuzz.llhttp import CUT, Requests
from torchmoor.proxy.http.fields import BadMessage
from torchmoor.proxy.http.message import Request
from torchmoor.proxy.http.reader import RequestCaches, RequestReader

MAX_HEADER_BYTES = 2_000


class Listener:
    """A listener that records requests and completes each at once."""

    def __init__(self) -> None:
        self.heads: list[tuple[bytes, bytes, list[tuple[bytes, bytes]]]] = []
        self.bodies: list[bytes] = []
        self.num_complete = self.num_held = self.num_fed = 0
        self.reader = RequestReader(self, RequestCaches(), MAX_HEADER_BYTES)

    def on_request(self, request: Request, piece: bytes, *, is_complete: bool) -> None:
        url = request.path + (b"?" + request.query if request.query else b"")
        self.heads.append((request.method, url, [(field.name, field.value) for field in request.headers]))
        self.bodies.append(b"")
        self.on_request_piece(piece, is_complete=is_complete)

    def on_request_piece(self, piece: bytes, *, is_complete: bool) -> None:
        self.bodies[-1] += piece
        if is_complete:
            self.num_complete += 1
            if self.reader.keep_alive:
                self.reader.expect_next()

    def on_many(self) -> None:
        self.reader.wait()
        self.num_held += 1

    def feed(self, data: bytes) -> None:
        """Feed a piece, and what the reader has held of it."""
        self.reader.feed(data)
        while self.num_fed < self.num_held:
            self.num_fed += 1
            self.reader.feed(self.reader.stop_waiting())


def read(pieces: list[bytes]) -> tuple[Listener, BadMessage | None]:
    """Return the requests read from the pieces and the error; no other exception may be raised."""
    listener = Listener()
    try:
        for piece in pieces:
            listener.feed(piece)
    except BadMessage as error:
        return listener, error
    return listener, None


def compare(data: bytes, listener: Listener) -> None:
    """llhttp must read the same requests, field by field and byte by byte."""
    num = listener.num_complete
    if not num:
        return
    oracle = Requests()
    try:
        oracle.parser.feed_data(data)
    except httptools.HttpParserUpgrade:  # for llhttp, the body and everything after it are another protocol's
        num = min(num, oracle.num_complete - 1)
    except httptools.HttpParserError:
        pass

    assert oracle.num_complete >= num, (oracle.num_complete, num)
    heads = [(method, _path_of(url), fields) for method, url, fields in oracle.heads[:num]]
    assert heads == listener.heads[:num], (heads, listener.heads)
    assert oracle.bodies[:num] == listener.bodies[:num], (oracle.bodies, listener.bodies)


def _path_of(url: bytes) -> bytes:
    """Return our form of a target: a path without an origin and without an empty query."""
    if url != b"*" and not url.startswith(b"/"):
        url = b"/" + re.sub(rb"\A[^/?]*", b"", url.partition(b"://")[2]).removeprefix(b"/")
    path, _, query = url.partition(b"?")
    return path + (b"?" + query if query else b"")


def check(data: bytes) -> None:
    """Check any bytes in any pieces."""
    pieces = data.split(CUT)
    data = b"".join(pieces)
    in_pieces, bad_in_pieces = read(pieces)
    whole, bad = read([data])

    compare(data, in_pieces)
    num = whole.num_complete
    assert (in_pieces.num_complete, in_pieces.heads[:num]) == (num, whole.heads[:num])
    assert in_pieces.bodies[:num] == whole.bodies[:num]
    assert (bad is None) == (bad_in_pieces is None), (bad, bad_in_pieces)
    assert bad is None or 400 <= bad.status < 600
