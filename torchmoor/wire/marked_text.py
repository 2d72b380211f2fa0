"""Plain text in which a handler can still report an error after its answer has begun (docs/runtime-api.md)."""

from __future__ import annotations

import json

ERROR_MARK = b"\x1e"  # record separator: never part of generated text
MAX_HELD_BYTES = 65_536


class MarkedText:
    """The error is 0x1E and a JSON object at the very end.

    The object may arrive in several pieces, so everything from the mark on is held back.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def take(self, piece: bytes) -> bytes:
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

    def end(self) -> tuple[bytes, str | None]:
        """What was held back: text after all, or the handler's error."""
        held, self._held = self._held, b""
        try:
            error = json.loads(held[1:])["error"]
            return b"", f"{error['code']}: {error['message']}"
        except (ValueError, KeyError, TypeError):
            return held, None
