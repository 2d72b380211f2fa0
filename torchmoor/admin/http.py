"""Shared by the admin plane's JSON handlers: routes, error answers, refused origins, page sizes, instances' answers."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from torchmoor.errors import ApiError, ValidationError
from torchmoor.proxy.access.web_pages import is_own_origin
from torchmoor.proxy.api.reference.common_schemas import JSON_VALUE, Schema
from torchmoor.proxy.api.reference.route import Route, answer
from torchmoor.proxy.instances.handler_operations import OperationAnswer

KEPT_HEADERS = ("Allow", "WWW-Authenticate")  # of aiohttp's errors
MAX_DIGITS = 9  # of ?limit=, since int() raises an error of its own for thousands of digits
Method = TypeVar("Method", bound=Callable[..., Awaitable[web.StreamResponse]])
_SERVED: list[tuple[Callable[..., Awaitable[web.StreamResponse]], Route, str]] = []  # by methods, with patterns


def serves(
    verb: str, pattern: str, operation: str, text: str, schema: Schema = JSON_VALUE, **more: Any
) -> Callable[[Method], Method]:
    """Register a method as the handler of a route, which the API reference then lists.

    pattern: the route's path as aiohttp matches it. schema: the answer's. more: other fields of Route.
    """

    def note(method: Method) -> Method:
        path = re.sub(":[^}]+}", "}", pattern)
        _SERVED.append((method, Route(verb, path, operation, text, **{"answers": answer(schema), **more}), pattern))
        return method

    return note


get = partial(serves, "get")
post = partial(serves, "post")


def routes_of(*owners: type) -> tuple[Route, ...]:
    """Return the routes that these classes serve, for the API reference."""
    return tuple(route for owner in owners for method, route, _ in _SERVED if method in vars(owner).values())


def add_routes(router: web.UrlDispatcher, *owners: object) -> None:
    """Add the routes that these objects serve."""
    for owner in owners:
        for method, route, pattern in _SERVED:
            if method in vars(type(owner)).values():
                add = router.add_get if route.method == "get" else router.add_post
                add(pattern, method.__get__(owner))


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in the admin plane's form, and refuse a POST that a browser sends from another site's page.

    An operator's browser may be logged in here, and a foreign page could otherwise act in the operator's name.
    """
    origin = request.headers.get("Origin")
    is_own = origin is None or is_own_origin(origin, request.host)
    try:
        if request.method == "POST" and not is_own:
            raise ApiError(f"A page of {origin} may not do this.", status=403)
        return await handler(request)
    except ApiError as error:
        return web.json_response({"error": error.message}, status=error.status)
    except web.HTTPException as error:  # no token, or aiohttp's own: an unknown path or method, a body that is too long
        kept = {name: value for name, value in error.headers.items() if name in KEPT_HEADERS}
        return web.json_response({"error": f"{error.reason}."}, status=error.status, headers=kept)


def is_own_fault(record: logging.LogRecord) -> bool:
    """Return False for a request that aiohttp cannot read: its client gets a 400, and could fill the log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


def read_limit(query: Mapping[str, str], *, default: int, most: int) -> int:
    """Read the page size. Raises ValidationError."""
    given = query.get("limit", str(default))
    if not given.isdecimal() or len(given) > MAX_DIGITS or not 1 <= int(given) <= most:
        raise ValidationError(f"limit must be from 1 to {most}.")
    return int(given)


def read_content(answer: OperationAnswer | None) -> dict[str, Any]:
    """Parse a successful answer; empty for any other."""
    return {} if answer is None or answer.status != 200 else answer.content()


def error_message(content: Mapping[str, Any]) -> str:
    """Return the message of a handler's or of TorchServe's error body."""
    error = content.get("error")
    return str(error.get("message") if isinstance(error, dict) else content.get("message"))
