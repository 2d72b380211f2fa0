"""Plain text with an error at its end: how a handler reports an error after its answer has begun."""

from __future__ import annotations

import json

ERROR_MARK = b"\x1e"  # record separator: never part of generated text
MAX_HELD_BYTES = 65_536


class MarkedText:
    """Splits a stream into text and the error at its end: 0x1E and a JSON object.

    The object may arrive in several pieces, so everything after the mark is buffered until the end. has_failed: the
    stream has ended with an error.
    """

    __slots__ = ("has_failed", "_held")

    def __init__(self) -> None:
        self.has_failed = False
        self._held = b""

    def take(self, piece: bytes) -> bytes:
        """Add a piece; return the part that is certainly text."""
        if not self._held:
            text, mark, rest = piece.partition(ERROR_MARK)
            self._held = mark + rest
            return text
        self._held += piece
        if len(self._held) <= MAX_HELD_BYTES:
            return b""
        held, self._held = self._held, b""
        return held

    def end(self) -> tuple[bytes, str | None]:
        """Return the buffered text, or the handler's error."""
        held, self._held = self._held, b""
        try:
            error = json.loads(held[1:])["error"]
            message = f"{error['code']}: {error['message']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            return held, None
        self.has_failed = True
        return b"", message
