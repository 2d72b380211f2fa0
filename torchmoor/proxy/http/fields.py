"""Header lines, checked strictly and cached: most lines of a head were seen before, on any connection.

A line is checked once and then found by its bytes. Fields that differ in each request (dates, signatures, ids) and
fields that hold a secret are read each time and not kept. Session ids are kept, because a session's requests repeat
its id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

from torchmoor.proxy.http.bounded_cache import BoundedCache
from torchmoor.proxy.http.field_names import (
    AWS_REQUEST_ID,
    CREDENTIALS,
    INFERENCE_ID,
    INVOCATION_ID,
    OPENAI_REQUEST_ID,
    REQUEST_ID,
)

MAX_KEPT_LINES = 4096  # lines in a field table, which is emptied when it is full
MAX_KEPT_NAMES = 4096  # likewise
MAX_KEPT_NAME_BYTES = 128  # a longer name is not kept
MAX_KEPT_LINE_BYTES = 256  # a longer line is not kept
MAX_KEPT_OPTIONS = 4  # a Connection line with more names is not kept

# RFC 9110 5.5 and 5.6.2: a token, a colon, a value without control characters. The head is split at CR LF, so a bare CR
# or LF, a NUL, a folded line and white space before the colon all contain bytes outside these sets. Deleting all
# allowed bytes from a line and testing whether any are left takes half the time of a regular expression.
_NAME_BYTES = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_VALUE_BYTES = bytes((9, *range(32, 127), *range(128, 256)))
# RFC 9110 7.2 and RFC 3986 3.2.2: a name or an address, perhaps a port. RFC 9112 3.2 requires a 400 for any other Host.
_HOST_BYTES = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-._~!$&'()*+,;=%:[]"
_NO_OPTIONS: frozenset[bytes] = frozenset()
_NOT_KEPT = CREDENTIALS.union(
    (
        *(INVOCATION_ID, b"amz-sdk-request", AWS_REQUEST_ID, OPENAI_REQUEST_ID),
        *(b"traceparent", b"x-amzn-trace-id", REQUEST_ID, INFERENCE_ID),
    )
)


class FieldKind(Enum):
    """The meaning of a field for a connection; only PLAIN fields are forwarded.

    UPGRADE: to a WebSocket. A server may ignore all others: Java's client offers h2c with each of its requests.
    """

    PLAIN = 0
    HOST = 1
    LENGTH = 2
    CODING = 3
    CONNECTION = 4
    EXPECT = 5
    HOP_BY_HOP = 6
    UPGRADE = 7


_KINDS = {
    b"host": FieldKind.HOST,
    b"content-length": FieldKind.LENGTH,
    b"transfer-encoding": FieldKind.CODING,
    b"connection": FieldKind.CONNECTION,
    b"expect": FieldKind.EXPECT,
    b"upgrade": FieldKind.UPGRADE,
    b"keep-alive": FieldKind.HOP_BY_HOP,
    b"proxy-connection": FieldKind.HOP_BY_HOP,
    b"te": FieldKind.HOP_BY_HOP,
    b"trailer": FieldKind.HOP_BY_HOP,
    b"proxy-authenticate": FieldKind.HOP_BY_HOP,
    b"proxy-authorization": FieldKind.HOP_BY_HOP,
}
MAX_DIGITS = 18  # of a number in a field
# Local names: a member of an Enum takes long to look up.
_PLAIN, _LENGTH = FieldKind.PLAIN, FieldKind.LENGTH


class BadMessage(Exception):
    """The bytes are not a valid HTTP message; the connection's further bytes cannot be read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(eq=False, slots=True, kw_only=True)
class FieldNote:
    """How the application treats a name: whether its fields are forwarded, and whether their values are read.

    find_problem: returns why a value is invalid, or None if it is valid; None instead of a function: all values are
    valid.
    """

    is_passed: bool = True
    is_read: bool = False
    find_problem: Callable[[bytes], str | None] | None = None


PASSED = FieldNote()


@dataclass(eq=False, slots=True)
class FieldRole:
    """The meaning of a name: one object for all fields of the name, whatever their values.

    A Connection field has a role for the options that it names, and a field with a problem has a role of its own.
    """

    name: bytes
    kind: FieldKind
    note: FieldNote = PASSED
    options: frozenset[bytes] = _NO_OPTIONS
    problem: str | None = None


class Field:
    """A header field; never changed. name: lower case; line: as it is forwarded; number: of a Content-Length."""

    __slots__ = ("name", "value", "line", "role", "number")

    def __init__(self, name: bytes, value: bytes, role: FieldRole) -> None:
        self.name = name
        self.value = value
        self.line = b"%b: %b\r\n" % (name, value)
        self.role = role
        self.number = int(value) if role.kind is _LENGTH else None


def note_nothing(name: bytes) -> FieldNote:
    """Forward every field."""
    return PASSED


def make_field_table(note: Callable[[bytes], FieldNote] = note_nothing) -> BoundedCache[bytes, Field]:
    """Make a cache of fields by the bytes of their lines; `table[line]` raises BadMessage.

    note: called once for each name.
    """

    def read_role(name: bytes) -> FieldRole:
        kind = _KINDS.get(name, _PLAIN)
        return FieldRole(name, kind, note(name) if kind is _PLAIN else PASSED)

    roles = BoundedCache(read_role, MAX_KEPT_NAMES, lambda name, role: len(name) <= MAX_KEPT_NAME_BYTES)
    return BoundedCache(partial(_read_field, roles), MAX_KEPT_LINES, _may_keep)


def _may_keep(line: bytes, field: Field) -> bool:
    is_short = len(line) <= MAX_KEPT_LINE_BYTES and len(field.role.options) <= MAX_KEPT_OPTIONS
    return is_short and field.name not in _NOT_KEPT


def _read_field(roles: BoundedCache[bytes, FieldRole], line: bytes) -> Field:
    name, colon, value = line.partition(b":")
    if not name or not colon or name.translate(None, _NAME_BYTES) or value.translate(None, _VALUE_BYTES):
        raise BadMessage(400, "Not a valid HTTP header field.")
    name, value = name.lower(), value.strip(b" \t")
    role = roles[name]
    if role.kind is not _PLAIN:
        role, value = _judge(role, value)
    elif role.note.find_problem is not None:
        problem = role.note.find_problem(value)
        if problem is not None:
            role = FieldRole(name, _PLAIN, role.note, problem=problem)
    return Field(name, value, role)


def _judge(role: FieldRole, value: bytes) -> tuple[FieldRole, bytes]:
    """Check a field that frames its message or controls its connection; return its role and canonical value."""
    kind = role.kind
    if kind is _LENGTH:
        if not value.isdigit() or len(value) > MAX_DIGITS:
            raise BadMessage(400, "Content-Length must be a number.")
        return role, b"%d" % int(value)
    if kind is FieldKind.HOST and value.translate(None, _HOST_BYTES):
        raise BadMessage(400, "Not a valid Host.")
    if kind is FieldKind.CODING and value.lower() != b"chunked":
        if b"chunked" in [coding.strip() for coding in value.lower().split(b",")][:-1]:
            raise BadMessage(400, "Nothing can follow the transfer coding chunked.")
        raise BadMessage(501, "The only transfer coding is chunked.")
    if kind is FieldKind.EXPECT and value.lower() != b"100-continue":
        raise BadMessage(417, "The only expectation is 100-continue.")
    if kind is FieldKind.UPGRADE and b"websocket" not in value.lower():
        return FieldRole(role.name, FieldKind.HOP_BY_HOP), value
    if kind is FieldKind.CONNECTION:
        options = frozenset(option.strip().lower() for option in value.split(b",")) - {b"", b"keep-alive"}
        if options:
            role = FieldRole(role.name, kind, options=options)
    return role, value
