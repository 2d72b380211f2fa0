"""Requests' heads for tests that have no bytes to read them from."""

from collections.abc import Iterable
from typing import Any

from torchmoor.proxy.http.fields import Field, Kind, Role
from torchmoor.proxy.http.head import Layout
from torchmoor.proxy.http.message import Request, RequestLine

_KINDS = {b"host": Kind.HOST, b"content-length": Kind.LENGTH}


def make_field(name: bytes, value: bytes) -> Field:
    """A field; its name in lower case."""
    return Field(name, value, Role(name, _KINDS.get(name, Kind.PLAIN)))


def make_request(
    method: bytes, path: bytes, query: bytes = b"", fields: Iterable[tuple[bytes, bytes]] = (), *, handler: Any = None
) -> Request:
    """A request with these fields, names in lower case, values without white space around them."""
    line = RequestLine(method, path, query, is_http10=False, handler=handler)
    made = [make_field(name, value) for name, value in fields]
    return Request(line, made, Layout([field.role for field in made]))


def change_field(request: Request, name: bytes, value: bytes) -> None:
    """Give the first field of that name another value."""
    place = next(place for place, field in enumerate(request.fields) if field.name == name)
    request.fields[place] = make_field(name, value)
