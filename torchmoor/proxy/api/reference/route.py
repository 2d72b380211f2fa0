"""One documented route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchmoor.proxy.api.reference.schemas import EMPTY, JSON_VALUE, TEXT

JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A request's or an answer's body, by its media types. texts: those that have no JSON."""

    schema: dict[str, Any]
    types: tuple[str, ...] = (JSON,)
    texts: tuple[str, ...] = ()

    def schemas(self) -> dict[str, dict[str, Any]]:
        """Return the schema of each media type."""
        return {**dict.fromkeys(self.types, self.schema), **dict.fromkeys(self.texts, TEXT)}


ANY_BODY = Body(schema=JSON_VALUE)
NO_BODY = Body(schema=EMPTY, types=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A method and a path, with the request's parameters and body, and the answers.

    operation: a unique name. headers: members of the runtime API (api/validation.py). query: names of parameters, with
    their descriptions. answers: the description and body of each status that is not an error.
    """

    method: str
    path: str
    operation: str
    text: str
    headers: tuple[bytes, ...] = ()
    query: tuple[tuple[str, str], ...] = ()
    body: Body = NO_BODY
    is_body_required: bool = True
    answers: tuple[tuple[int, str, Body], ...] = ((200, "The answer.", ANY_BODY),)
