"""Read the same bytes with llhttp in its default strictness, as the reference parser."""

import itertools
from typing import Any

import httptools

CUT = b"\xfe"  # separates the received pieces in a fuzzed input
HIDDEN = frozenset(
    (
        *(b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"te", b"upgrade", b"trailer"),
        *(b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
    )
)


class Messages:
    """A parser's events. messages: one [first line's parts..., forwarded header fields] each."""

    def __init__(self) -> None:
        self.heads: list[list[Any]] = []
        self.bodies: list[bytes] = []
        self.num_complete = 0
        self._is_in_head = True
        self._options: set[bytes] = set()

    def on_message_begin(self) -> None:
        self.heads.append([b"", b"", []])
        self.bodies.append(b"")
        self._is_in_head = True
        self._options = set()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:  # a trailer
            return
        if name.lower() == b"connection":
            self._options |= {option.strip().lower() for option in value.split(b",")} - {b"", b"keep-alive"}
        if name.lower() not in HIDDEN:
            self.heads[-1][2].append((name.lower(), value.rstrip(b" \t")))  # llhttp leaves it there

    def end_head(self) -> None:
        self._is_in_head = False
        fields = self.heads[-1][2]
        self.heads[-1][2] = [pair for pair in fields if pair[0] not in self._options]

    def on_body(self, piece: bytes) -> None:
        self.bodies[-1] += piece

    def on_message_complete(self) -> None:
        self.num_complete += 1


class Requests(Messages):
    """Requests: method, target, fields."""

    def __init__(self) -> None:
        super().__init__()
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self.heads[-1][1] += url

    def on_headers_complete(self) -> None:
        self.heads[-1][0] = self.parser.get_method()
        self.end_head()


class Answers(Messages):
    """Answers, interim ones included: status, reason, fields."""

    def __init__(self) -> None:
        super().__init__()
        self.parser = httptools.HttpResponseParser(self)

    def on_status(self, reason: bytes) -> None:
        self.heads[-1][1] += reason

    def on_headers_complete(self) -> None:
        self.heads[-1][0] = self.parser.get_status_code()
        self.end_head()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cut an input into its pieces."""
    ends = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]
