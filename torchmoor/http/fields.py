"""Header lines, read strictly, and remembered: most lines of a head were seen before, on any connection.

A line is looked at with care once; after that it is found by its bytes, with all that is known of it. What differs
in each request (dates, signatures, ids) is read each time and not kept, nor is anything that holds a secret.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

MAX_LINES = 4096  # remembered by a table, and then forgotten all at once
MAX_LINE_BYTES = 512  # of a line that is remembered

# RFC 9110 5.5 and 5.6.2: a token, a colon, a value without control characters. Since the head is cut at CR LF, a bare
# CR or LF, a NUL, a folded line and white space before the colon are all outside these sets. Taking all allowed bytes
# out of a line and seeing what is left takes half as long as a regular expression.
_NAME_BYTES = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_VALUE_BYTES = bytes((9, *range(32, 127), *range(128, 256)))
_NO_OPTIONS: frozenset[bytes] = frozenset()
_NOT_KEPT = frozenset(
    (
        *(b"authorization", b"cookie", b"proxy-authorization", b"x-amz-security-token"),
        *(b"amz-sdk-invocation-id", b"amz-sdk-request", b"x-amzn-requestid", b"x-request-id"),
        *(b"traceparent", b"x-torchmoor-request-id"),
    )
)


class Kind(Enum):
    """What a field is to a connection; all but PLAIN stay on it."""

    PLAIN = 0
    HOST = 1
    LENGTH = 2
    CODING = 3
    CONNECTION = 4
    EXPECT = 5
    HOP_BY_HOP = 6


# Looking a member up in its Enum takes longer than all that is done with it here.
_PLAIN, _HOST, _LENGTH, _CONNECTION = Kind.PLAIN, Kind.HOST, Kind.LENGTH, Kind.CONNECTION

_KINDS = {
    b"host": Kind.HOST,
    b"content-length": Kind.LENGTH,
    b"transfer-encoding": Kind.CODING,
    b"connection": Kind.CONNECTION,
    b"expect": Kind.EXPECT,
    b"keep-alive": Kind.HOP_BY_HOP,
    b"proxy-connection": Kind.HOP_BY_HOP,
    b"te": Kind.HOP_BY_HOP,
    b"trailer": Kind.HOP_BY_HOP,
    b"upgrade": Kind.HOP_BY_HOP,
    b"proxy-authenticate": Kind.HOP_BY_HOP,
    b"proxy-authorization": Kind.HOP_BY_HOP,
}


class BadMessage(Exception):
    """The bytes are no HTTP message that we take; nothing that follows them can be read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Field:
    """A header field; never changed. name: lower case; line: as it is sent on; note: the application's word on it."""

    __slots__ = ("name", "value", "line", "kind", "note")

    def __init__(self, name: bytes, value: bytes, kind: Kind = Kind.PLAIN, note: Any = None) -> None:
        self.name = name
        self.value = value
        self.line = b"%b: %b\r\n" % (name, value)
        self.kind = kind
        self.note = note

    def __repr__(self) -> str:
        return f"<Field {self.name.decode()}>"


Headers = list[Field]
"""Header fields in order. Hop-by-hop and framing fields are not among them."""


def no_note(name: bytes, value: bytes) -> None:
    """For tables whose fields nobody has a word on."""


class FieldTable(dict[bytes, Field]):
    """Fields by the bytes of their lines: `table[line]` reads those that are new. Raises BadMessage.

    note: asked once for each line that is not kept only for a moment.
    """

    def __init__(self, note: Callable[[bytes, bytes], Any] = no_note) -> None:
        super().__init__()
        self._note = note

    def __missing__(self, line: bytes) -> Field:
        name, colon, value = line.partition(b":")
        if not name or not colon or name.translate(None, _NAME_BYTES) or value.translate(None, _VALUE_BYTES):
            raise BadMessage(400, "Not a valid HTTP header field.")
        name, value = name.lower(), value.strip(b" \t")
        kind = _KINDS.get(name, _PLAIN)
        note = self._note(name, value) if kind is _PLAIN else _check_special(kind, value)
        field = Field(name, value, kind, note)
        if len(line) <= MAX_LINE_BYTES and name not in _NOT_KEPT:
            if len(self) >= MAX_LINES:
                self.clear()
            self[line] = field
        return field


def _check_special(kind: Kind, value: bytes) -> Any:
    """What a connection needs to know of a field: a length, or the names in a Connection field."""
    if kind is Kind.LENGTH:
        if not value.isdigit() or len(value) > 18:
            raise BadMessage(400, "Content-Length must be a number.")
        return int(value)
    if kind is Kind.CODING and value.lower() != b"chunked":
        if b"chunked" in [coding.strip() for coding in value.lower().split(b",")][:-1]:
            raise BadMessage(400, "Nothing can follow the transfer coding chunked.")
        raise BadMessage(501, "The only transfer coding is chunked.")
    if kind is Kind.EXPECT and value.lower() != b"100-continue":
        raise BadMessage(417, "The only expectation is 100-continue.")
    if kind is Kind.CONNECTION:
        options = frozenset(option.strip().lower() for option in value.split(b",")) - {b"", b"keep-alive"}
        return options or _NO_OPTIONS
    return None


class Framing:
    """What the special fields of a head say together: where its message ends, and what stays on this connection.

    content_length: None if there is none. options: the names in Connection but keep-alive.
    No slots: what no field says is not set.
    """

    num_hosts = 0
    host = b""
    content_length: int | None = None
    is_chunked = False
    is_expecting = False
    has_upgrade = False
    options = _NO_OPTIONS

    def __init__(self, fields: Headers) -> None:
        for field in fields:
            kind = field.kind
            if kind is _HOST:
                self.num_hosts += 1
                self.host = field.value
            elif kind is _LENGTH:
                if self.content_length is not None:
                    raise BadMessage(400, "A message has one Content-Length.")
                self.content_length = field.note
            else:
                self._read_rare(kind, field)
        if self.is_chunked and self.content_length is not None:
            raise BadMessage(400, "A message has a Content-Length or a Transfer-Encoding, not both.")

    def _read_rare(self, kind: Kind, field: Field) -> None:
        if kind is _CONNECTION:
            self.options = self.options | field.note if self.options else field.note
        elif kind is Kind.CODING:
            if self.is_chunked:
                raise BadMessage(400, "A message has one Transfer-Encoding.")
            self.is_chunked = True
        elif kind is Kind.EXPECT:
            self.is_expecting = True
        elif field.name == b"upgrade":
            self.has_upgrade = True


def read_fields(lines: list[bytes], table: FieldTable) -> tuple[Headers, Framing]:
    """The fields of a head's lines: those that go on, and what the others say. Raises BadMessage."""
    headers: Headers = []
    special: Headers = []
    for line in lines:
        field = table[line]
        if field.kind is not _PLAIN:
            special.append(field)
        else:
            headers.append(field)
    framing = Framing(special)
    if framing.options:
        headers = [field for field in headers if field.name not in framing.options]
    return headers, framing
