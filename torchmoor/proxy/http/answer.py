"""An instance's answer on its way to the client: its head, how its body is framed, and who rewrites it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from time import monotonic
from typing import Protocol

from torchmoor.proxy.http.message import AnswerHead, Reply


class Loss(Enum):
    """How an instance failed a request."""

    UNREACHABLE = "unreachable"  # no connection: the request was never sent
    UNANSWERED = "unanswered"  # no connection in time: neither, but one lost packet is enough for it
    RESET = "reset"  # the connection ended, or what came was not HTTP
    TIMEOUT = "timeout"


class Encoder(Protocol):
    """Rewrites an answer's body as it passes. Every method may return b"" for "nothing to send"."""

    def encode(self, piece: bytes) -> bytes:
        """One received piece."""
        ...

    def finish(self) -> bytes | None:
        """What is still to be sent after the last piece; None if that said that the answer failed."""
        ...

    def fail(self, loss: Loss) -> bytes | None:
        """The end of an answer that broke off; None if the form has no way to say so."""
        ...


class AnsweredConnection(Protocol):
    """The client's connection, as far as an answer's framing depends on it."""

    keep_alive: bool
    is_http10: bool


class Answer:
    """How an instance's answer is told to the client.

    lines: the status line and the header lines, but those that frame the body; each ends with its line end, several
    may stand in one item.
    encoder: None passes the body through as it is. on_body: called once, before the body's first bytes are written.
    """

    __slots__ = ("encoder", "on_body", "_lines", "_is_chunked")

    def __init__(
        self, lines: tuple[bytes, ...], encoder: Encoder | None = None, on_body: Callable[[], None] | None = None
    ) -> None:
        self.encoder = encoder
        self.on_body = on_body
        self._lines = lines  # none once they are written
        self._is_chunked = False

    def begin(self, head: AnswerHead, client: AnsweredConnection) -> None:
        """Finish the head, now that it is known what is answered to whom; may end the client's keep-alive."""
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
        self._lines = (*self._lines, framing, close)

    def render(self, piece: bytes) -> bytes:
        """A piece as it goes to the client: through the encoder, framed, behind the head if that is still to come."""
        if self.encoder is not None and piece:
            piece = self.encoder.encode(piece)
        if self._is_chunked and piece:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        return self._behind_head(piece) if self._lines else piece

    def render_last(self, piece: bytes) -> bytes | None:
        """The last piece of a whole answer, and its end; None if the answer is a failure and must not look whole."""
        encoder = self.encoder
        if encoder is not None:
            piece = encoder.encode(piece) if piece else b""
            tail = encoder.finish()
            if tail is None:
                return None
            piece += tail
        return self._end(piece)

    def render_failure(self, loss: Loss) -> bytes | None:
        """The end of an answer that broke off; None if its form cannot say so, and must not look whole."""
        tail = self.encoder.fail(loss) if self.encoder is not None else None
        return None if tail is None else self._end(tail)

    def _end(self, piece: bytes) -> bytes:
        if self._is_chunked:
            piece = b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n"
        return self._behind_head(piece) if self._lines else piece

    def _behind_head(self, piece: bytes) -> bytes:
        lines, self._lines = self._lines, ()
        return b"".join((*lines, piece))


class CollectedRefusal:
    """Collects the body of an instance's refusal, up to a limit, and makes a Reply of it."""

    __slots__ = ("_pieces", "_num_left", "_explain")

    def __init__(self, explain: Callable[[bytes], Reply], max_bytes: int) -> None:
        self._pieces: list[bytes] = []
        self._num_left = max_bytes
        self._explain = explain

    def try_add(self, piece: bytes) -> bool:
        """Add a piece. False if it exceeds the limit."""
        self._pieces.append(piece[: self._num_left])
        is_within = len(piece) <= self._num_left
        self._num_left -= len(self._pieces[-1])
        return is_within

    def reply(self) -> Reply:
        """Explain what was collected."""
        return self._explain(b"".join(self._pieces))


class WatchedAnswer(Answer):
    """An Answer that knows how it went; not every Answer does, because that would cost each piece a little.

    began_at: when its body did, in monotonic seconds, or 0.0. num_bytes: of head and body as the client gets them.
    """

    __slots__ = ("began_at", "num_bytes")

    def __init__(self, answer: Answer) -> None:
        """answer: in whose place this one is, before it has begun."""
        super().__init__(answer._lines, answer.encoder, answer.on_body)
        self.began_at = 0.0
        self.num_bytes = 0

    def render(self, piece: bytes) -> bytes:
        """As any Answer."""
        self._note_beginning(piece)
        data = super().render(piece)
        self.num_bytes += len(data)
        return data

    def render_last(self, piece: bytes) -> bytes | None:
        """As any Answer."""
        self._note_beginning(piece)
        data = super().render_last(piece)
        self.num_bytes += len(data or b"")
        return data

    def render_failure(self, loss: Loss) -> bytes | None:
        """As any Answer."""
        data = super().render_failure(loss)
        self.num_bytes += len(data or b"")
        return data

    def _note_beginning(self, piece: bytes) -> None:
        if piece and not self.began_at:
            self.began_at = monotonic()
