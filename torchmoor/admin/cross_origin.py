"""Which requests of browsers come from other sites' pages: such a page could send an operator's browser to us."""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import web


def find_foreign_page(request: web.Request) -> str | None:
    """The origin of the page that sent a request, if it is not ours; None for ours, and for what is no browser."""
    origin = request.headers.get("Origin")
    try:
        is_own = origin is None or urlsplit(origin).netloc == request.host
    except ValueError:
        is_own = False
    return None if is_own else origin
