"""Make request heads for tests that do not parse bytes."""

from collections.abc import Iterable
from typing import Any

from torchmoor.proxy.http.fields import Field, FieldKind, FieldRole
from torchmoor.proxy.http.head import Layout
from torchmoor.proxy.http.message import Request, RequestLine

_KINDS = {b"host": FieldKind.HOST, b"content-length": FieldKind.LENGTH}


def make_field(name: bytes, value: bytes) -> Field:
    """Make a header field with its name in lower case."""
    return Field(name, value, FieldRole(name, _KINDS.get(name, FieldKind.PLAIN)))


def make_request(
    method: bytes, path: bytes, query: bytes = b"", fields: Iterable[tuple[bytes, bytes]] = (), *, handler: Any = None
) -> Request:
    """Make a request with these fields; names must be in lower case and values stripped."""
    line = RequestLine(method, path, query, is_http10=False, handler=handler)
    made = [make_field(name, value) for name, value in fields]
    return Request(line, made, Layout([field.role for field in made]))


def change_field(request: Request, name: bytes, value: bytes) -> None:
    """Replace the value of the first field of this name."""
    place = next(place for place, field in enumerate(request.fields) if field.name == name)
    request.fields[place] = make_field(name, value)
