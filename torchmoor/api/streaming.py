"""How the body of a streamed answer becomes event-stream frames, and how server-sent events tell of their end."""

from __future__ import annotations

import json

from torchmoor.http.answer import Loss
from torchmoor.http.eventstream import exception, payload_part

ERROR_MARK = b"\x1e"  # record separator: never part of generated text
MAX_HELD_BYTES = 65_536

_TIMED_OUT = "ModelInvocationTimeExceeded"
_BROKEN = "StreamBroken"


def stream_error(message: str, error_code: str) -> bytes:
    """A ModelStreamError frame. The message names the code too, because botocore drops ErrorCode."""
    return exception("ModelStreamError", f"{message} (ErrorCode: {error_code})", error_code)


class PartEncoder:
    """One PayloadPart a received piece; a ModelStreamError when the instance fails or times out."""

    __slots__ = ()

    def encode(self, piece: bytes) -> bytes:
        """One received piece, one frame."""
        return payload_part(piece)

    def finish(self) -> bytes:
        """The event stream has no end mark."""
        return b""

    def fail(self, loss: Loss) -> bytes:
        """A last frame that says why the stream ends."""
        if loss is Loss.TIMEOUT:
            return stream_error("The model did not go on with its answer in time.", _TIMED_OUT)
        return stream_error("The instance ended the stream before the answer was complete.", _BROKEN)


class _MarkedText:
    """Plain text whose handler reports a late error as 0x1E and a JSON object at the very end.

    The object may arrive in several pieces, so everything from the mark on is held back.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def _hold(self, piece: bytes) -> bytes:
        """Hold back what may be an error; returns what is text in any case."""
        if not self._held:
            text, mark, rest = piece.partition(ERROR_MARK)
            self._held = mark + rest
            return text
        self._held += piece
        if len(self._held) <= MAX_HELD_BYTES:
            return b""
        held, self._held = self._held, b""
        return held

    def _take_held(self) -> tuple[bytes, str | None]:
        """What was held back: text after all, or the handler's error."""
        held, self._held = self._held, b""
        try:
            error = json.loads(held[1:])["error"]
            return b"", f"{error['code']}: {error['message']}"
        except (ValueError, KeyError, TypeError):
            return held, None


class TextPartEncoder(_MarkedText, PartEncoder):
    """PartEncoder for plain text: a late error of the handler is a ModelStreamError."""

    __slots__ = ()

    def encode(self, piece: bytes) -> bytes:
        """One received piece, one frame, up to the mark."""
        if not self._held and ERROR_MARK not in piece:
            return payload_part(piece)
        text = self._hold(piece)
        return payload_part(text) if text else b""

    def finish(self) -> bytes:
        """What was held back: the handler's error, or text after all."""
        text, error = self._take_held()
        if error is not None:
            return stream_error(error, _BROKEN)
        return payload_part(text) if text else b""

    def fail(self, loss: Loss) -> bytes:
        """What was held back, then why the stream ends."""
        held = self.finish()
        return held if b"ModelStreamError" in held[:200] else held + super().fail(loss)


class TextPassEncoder(_MarkedText):
    """Plain text that passes as it is: a late error of the handler breaks the connection, so that nobody takes the
    text for the whole answer, nor the error for text."""

    __slots__ = ()

    def encode(self, piece: bytes) -> bytes:
        """The piece itself, up to the mark."""
        return piece if not self._held and ERROR_MARK not in piece else self._hold(piece)

    def finish(self) -> bytes | None:
        """What was held back, if it is text."""
        text, error = self._take_held()
        return text if error is None else None

    def fail(self, loss: Loss) -> None:
        """HTTP has no other way than to end too early."""


class EventPassEncoder:
    """Server-sent events pass as they are; one more says so if the instance fails or times out."""

    __slots__ = ("_end", "_request_id")

    def __init__(self, request_id: bytes) -> None:
        self._request_id = request_id
        self._end = b"\n\n"

    def encode(self, piece: bytes) -> bytes:
        """The piece itself."""
        self._end = (self._end + piece)[-2:]
        return piece

    def finish(self) -> bytes:
        """The instance has ended the stream in its own way."""
        return b""

    def fail(self, loss: Loss) -> bytes | None:
        """An event with an error of OpenAI's kind; None within an event, where only a broken connection is plain."""
        if self._end != b"\n\n":
            return None
        code = _TIMED_OUT if loss is Loss.TIMEOUT else _BROKEN
        message = f"The answer was broken off. Request id {self._request_id.decode()}."
        error = {"message": message, "type": "server_error", "param": None, "code": code}
        return b"data: %b\n\n" % json.dumps({"error": error}).encode()
