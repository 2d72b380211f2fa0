"""GET /decisions: the last routing decisions, their reasons and their outcomes."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from torchmoor.admin.http import RequestRefused, read_limit
from torchmoor.admin.recent_answers import RecentAnswers
from torchmoor.proxy.dispatch.decisions import DEFAULT_SHOWN, MAX_SHOWN, DecisionQuery

FRESH_S = 0.5


class DecisionsAdmin:
    """Serves GET /decisions?endpoint=E&instance=I&since=SECONDS&limit=N, the newest first.

    find: returns the decisions of all processes.
    """

    def __init__(self, find: Callable[[DecisionQuery], Awaitable[dict[str, Any]]]) -> None:
        self._find = find
        self._answers = RecentAnswers(FRESH_S)

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_get("/decisions", self._show)

    async def _show(self, request: web.Request) -> web.Response:
        query = request.query
        limit = read_limit(query, default=DEFAULT_SHOWN, most=MAX_SHOWN)
        try:
            since = float(query.get("since", "0"))
        except ValueError:
            since = math.nan
        if not math.isfinite(since):
            raise RequestRefused(400, "since must be a time in seconds since 1970.")
        wanted = DecisionQuery(endpoint=query.get("endpoint"), instance=query.get("instance"), since=since, limit=limit)
        return web.json_response(await self._answers.get(wanted, lambda: self._find(wanted)))
