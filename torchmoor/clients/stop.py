"""Stop sequences in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from torchmoor.wire.held_text import num_held


class StopCutter:
    """Passes text on up to the first complete stop sequence, which may span pieces.

    It holds back text that may be the beginning of a stop sequence.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [sequence for sequence in stop if sequence]
        self._held = ""
        self.is_over = False

    def feed(self, text: str) -> str:
        """Add text; return what is certain to be part of the answer."""
        if self.is_over:
            return ""
        text = self._held + text
        found = [(at + len(sequence), at) for sequence in self._stop if (at := text.find(sequence)) >= 0]
        if found:
            self.is_over, self._held = True, ""
            return text[: min(found)[1]]
        end = len(text) - max((num_held(text, sequence) for sequence in self._stop), default=0)
        self._held = text[end:]
        return text[:end]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held
