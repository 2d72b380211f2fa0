"""Parses Triton's config.pbtxt: the part of protobuf's text format that such files use.

Only Triton's client includes the schema, and it needs a gRPC stack, for six fields. The parser accepts every field; the
caller selects the known ones.
"""

import re
from typing import Any

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
_TOKEN = re.compile(
    r"""(?:\s|\#[^\n]*+)*+(?:
        (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<word>[A-Za-z_][A-Za-z0-9_.]*)
      | (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?f?)
      | (?P<mark>[{}\[\]<>:,;])
      | (?P<end>\Z)
      | (?P<other>[\s\S])
    )""",
    re.VERBOSE,
)
_ENDS = {"{": "}", "<": ">"}

Message = dict[str, list[Any]]  # the values of each field, in order


class PbtxtError(ValueError):
    """The text cannot be parsed; the message has the line."""


def parse_pbtxt(text: str) -> Message:
    """Parse strings and enum words to str, numbers to int or float, booleans to bool. Raises PbtxtError."""
    if len(text) > MAX_BYTES:
        raise PbtxtError(f"it has {len(text)} characters, more than {MAX_BYTES}")
    return _Reader(text).message("", 0)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.kind, self.token = "", ""
        self._advance()

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._at)
        assert match is not None  # if nothing else, `other` matches
        self._at = match.end()
        self.kind = str(match.lastgroup)
        self.token = match[self.kind]
        if self.kind == "other":
            raise self._error("unexpected character")

    def _error(self, what: str) -> PbtxtError:
        return PbtxtError(f"{what} in line {self._text.count(chr(10), 0, self._at) + 1}")

    def message(self, end: str, depth: int) -> Message:
        """Read fields up to this mark, or up to the end of the text if it is empty."""
        if depth > MAX_DEPTH:
            raise self._error("messages are nested too deeply")
        fields: Message = {}
        while self.token != end:
            if self.kind != "word":
                raise self._error("a field's name is missing")
            name = self.token
            self._advance()
            has_colon = self._skip(":")
            fields.setdefault(name, []).extend(self._values(has_colon, depth))
            self._skip(",") or self._skip(";")
        self._advance()
        return fields

    def _values(self, has_colon: bool, depth: int) -> list[Any]:
        if not self._skip("["):
            return [self._value(has_colon, depth)]
        found: list[Any] = []
        while not self._skip("]"):
            if found and not self._skip(","):
                raise self._error("a comma is missing")
            found.append(self._value(has_colon, depth))
        return found

    def _value(self, has_colon: bool, depth: int) -> Any:
        kind, token = self.kind, self.token
        if token in _ENDS:
            self._advance()
            return self.message(_ENDS[token], depth + 1)
        if not has_colon or kind not in ("text", "word", "number"):
            raise self._error("a value is missing")
        self._advance()
        if kind == "text":
            return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), token[1:-1])
        if kind == "word":
            return {"true": True, "false": False}.get(token, token)
        return int(token) if re.fullmatch(r"[-+]?\d+", token) else float(token.rstrip("f"))

    def _skip(self, mark: str) -> bool:
        if self.token != mark:  # the token of a text has its quotes
            return False
        self._advance()
        return True
