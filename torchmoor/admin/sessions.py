"""Sessions: their list, and an operator's actions on them.

A session is named by the hash that the access log shows, because its id is a credential. The instances hold the state
and are asked by the handlers' operation `sessions`, in one round at a time. An instance whose status does not identify
our handler is not asked, since another handler could take the operation for an invocation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from torchmoor.admin.http import error_message, get, post, read_content
from torchmoor.admin.recent_answers import RecentAnswers
from torchmoor.admin.statuses import InstanceStatuses
from torchmoor.errors import ApiError, ValidationError
from torchmoor.proxy.api.reference import admin_schemas
from torchmoor.proxy.instances.handler_operations import HandlerOperations, OperationAnswer
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry
from torchmoor.wire import operations
from torchmoor.wire.error_codes import INVALID_REQUEST
from torchmoor.wire.session_ids import SESSION_HASH
from torchmoor.wire.session_query import SessionQuery, SessionQueryError
from torchmoor.wire.session_row import read_session_fields

DEFAULT_PAGE = "100"
FRESH_S = 1.0
LIST_TIMEOUT_S = 3.0
ACTION_TIMEOUT_S = 30.0  # a close waits for the journal
MAX_QUERIES = 32  # at once


class SessionsAdmin:
    """Serves GET /sessions?endpoint=E&instance=I&session=PREFIX&limit=N&after=HASH and POST
    /sessions/HASH/close, pin, unpin.

    A session that two instances hold, after a takeover, has two rows; an action goes to both. A close of a session
    that no instance holds goes to the journal.
    """

    def __init__(self, registry: Registry, operations: HandlerOperations, statuses: InstanceStatuses) -> None:
        self._registry = registry
        self._operations = operations
        self._statuses = statuses
        self._answers = RecentAnswers(FRESH_S)
        self._free = asyncio.Semaphore(MAX_QUERIES)

    @get("/sessions", "listSessions", "List sessions by their hashes.", admin_schemas.SESSIONS)
    async def _show(self, request: web.Request) -> web.Response:
        given = request.query
        try:
            query = SessionQuery.from_text({"limit": DEFAULT_PAGE, **given, "prefix": given.get("session", "")})
        except SessionQueryError as error:
            raise ValidationError(str(error)) from error
        instances = self._choose(given)
        key = (query, *(instance.name for instance in instances))
        return web.json_response(await self._answers.get(key, lambda: self._find(instances, query)))

    async def _find(self, instances: list[Instance], query: SessionQuery) -> dict[str, Any]:
        """Return a page of these instances' sessions, ordered by hash."""
        await self._statuses.refresh_all()
        pages = await asyncio.gather(*(self._list(instance, query) for instance in instances))
        rows = [row for page in pages if page is not None for row in page["sessions"]]
        rows.sort(key=lambda row: (row["session"], row["instance"]))
        page = rows[: query.limit]
        while len(page) < len(rows) and rows[len(page)]["session"] == page[-1]["session"]:
            page.append(rows[len(page)])
        has_more = len(page) < len(rows) or any(each is not None and each["has_more"] for each in pages)
        return {
            "sessions": page,
            "next": page[-1]["session"] if page and has_more else None,
            "instances": [
                {
                    "endpoint": instance.endpoint,
                    "instance": instance.name,
                    "answered": each is not None,
                    "open": None if each is None else each["open"],
                    "evicted": None if each is None else each["evicted"],
                }
                for instance, each in zip(instances, pages, strict=True)
            ],
        }

    async def _list(self, instance: Instance, query: SessionQuery) -> dict[str, Any] | None:
        """Return an instance's page; None if it gave none."""
        answer = await self._ask(instance, query.to_body(), LIST_TIMEOUT_S)
        content = read_content(answer)
        if not isinstance(content.get("sessions"), list):
            return None
        rows = [row for given in content["sessions"] if (row := _read_row(instance, given)) is not None]
        counts = {name: count if type(count := content.get(name)) is int else None for name in ("open", "evicted")}
        return {"sessions": rows, "has_more": bool(content.get("next")), **counts}

    async def _ask(self, instance: Instance, body: Mapping[str, Any], timeout_s: float) -> OperationAnswer | None:
        if self._statuses.find(instance.name) is None:
            return None
        async with self._free:
            return await self._operations.ask(instance, operations.SESSIONS, body, timeout_s=timeout_s)

    def _choose(self, query: Mapping[str, str]) -> list[Instance]:
        """Return the instances that the query selects. Raises ValidationError."""
        endpoint, name = query.get("endpoint"), query.get("instance")
        if endpoint is not None and self._registry.find_endpoint(endpoint) is None:
            raise ValidationError(f"There is no endpoint {endpoint!r}; leave ?endpoint= out for all.")
        if name is not None and self._registry.find(name) is None:
            raise ValidationError(f"There is no instance {name!r}; see GET /instances.")
        return [
            instance
            for instance in self._registry.instances()
            if endpoint in (None, instance.endpoint) and name in (None, instance.name)
        ]

    async def _close_in_journal(self, session: str, instances: Iterable[Instance]) -> list[dict[str, Any]]:
        """Close a session that no instance holds, through one instance of each endpoint. Return their results."""
        by_endpoint = {instance.endpoint: instance for instance in instances}.values()
        body = {operations.ACTION: operations.CLOSE, operations.SESSION: session, operations.IN_JOURNAL: True}
        answers = await asyncio.gather(*(self._ask(each, body, ACTION_TIMEOUT_S) for each in by_endpoint))
        return _holders(_result(instance, answer) for instance, answer in zip(by_endpoint, answers, strict=True))

    @post(
        "/sessions/{hash}/{action:" + "|".join(operations.SESSION_ACTIONS) + "}",
        "actOnSession",
        "Close, pin or unpin a session.",
        admin_schemas.SESSION_ACTION,
    )
    async def _act(self, request: web.Request) -> web.Response:
        session, action = request.match_info["hash"], request.match_info["action"]
        if not SESSION_HASH.fullmatch(session):
            raise ValidationError("A session is named by the 16 hexadecimal digits that GET /sessions shows.")
        instances = self._choose(request.query)
        await self._statuses.refresh_all()
        body = {operations.ACTION: action, operations.SESSION: session}
        answers = await asyncio.gather(*(self._ask(each, body, ACTION_TIMEOUT_S) for each in instances))
        self._answers.forget()
        rows = [_result(instance, answer) for instance, answer in zip(instances, answers, strict=True)]
        held = _holders(rows)
        if not held and action == operations.CLOSE:
            able = [instance for instance, row in zip(instances, rows, strict=True) if row["status"] == 404]
            held = await self._close_in_journal(session, able)
        if not held:
            silent = (row["instance"] for row in rows if row["status"] is None)
            raise ApiError(_not_found(session, silent), status=404)
        failed = [row for row in held if row["status"] != 200]
        content = {"session": session, "action": action, "instances": held}
        if failed:
            content["error"] = failed[0]["error"]
        return web.json_response(content, status=failed[0]["status"] if failed else 200)


def _holders(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of the instances that hold the session, or may hold it."""
    return [row for row in rows if row["status"] not in (None, 404)]


def _read_row(instance: Instance, given: Any) -> dict[str, Any] | None:
    """Return a row of an instance's answer; None if it does not have our form."""
    if not isinstance(given, dict) or not SESSION_HASH.fullmatch(str(given.get("session"))):
        return None
    return {
        "session": given["session"],
        "endpoint": instance.endpoint,
        "variant": instance.variant,
        "instance": instance.name,
        **read_session_fields(given),
    }


def _result(instance: Instance, answer: OperationAnswer | None) -> dict[str, Any]:
    """Return an instance's result of an action. Status None: unknown; 404: it does not hold the session."""
    row: dict[str, Any] = {"instance": instance.name, "status": None}
    if answer is None or (answer.status != 200 and not answer.code) or answer.code == INVALID_REQUEST:
        return row
    row["status"] = answer.status
    content = answer.content()
    if answer.status == 200:
        row |= {"is_running": content.get("is_running") is True, "is_pinned": content.get("is_pinned") is True}
    else:
        row["error"] = error_message(content)
    return row


def _not_found(session: str, silent: Iterable[str]) -> str:
    names = ", ".join(silent)
    unsure = f" No word from {names}." if names else ""
    return f"No instance holds a session {session}: it may have ended, or moved; see GET /sessions.{unsure}"
