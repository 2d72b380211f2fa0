"""Bodies of the handler's operations, which only the proxy and its admin plane send."""

from collections.abc import Callable, Mapping
from typing import Any

from handlers.chat.checks import names
from handlers.chat.commands import ActOnSession, CloseInJournal, Command, EndClosed, ListSessions, ReportStatus
from handlers.errors import InvalidRequest
from torchmoor.wire import operations
from torchmoor.wire.operations import MAX_ENDED, MAX_SESSIONS, SESSION_ACTIONS
from torchmoor.wire.session_hash import SESSION_HASH, SESSION_HASH_PREFIX


def parse_operation(operation: str, read_body: Callable[[], dict[str, Any]]) -> Command:
    """Read an operation of a chat worker. Raises InvalidRequest."""
    match operation:
        case operations.STATUS:
            return ReportStatus()
        case operations.SESSIONS:
            return _parse_sessions(read_body())
        case operations.END_CLOSED:
            return _parse_closed(read_body())
        case _:
            raise InvalidRequest(f"there is no operation {names([operation])}")


def _parse_sessions(body: Mapping[str, Any]) -> ListSessions | ActOnSession | CloseInJournal:
    """Read a sessions operation.

    {"after": HASH, "prefix": DIGITS, "limit": N}, each optional; or {"action": "close", "session": HASH}, and for a
    session that no worker holds, "in_journal": true.
    """
    if "action" in body:
        _refuse_others(body, ("action", "session", operations.IN_JOURNAL))
        action, session = body["action"], body.get("session")
        if action not in SESSION_ACTIONS:
            raise InvalidRequest(f"'action' must be one of {', '.join(SESSION_ACTIONS)}", param="action")
        if not isinstance(session, str) or not SESSION_HASH.fullmatch(session):
            raise InvalidRequest("'session' must be a session's hash, of 16 hexadecimal digits", param="session")
        if operations.IN_JOURNAL not in body:
            return ActOnSession(action, session)
        if action != operations.CLOSE or body[operations.IN_JOURNAL] is not True:
            raise InvalidRequest("'in_journal' must be true, with the action close", param=operations.IN_JOURNAL)
        return CloseInJournal(session)
    _refuse_others(body, ("after", "prefix", "limit"))
    after, prefix, limit = body.get("after", ""), body.get("prefix", ""), body.get("limit", MAX_SESSIONS)
    for name, value in (("after", after), ("prefix", prefix)):
        if not isinstance(value, str) or not SESSION_HASH_PREFIX.fullmatch(value):
            raise InvalidRequest(f"'{name}' must be at most 16 hexadecimal digits", param=name)
    if type(limit) is not int or not 1 <= limit <= MAX_SESSIONS:
        raise InvalidRequest(f"'limit' must be from 1 to {MAX_SESSIONS}", param="limit")
    return ListSessions(after=after, prefix=prefix, limit=limit)


def _parse_closed(body: Mapping[str, Any]) -> EndClosed:
    """Read an end-closed operation: {"session_ids": [ID, ...]}."""
    _refuse_others(body, (operations.SESSION_IDS,))
    ids = body.get(operations.SESSION_IDS)
    if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids) or len(ids) > MAX_ENDED:
        raise InvalidRequest(f"'session_ids' must be a list of at most {MAX_ENDED} ids", param=operations.SESSION_IDS)
    return EndClosed(tuple(ids))


def _refuse_others(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    others = body.keys() - set(known)
    if others:
        raise InvalidRequest(f"this operation has {', '.join(known)}, not {names(others)}")
