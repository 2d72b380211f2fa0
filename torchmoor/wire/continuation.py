"""The continuation of a stream whose instance was lost: marked pieces, and the request for what follows them.

A request's header CONTINUABLE asks an instance to mark the pieces of a stream. If the answer has a header of that name,
its pieces are marked; the header's value is the start, which describes the beginning of the answer. Before each piece
stands a line `LENGTH NOTE`; before the piece that ends the answer, `LENGTH. NOTE`; before one that reports the
instance's own failure, `LENGTH! NOTE`. LENGTH is hexadecimal. Another instance continues the stream with the request,
the start and the notes of the pieces that the client has. The proxy does not read the start and the notes, except the
note of the piece that ends the answer, which is the number of the answer's tokens.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import NamedTuple

MARKING = "1"  # the value of a request's CONTINUABLE
MAX_NOTE_BYTES = 1 << 20  # enough for thousands of tokens, each with the likeliest ones
MAX_PIECE_BYTES = 16 << 20  # enough for an answer that repeats the longest prompt in one piece
MAX_FAILURE_BYTES = 65_536
_LINE = re.compile(rb"([0-9a-f]{1,8})([.!]?) ([!-~]*)")


class PieceKind(Enum):
    """The meaning of a piece; the values are the marks."""

    PART = b""
    END = b"."  # it completes the answer, or ends it with an error that would also occur at another instance
    FAILURE = b"!"  # reports the instance's failure; the client gets it only if no other instance continues


PIECE_KINDS = {kind.value: kind for kind in PieceKind}


class MarkedPiece(NamedTuple):
    """A piece of an answer's body, or a part of one. is_whole: the piece ends with this part."""

    data: bytes
    note: bytes
    kind: PieceKind
    is_whole: bool = True


def mark_piece(data: bytes, note: str, kind: PieceKind) -> bytes:
    """Encode a piece. note: printable ASCII without spaces."""
    return b"%x%b %b\n%b" % (len(data), kind.value, note.encode(), data)


class MarkedPieceReader:
    """Reads marked pieces from bytes that are cut anywhere. is_malformed: nothing more is read.

    Buffers at most a line: an incomplete piece is returned in parts.
    """

    __slots__ = ("is_malformed", "_line", "_num_left", "_note", "_kind")

    def __init__(self) -> None:
        self.is_malformed = False
        self._line = b""
        self._num_left = -1  # bytes of the piece that is being read; -1: a line comes next
        self._note = b""
        self._kind = PieceKind.PART

    def take(self, data: bytes) -> list[MarkedPiece]:
        """Return the pieces, and the parts of pieces, in these bytes."""
        pieces: list[MarkedPiece] = []
        if self._line:
            data, self._line = self._line + data, b""
        at = 0
        while not self.is_malformed:
            if self._num_left < 0:
                line_end = data.find(b"\n", at)
                if line_end < 0:
                    self._line = data[at:]
                    self.is_malformed = len(self._line) > MAX_NOTE_BYTES
                    break
                self._read_line(data, at, line_end)
                at = line_end + 1
                continue
            end = at + self._num_left
            is_whole = end <= len(data)
            if is_whole or at < len(data):
                pieces.append(MarkedPiece(data[at:end], self._note, self._kind, is_whole))
            if not is_whole:
                self._num_left = end - len(data)
                break
            self._num_left = -1
            at = end
        return pieces

    def _read_line(self, data: bytes, start: int, end: int) -> None:
        line = _LINE.fullmatch(data, start, end)
        if line is None:
            self.is_malformed = True
            return
        self._num_left, self._note, self._kind = int(line[1], 16), line[3], PIECE_KINDS[line[2]]
        limit = MAX_FAILURE_BYTES if self._kind is PieceKind.FAILURE else MAX_PIECE_BYTES
        self.is_malformed = self._num_left > limit


class ContinuationRequest(NamedTuple):
    """The part of a request for the rest of an answer that precedes the original body, and that body's content type."""

    content_type: str
    start: str
    notes: str


def join_request(request: ContinuationRequest, body: bytes) -> tuple[int, bytes]:
    """Return the length of the header CONTINUATION, and the body of the request."""
    about = json.dumps(request).encode()
    return len(about), about + body


def split_request(length: int, body: bytes | bytearray) -> tuple[ContinuationRequest, bytes | bytearray]:
    """Return what `join_request` has joined. Raises ValueError."""
    values = json.loads(body[:length])
    if not isinstance(values, list) or len(values) != 3 or not all(isinstance(value, str) for value in values):
        raise ValueError("not a continuation")
    return ContinuationRequest(*values), body[length:]
