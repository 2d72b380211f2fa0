"""The heads of messages: the meaning of their fields together, computed once for each sequence of names.

Clients and instances repeat the same few names in the same order; only values differ. A `Layout` has everything that
follows from the names alone: where the message ends, which fields are forwarded, where each field is. Layouts hold
no values, so they cannot mix the values of two clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter

from torchmoor.proxy.http.bounded_cache import BoundedCache
from torchmoor.proxy.http.fields import (
    MAX_DIGITS,
    BadMessage,
    Field,
    FieldKind,
    FieldNote,
    FieldRole,
    make_field_table,
    note_nothing,
)

MAX_KEPT_LAYOUTS = 256  # of a HeadBook
MAX_KEPT_FIELDS = 64  # a layout of more fields is not kept
MAX_KEPT_BYTES = 2048  # a layout with more bytes of names, those in Connection included, is not kept
MAX_KEPT_MASKS = 256  # of a layout

_LINE: Callable[[Field], bytes] = attrgetter("line")
_ROLE: Callable[[Field], FieldRole] = attrgetter("role")
_NOTHING: frozenset[bytes] = frozenset()


class Layout:
    """What the names of a head's fields, in their order, determine. Raises BadMessage.

    plain: for each field, whether it does not concern the connection. places: by name, of the first plain field. host,
    length: the places of Host and Content-Length; None without. options: the names in Connection except keep-alive.
    repeated: a name whose value is read and that occurs twice. problem: what is wrong with a value that is read.
    is_usual: a request's head with one Host, and without fields that change how the connection treats it.
    """

    def __init__(self, roles: Sequence[FieldRole]) -> None:
        self.places: dict[bytes, int] = {}
        self.host: int | None = None
        self.length: int | None = None
        self.num_hosts = 0
        self.is_chunked = self.is_expecting = self.is_upgrade = False
        self.repeated: bytes | None = None
        self.problem: str | None = None
        self.options = frozenset(option for role in roles for option in role.options)
        self.plain: list[bool] = []
        passed: list[bytes | None] = []
        for place, role in enumerate(roles):
            is_plain = role.kind is FieldKind.PLAIN and role.name not in self.options
            self.plain.append(is_plain)
            passed.append(role.name if is_plain and role.note.is_passed else None)
            if is_plain:
                self._place(place, role)
            else:
                self._read_special(place, role)
        self.masks = BoundedCache(partial(_mask, passed), MAX_KEPT_MASKS)
        self._judge()

    def _judge(self) -> None:
        if self.is_chunked and self.length is not None:
            raise BadMessage(400, "A message has a Content-Length or a Transfer-Encoding, not both.")
        self.is_usual = self.num_hosts == 1 and not (self.options or self.is_chunked or self.is_expecting)
        self.is_sound = self.repeated is None and self.problem is None

    @property
    def wants_upgrade(self) -> bool:
        return self.is_upgrade and b"upgrade" in self.options

    @property
    def has_body(self) -> bool:
        return self.is_chunked or self.length is not None

    def _place(self, place: int, role: FieldRole) -> None:
        if role.name not in self.places:
            self.places[role.name] = place
        elif role.note.is_read:
            self.repeated = role.name
        if self.problem is None:
            self.problem = role.problem

    def _read_special(self, place: int, role: FieldRole) -> None:
        kind = role.kind
        if kind is FieldKind.HOST:
            self.num_hosts += 1
            self.host = place
        elif kind is FieldKind.LENGTH:
            if self.length is not None:
                raise BadMessage(400, "A message has one Content-Length.")
            self.length = place
        elif kind is FieldKind.CODING:
            if self.is_chunked:
                raise BadMessage(400, "A message has one Transfer-Encoding.")
            self.is_chunked = True
        elif kind is FieldKind.EXPECT:
            self.is_expecting = True
        elif kind is FieldKind.UPGRADE:
            self.is_upgrade = True


def _mask(passed: Sequence[bytes | None], held_back: frozenset[bytes]) -> tuple[bool, ...]:
    """Return which fields are forwarded.

    passed: the names, None for a field that is never forwarded. held_back: names that are not forwarded.
    """
    return tuple(name is not None and name not in held_back for name in passed)


class HeadBook:
    """Reads heads, and remembers their lines and layouts; each side of the proxy has one."""

    def __init__(self, note: Callable[[bytes], FieldNote] = note_nothing) -> None:
        self._read_line = make_field_table(note).__getitem__
        self.layouts = BoundedCache(Layout, MAX_KEPT_LAYOUTS, _may_keep)

    def read(self, lines: list[bytes]) -> tuple[list[Field], Layout]:
        """Read the fields of a head's lines, and their layout. Raises BadMessage."""
        fields = [*map(self._read_line, lines)]
        return fields, self.layouts[tuple(map(_ROLE, fields))]


def _may_keep(roles: tuple[FieldRole, ...], layout: Layout) -> bool:
    if layout.problem is not None or len(roles) > MAX_KEPT_FIELDS:  # a field with a problem has a role of its own
        return False
    return sum(len(role.name) for role in roles) + sum(map(len, layout.options)) <= MAX_KEPT_BYTES


class Head:
    """A message's fields with their layout."""

    __slots__ = ("fields", "layout")

    def __init__(self, fields: list[Field], layout: Layout) -> None:
        self.fields = fields
        self.layout = layout

    @property
    def headers(self) -> list[Field]:
        """The fields that do not concern the connection, forwarded or not."""
        return [*compress(self.fields, self.layout.plain)]

    def find(self, name: bytes) -> bytes | None:
        """Return the first value of a field that does not concern the connection."""
        place = self.layout.places.get(name)
        return None if place is None else self.fields[place].value

    def find_number(self, name: bytes) -> int | None:
        """Return the value of a field that does not concern the connection, if it is a whole number."""
        value = self.find(name)
        return int(value) if value is not None and value.isdigit() and len(value) <= MAX_DIGITS else None

    def lines(self, held_back: frozenset[bytes] = _NOTHING) -> bytes:
        """Return the lines of all fields that are forwarded, except those of these names."""
        return b"".join(map(_LINE, compress(self.fields, self.layout.masks[held_back])))
