"""Bodies in chunks (RFC 9112 7.1), read strictly: sizes are hexadecimal digits, lines end with CR LF and nothing else.

Extensions and trailers are dropped. The states of a body:

    LINE      a chunk's size is awaited
    DATA      the rest of a chunk's bytes is awaited
    DATA_END  the CR LF behind them is awaited
    TRAILER   the last chunk has come; lines up to an empty one are awaited
    OVER      the body has ended
"""

from __future__ import annotations

import re
from enum import Enum

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;" + _TOKEN + rb"(?:=(?:" + _TOKEN + rb'|"[\t\x20!#-\x5b\x5d-\x7e]*"))?)*')
# RFC 9110 6.5.1: trailers must not frame the message; a recipient that merged them into the head would misread it.
_FRAMING = rb"(?!(?i:transfer-encoding|content-length|host):)"
_TRAILER = re.compile(_FRAMING + _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*")
_CRLF = b"\r\n"
_PLAIN_SIZES = {b"%x" % size: size for size in range(1, 4097)}


class _State(Enum):
    LINE = 0
    DATA = 1
    DATA_END = 2
    TRAILER = 3
    OVER = 4


# Local names: a member of an Enum takes long to look up.
_AT_LINE, _AT_DATA, _AT_DATA_END, _AT_TRAILER, _OVER = _State


class ChunkedBody:
    """Decodes the bytes of one body.

    Valid after each feed: is_complete: the body has ended. rest: the bytes after it. fault: what is wrong with it.
    num_unparsed: the largest number of bytes between two pieces of data in this feed; the caller limits it.
    """

    __slots__ = ("rest", "fault", "num_unparsed", "is_complete", "_state", "_left", "_line", "_num_outside")

    def __init__(self) -> None:
        self.rest = b""
        self.fault: str | None = None
        self.num_unparsed = 0
        self.is_complete = False
        self._state = _AT_LINE
        self._left = 0
        self._line = b""  # the beginning of a line without its end
        self._num_outside = 0  # bytes since the last piece of data

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body's content in these bytes."""
        if self._state is _AT_LINE and not self._line:  # most often one chunk of a stream, and all of it
            stop = data.find(_CRLF)
            size = _PLAIN_SIZES.get(data[:stop])
            if size is not None and len(data) == stop + size + 4 and data.endswith(_CRLF):
                self.num_unparsed = self._num_outside = 0
                return data[stop + 2 : -2]
        at = outside_from = 0
        if self._line:
            outside_from = len(self._line)  # the previous feed has counted these bytes
            data, self._line = self._line + data, b""
        num_unparsed, end = 0, len(data)
        pieces: list[bytes] = []
        while at < end and self._state is not _OVER and self.fault is None:
            if self._state is _AT_DATA:
                num_unparsed = max(num_unparsed, self._num_outside + at - outside_from)
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._num_outside, outside_from = 0, at
                self._left -= len(piece)
                if not self._left:
                    self._state = _AT_DATA_END
                continue
            stop = data.find(_CRLF, at)
            if stop < 0:
                self._hold(data[at:])
                at = end
                break
            self._read_line(data[at:stop])
            at = stop + 2
        self._num_outside += at - outside_from
        self.num_unparsed = max(num_unparsed, self._num_outside)
        if self._state is _OVER:
            self.is_complete = True
            self.rest = data[at:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _hold(self, line: bytes) -> None:
        """Keep a line whose end may still come."""
        if b"\n" in line or (self._state is _AT_DATA_END and line != b"\r"):
            self.fault = "A line of a chunked body must end with CR LF."
        self._line = line

    def _read_line(self, line: bytes) -> None:
        state = self._state
        if state is _AT_LINE:
            size = _SIZE.fullmatch(line)
            if size is None:
                self.fault = "Not a valid chunk size."
                return
            self._left = int(size[1], 16)
            self._state = _AT_DATA if self._left else _AT_TRAILER
        elif not line:
            self._state = _AT_LINE if state is _AT_DATA_END else _OVER
        elif state is _AT_DATA_END:
            self.fault = "A chunk is longer than its size."
        elif not _TRAILER.fullmatch(line):
            self.fault = "Not a valid trailer field."
