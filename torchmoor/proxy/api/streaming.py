"""How the body of a streamed answer becomes event-stream frames, and how server-sent events tell of their end."""

from __future__ import annotations

import json

from torchmoor.proxy.http.answer import Loss
from torchmoor.proxy.http.eventstream import exception, payload_part
from torchmoor.wire.marked_text import ERROR_MARK, MarkedText

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


class TextPartEncoder(MarkedText, PartEncoder):
    """PartEncoder for plain text: a late error of the handler is a ModelStreamError."""

    __slots__ = ()

    def encode(self, piece: bytes) -> bytes:
        """One received piece, one frame, up to the mark."""
        if not self._held and ERROR_MARK not in piece:
            return payload_part(piece)
        text = self.take(piece)
        return payload_part(text) if text else b""

    def finish(self) -> bytes:
        """What was held back: the handler's error, or text after all."""
        text, error = self.end()
        if error is not None:
            return stream_error(error, _BROKEN)
        return payload_part(text) if text else b""

    def fail(self, loss: Loss) -> bytes:
        """What was held back, then why the stream ends."""
        held = self.finish()
        return held if b"ModelStreamError" in held[:200] else held + super().fail(loss)


class TextPassEncoder(MarkedText):
    """Plain text that passes as it is: a late error of the handler breaks the connection, so that nobody takes the
    text for the whole answer, nor the error for text."""

    __slots__ = ()

    def encode(self, piece: bytes) -> bytes:
        """The piece itself, up to the mark."""
        return piece if not self._held and ERROR_MARK not in piece else self.take(piece)

    def finish(self) -> bytes | None:
        """What was held back, if it is text."""
        text, error = self.end()
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
