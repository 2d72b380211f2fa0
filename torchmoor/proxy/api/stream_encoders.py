"""Encoders of streamed answers: event-stream frames, marked text and server-sent events."""

from __future__ import annotations

import json

from torchmoor.proxy.http.answer import Loss
from torchmoor.proxy.http.eventstream import exception, payload_part
from torchmoor.wire.error_codes import STREAM_BROKEN, STREAM_TIMED_OUT
from torchmoor.wire.marked_text import ERROR_MARK, MarkedText


def stream_error(message: str, error_code: str) -> bytes:
    """Encode a ModelStreamError frame. The message names the code too, because botocore drops ErrorCode."""
    return exception("ModelStreamError", f"{message} (ErrorCode: {error_code})", error_code)


class PartEncoder:
    """Encodes each piece as a PayloadPart; a ModelStreamError reports a failure or time-out of the instance.

    A part has what arrived from the instance at once: one piece of the answer, or several that waited together.
    """

    __slots__ = ()
    has_failed = False

    def encode(self, piece: bytes) -> bytes:
        return payload_part(piece)

    def finish(self) -> bytes:
        """Add nothing: the event stream has no end mark."""
        return b""

    def fail(self, loss: Loss) -> bytes:
        """Encode a last frame with the reason for the stream's end."""
        if loss is Loss.TIMEOUT:
            return stream_error("The model did not go on with its answer in time.", STREAM_TIMED_OUT)
        return stream_error("The instance ended the stream before the answer was complete.", STREAM_BROKEN)


class EventPartEncoder(PartEncoder):
    """Encodes each server-sent event as a PayloadPart of its own.

    LiteLLM, among others, reads one event per part: it drops what follows two events in one. An event that arrives in
    two pieces is in two parts, which these clients join. No part has the end of an event before another event.
    """

    __slots__ = ()

    def encode(self, piece: bytes) -> bytes:
        begun = piece.lstrip(b"\n")
        *events, rest = begun.split(b"\n\n")
        parts = [piece[: len(piece) - len(begun)], *(event + b"\n\n" for event in events), rest]
        return b"".join(payload_part(part) for part in parts if part)


class TextPartEncoder(MarkedText, PartEncoder):
    """Encodes plain text likewise; a late error of the handler becomes a ModelStreamError."""

    __slots__ = ()

    def encode(self, piece: bytes) -> bytes:
        if not self._held and ERROR_MARK not in piece:
            return payload_part(piece)
        text = self.take(piece)
        return payload_part(text) if text else b""

    def finish(self) -> bytes:
        """Encode the bytes held back: the handler's error, or text."""
        text, error = self.end()
        if error is not None:
            return stream_error(error, STREAM_BROKEN)
        return payload_part(text) if text else b""

    def fail(self, loss: Loss) -> bytes:
        """Encode the text held back, then the reason for the stream's end."""
        held = self.finish()
        return held if self.has_failed else held + super().fail(loss)


class TextPassEncoder(MarkedText):
    """Passes plain text unchanged.

    A late error of the handler breaks the connection, so that clients see neither a complete answer nor the error's
    text.
    """

    __slots__ = ()

    def encode(self, piece: bytes) -> bytes:
        return piece if not self._held and ERROR_MARK not in piece else self.take(piece)

    def finish(self) -> bytes | None:
        """Return the bytes held back, if they are text."""
        text, error = self.end()
        return text if error is None else None

    def fail(self, loss: Loss) -> None:
        """Return None: HTTP can show a late failure only by a broken connection."""


class EventPassEncoder:
    """Passes server-sent events unchanged; one more reports a failure or time-out of the instance."""

    __slots__ = ("_end", "_request_id")
    has_failed = False

    def __init__(self, request_id: bytes) -> None:
        self._request_id = request_id
        self._end = b"\n\n"

    def encode(self, piece: bytes) -> bytes:
        self._end = (self._end + piece)[-2:]
        return piece

    def finish(self) -> bytes:
        """Add nothing: the instance has ended the stream."""
        return b""

    def fail(self, loss: Loss) -> bytes | None:
        """Encode an event with OpenAI's error; None in the middle of an event: then the connection must break."""
        if self._end != b"\n\n":
            return None
        code = STREAM_TIMED_OUT if loss is Loss.TIMEOUT else STREAM_BROKEN
        message = f"The answer was broken off. Request id {self._request_id.decode()}."
        error = {"message": message, "type": "server_error", "param": None, "code": code}
        return b"data: %b\n\n" % json.dumps({"error": error}).encode()
