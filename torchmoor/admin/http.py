"""Shared by the admin plane's JSON handlers: error answers, refused origins, page sizes, instances' answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from torchmoor.errors import ApiError, ValidationError
from torchmoor.proxy.access.web_pages import is_own_origin
from torchmoor.proxy.instances.handler_operations import OperationAnswer

KEPT_HEADERS = ("Allow", "WWW-Authenticate")  # of aiohttp's errors
MAX_DIGITS = 9  # of ?limit=, since int() raises an error of its own for thousands of digits


class RequestRefused(Exception):
    """An error answer of a JSON handler."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in the admin plane's form, and refuse a POST that a browser sends from another site's page.

    An operator's browser may be logged in here, and a foreign page could otherwise act in the operator's name.
    """
    origin = request.headers.get("Origin")
    is_own = origin is None or is_own_origin(origin, request.host)
    try:
        if request.method == "POST" and not is_own:
            raise RequestRefused(403, f"A page of {origin} may not do this.")
        return await handler(request)
    except (ApiError, RequestRefused) as error:
        return web.json_response({"error": error.message}, status=error.status)
    except web.HTTPException as error:  # no token, or aiohttp's own: an unknown path or method, a body that is too long
        kept = {name: value for name, value in error.headers.items() if name in KEPT_HEADERS}
        return web.json_response({"error": f"{error.reason}."}, status=error.status, headers=kept)


def is_own_fault(record: logging.LogRecord) -> bool:
    """Filter out requests that aiohttp cannot read: their clients get a 400, and could fill the log with tracebacks."""
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
