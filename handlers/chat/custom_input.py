"""Reads the text that is a custom tool's input from the JSON object in which the model writes it."""

import json
import re

_HEAD = re.compile(r'\{\s*"input"\s*:\s*"')
_HEAD_PART = re.compile(r'\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?')  # it may still become the whole head
_HIGH, _HEX = "[dD][89abAB][0-9a-fA-F]{2}", "[0-9a-fA-F]{4}"
_PIECE = re.compile(  # characters, or one escape, whose meaning no further character changes
    rf'[^"\\]+|\\[^u]|\\u{_HIGH}\\u{_HEX}|\\u(?!{_HIGH}){_HEX}|\\u{_HIGH}(?=[^\\]|\\[^u])', re.DOTALL
)
_NO_HEX = r"[0-9a-fA-F]{0,3}[^0-9a-fA-F]"  # behind the \u of a damaged escape
_DAMAGED = re.compile(rf"\\u(?:{_HIGH}(?=\\u{_NO_HEX})|(?={_NO_HEX}))")


class CustomInput:
    """Reads one input, piece by piece. Arguments that do not begin as {"input": "..."} are the input as they are."""

    def __init__(self) -> None:
        self._buffer = ""
        self._read = self._read_head

    def read(self, text: str) -> str:
        """Add more of the arguments. Return more of the input: what is certain now."""
        self._buffer += text
        return self._read()

    def _read_head(self) -> str:
        if _HEAD_PART.fullmatch(self._buffer):
            return ""
        self._read = self._read_other
        if head := _HEAD.match(self._buffer):
            self._buffer = self._buffer[head.end() :]
            self._read = self._read_string
        return self._read()

    def _read_string(self) -> str:
        found, end = [], 0
        while piece := _PIECE.match(self._buffer, end) or _DAMAGED.match(self._buffer, end):
            found.append(_unescape(piece[0]))
            end = piece.end()
        self._buffer = self._buffer[end:]
        if self._buffer.startswith('"'):
            self._read = self._skip
        return "".join(found)

    def _read_other(self) -> str:
        found, self._buffer = self._buffer, ""
        return found

    def _skip(self) -> str:
        self._buffer = ""
        return ""


def _unescape(piece: str) -> str:
    """Return what a piece of a JSON string stands for; half a surrogate pair stands for U+FFFD."""
    if not piece.startswith("\\"):
        return piece
    try:
        text: str = json.loads(f'"{piece}"', strict=False)
    except ValueError:  # JSON has no such escape
        return piece
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
