"""An instance's answer on its way to the client: its head, the framing of its body, and its encoder."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from time import monotonic
from typing import Any, Protocol

from torchmoor.proxy.http.message import AnswerHead, Reply, date_line

MAX_REFUSAL_BYTES = 64 << 10  # of an instance's error answer, read to find the cause


class Loss(Enum):
    """How an instance failed a request."""

    UNREACHABLE = "unreachable"  # the target is down or refuses connections: the request was never sent
    UNROUTED = "unrouted"  # no address or no route was found, so not sent; DNS or the network can cause this
    UNANSWERED = "unanswered"  # no connection in time, so not sent either; one lost packet can cause this
    SHORTAGE = "shortage"  # no connection, for lack of a descriptor, port or memory: not the instance's fault
    RESET = "reset"  # the connection ended, or its bytes were not HTTP
    TIMEOUT = "timeout"
    REFUSED = "refused"  # the instance does not continue an answer that another one began


NOT_SENT = frozenset((Loss.UNREACHABLE, Loss.UNROUTED, Loss.UNANSWERED, Loss.SHORTAGE))


class Encoder(Protocol):
    """Rewrites an answer's body as it passes. Each method may return b"", which sends nothing."""

    @property
    def has_failed(self) -> bool:
        """Return whether the instance has ended the answer with an error; valid after `finish`."""
        ...

    def encode(self, piece: bytes) -> bytes:
        """Rewrite one received piece."""
        ...

    def finish(self) -> bytes | None:
        """Return the bytes after the last piece; None if the answer has failed."""
        ...

    def fail(self, loss: Loss) -> bytes | None:
        """Return the end of an answer that broke off; None if the format has no error at its end."""
        ...


class ClientSide(Protocol):
    """The client's connection, as an exchange and its parts use it."""

    deadline: float
    keep_alive: bool
    is_http10: bool

    @property
    def is_write_paused(self) -> bool: ...

    @property
    def source(self) -> str:
        """Return the client's address without its port; "" if the client has gone."""
        ...

    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...
    def exchange_over(self, *, is_request_complete: bool) -> None: ...


class Answer:
    """Renders an instance's answer for the client.

    lines: the status line and the header lines except those that frame the body, each with its line end; an item may
    have several. Empty once they are written.
    encoder: None passes the body through as it is. on_body: called once, before the body's first bytes are written.
    continuer: for a body with the marks of torchmoor/wire/continuation.py; None for any other.
    """

    __slots__ = ("encoder", "on_body", "continuer", "lines", "_is_chunked")

    def __init__(self, lines: tuple[bytes, ...], encoder: Encoder | None = None) -> None:
        self.encoder = encoder
        self.on_body: Callable[[], None] | None = None
        self.continuer: Any = None  # a Continuer of call.py
        self.lines = lines
        self._is_chunked = False

    @property
    def has_failed(self) -> bool:
        """Return whether the instance has ended the answer with an error."""
        return self.encoder is not None and self.encoder.has_failed

    def begin(self, head: AnswerHead, client: ClientSide, added_lines: bytes) -> None:
        """Complete the head for this client; may end its keep-alive. added_lines: of the request that it answers."""
        length = head.layout.length
        framing = b""
        if head.line.is_bodiless:
            pass
        elif length is not None and self.encoder is None:
            framing = head.fields[length].line
        elif client.is_http10:
            client.keep_alive = False
        else:
            framing = b"transfer-encoding: chunked\r\n"
            self._is_chunked = True
        close = b"\r\n" if client.keep_alive else b"connection: close\r\n\r\n"
        self.lines = (*self.lines, date_line(), added_lines, framing, close)

    def render(self, piece: bytes) -> bytes:
        """Encode and frame a piece for the client, behind the head if that is not written yet."""
        if self.encoder is not None and piece:
            piece = self.encoder.encode(piece)
        if self._is_chunked and piece:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        return self._behind_head(piece) if self.lines else piece

    def render_last(self, piece: bytes) -> bytes | None:
        """Render the last piece and the end; None if the answer failed and must look incomplete."""
        encoder = self.encoder
        if encoder is not None:
            piece = encoder.encode(piece) if piece else b""
            tail = encoder.finish()
            if tail is None:
                return None
            piece += tail
        return self._end(piece)

    def render_failure(self, loss: Loss) -> bytes | None:
        """Render the end of an answer that broke off; None if it must look incomplete."""
        tail = self.encoder.fail(loss) if self.encoder is not None else None
        return None if tail is None else self._end(tail)

    def _end(self, piece: bytes) -> bytes:
        if self._is_chunked:
            piece = b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n"
        return self._behind_head(piece) if self.lines else piece

    def _behind_head(self, piece: bytes) -> bytes:
        lines, self.lines = self.lines, ()
        return b"".join((*lines, piece))


class CollectedRefusal:
    """Collects the body of an instance's refusal, up to MAX_REFUSAL_BYTES, and makes a Reply of it."""

    __slots__ = ("_pieces", "_num_left", "_explain")

    def __init__(self, explain: Callable[[bytes], Reply]) -> None:
        self._pieces: list[bytes] = []
        self._num_left = MAX_REFUSAL_BYTES
        self._explain = explain

    def is_full_with(self, piece: bytes) -> bool:
        """Add a piece; return True if it exceeds the limit."""
        self._pieces.append(piece[: self._num_left])
        is_full = len(piece) > self._num_left
        self._num_left -= len(self._pieces[-1])
        return is_full

    def reply(self) -> Reply:
        return self._explain(b"".join(self._pieces))


class WatchedAnswer(Answer):
    """An Answer with measurements, used only if there is an observer, because measuring costs time with each piece.

    began_at: when the body began, in monotonic seconds, or 0.0. num_bytes: of head and body as sent.
    """

    __slots__ = ("began_at", "num_bytes")

    def __init__(self, answer: Answer) -> None:
        """answer: not yet begun; this object replaces it."""
        super().__init__(answer.lines, answer.encoder)
        self.on_body = answer.on_body
        self.began_at = 0.0
        self.num_bytes = 0

    def render(self, piece: bytes) -> bytes:
        self._note_beginning(piece)
        data = super().render(piece)
        self.num_bytes += len(data)
        return data

    def render_last(self, piece: bytes) -> bytes | None:
        self._note_beginning(piece)
        data = super().render_last(piece)
        self.num_bytes += len(data or b"")
        return data

    def render_failure(self, loss: Loss) -> bytes | None:
        data = super().render_failure(loss)
        self.num_bytes += len(data or b"")
        return data

    def _note_beginning(self, piece: bytes) -> None:
        if piece and not self.began_at:
            self.began_at = monotonic()
