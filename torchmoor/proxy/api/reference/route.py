"""A documented route, and short forms to write one."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple

from torchmoor.proxy.api.reference.common_schemas import EMPTY, EVENTS, JSON_VALUE, TEXT, Schema

JSON = "application/json"
EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A request's or an answer's body, by its media types. texts: media types that are not JSON."""

    schema: dict[str, Any]
    types: tuple[str, ...] = (JSON,)
    texts: tuple[str, ...] = ()

    def schemas(self) -> dict[str, dict[str, Any]]:
        """Return the schema of each media type."""
        texts = {name: EVENTS if name == EVENT_STREAM else TEXT for name in self.texts}
        return {**dict.fromkeys(self.types, self.schema), **texts}


ANY_BODY = Body(schema=JSON_VALUE)
NO_BODY = Body(schema=EMPTY, types=())
Answers = tuple[tuple[int, str, Body], ...]


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path, with the request's parameters and body, and the answers.

    operation: a unique name. headers: members of the runtime API (api/runtime_members.py). query: names of parameters,
    with their descriptions. answers: the description and body of each status that is not an error.
    """

    method: str
    path: str
    operation: str
    text: str
    body: Body = NO_BODY
    _: KW_ONLY
    headers: tuple[bytes, ...] = ()
    query: tuple[tuple[str, str], ...] = ()
    is_body_required: bool = True
    answers: Answers = ((200, "The answer.", ANY_BODY),)


class Group(NamedTuple):
    """Routes of one API. error: the schema of its errors."""

    name: str
    text: str
    error: Schema
    routes: tuple[Route, ...]


get = partial(Route, "get")
post = partial(Route, "post")
delete = partial(Route, "delete")


def json_body(schema: Schema) -> Body:
    return Body(schema=schema)


def streamed(schema: Schema) -> Answers:
    text = "The answer: JSON, or server-sent events with `stream`."
    return ((200, text, Body(schema=schema, texts=(EVENT_STREAM,))),)


def answer(schema: Schema, *types: str) -> Answers:
    return ((200, "The answer.", Body(schema=schema, types=types or (JSON,))),)


EMPTY_ANSWER = ((200, "Yes, with an empty body.", NO_BODY),)
