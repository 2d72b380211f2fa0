"""What the admin plane's JSON handlers share: error bodies, refused origins, page sizes, an instance's JSON answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from torchmoor.errors import ValidationError
from torchmoor.proxy.instances.operations import OperationAnswer

MAX_DIGITS = 9  # of ?limit=, since int() raises an error of its own for thousands of digits


def error_response(status: int, message: str) -> web.Response:
    """Return an error in the admin plane's form."""
    return web.json_response({"error": message}, status=status)


def refuse_foreign_page(request: web.Request) -> web.Response | None:
    """Return 403 if a browser sent the request from another site's page; otherwise None.

    An operator's browser may be logged in here, and a foreign page could otherwise act in the operator's name.
    """
    origin = request.headers.get("Origin")
    try:
        is_own = origin is None or urlsplit(origin).netloc == request.host
    except ValueError:
        is_own = False
    return None if is_own else error_response(403, f"A page of {origin} may not do this.")


def read_limit(query: Mapping[str, str], *, default: int, most: int) -> int:
    """Read the page size. Raises ValidationError."""
    given = query.get("limit", str(default))
    if not given.isdecimal() or len(given) > MAX_DIGITS or not 1 <= int(given) <= most:
        raise ValidationError(f"limit must be from 1 to {most}.")
    return int(given)


def read_object(answer: OperationAnswer | None) -> dict[str, Any] | None:
    """Parse an instance's answer; None if there is none or if it is not a JSON object."""
    try:
        content = None if answer is None else json.loads(answer.body)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def read_status(answer: OperationAnswer | None) -> dict[str, Any] | None:
    """Parse a successful answer; None for any other."""
    return read_object(answer) if answer is not None and answer.status == 200 else None


def error_message(content: Mapping[str, Any]) -> str:
    """Return the message of a handler's or of TorchServe's error body."""
    error = content.get("error")
    return str(error.get("message") if isinstance(error, dict) else content.get("message"))
