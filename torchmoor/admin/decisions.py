"""GET /decisions: the last routing decisions, their reasons and their outcomes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from torchmoor.admin.http import get, read_limit
from torchmoor.admin.recent_answers import RecentAnswers
from torchmoor.config.observe import TRACE_ID
from torchmoor.proxy.api.reference import admin_schemas
from torchmoor.proxy.dispatch.recent_decisions import DEFAULT_SHOWN, MAX_SHOWN, DecisionQuery

FRESH_S = 0.5


class DecisionsAdmin:
    """Serves GET /decisions, the newest first.

    find: returns the decisions of all processes. trace_link: the address of a trace, with {trace_id}; "" for no links.
    """

    def __init__(self, find: Callable[[DecisionQuery], Awaitable[dict[str, Any]]], trace_link: str) -> None:
        self._find = find
        self._trace_link = trace_link
        self._answers = RecentAnswers(FRESH_S)

    @get("/decisions", "listDecisions", "List the last routing decisions, with their reasons.", admin_schemas.DECISIONS)
    async def _show(self, request: web.Request) -> web.Response:
        limit = read_limit(request.query, default=DEFAULT_SHOWN, most=MAX_SHOWN)
        wanted = DecisionQuery.from_text(request.query, limit)
        return web.json_response(await self._answers.get(wanted, lambda: self._find_linked(wanted)))

    async def _find_linked(self, wanted: DecisionQuery) -> dict[str, Any]:
        found = await self._find(wanted)
        for row in found["decisions"]:
            has_trace = self._trace_link and row["trace_id"]
            row["trace_url"] = self._trace_link.replace(TRACE_ID, row["trace_id"]) if has_trace else None
        return found
