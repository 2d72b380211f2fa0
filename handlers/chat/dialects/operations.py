"""Bodies of the handler's operations, which only the proxy and its admin plane send."""

from collections.abc import Callable, Mapping
from typing import Any

from handlers.chat.checks import is_int, names
from handlers.chat.commands import ActOnSession, CloseInJournal, Command, DropResponse, EndClosed, ReportStatus
from handlers.errors import InvalidRequest
from torchmoor.wire import operations
from torchmoor.wire.operations import ACTION, ENTRY, IN_JOURNAL, MAX_ENDED, SESSION, SESSION_ACTIONS, SESSION_IDS
from torchmoor.wire.session_ids import SESSION_HASH
from torchmoor.wire.session_query import SESSION_QUERY_FIELDS, SessionQuery, SessionQueryError


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


def _parse_sessions(body: Mapping[str, Any]) -> SessionQuery | ActOnSession | CloseInJournal | DropResponse:
    """Read a sessions operation.

    The fields of SessionQuery, each optional; or {"action": "close", "session": HASH}, and for a session that no worker
    holds, "in_journal": true, or for one response in the background, "entry": NUMBER.
    """
    if ACTION in body:
        return _parse_action(body)
    _refuse_others(body, SESSION_QUERY_FIELDS)
    try:
        return SessionQuery(**body)
    except SessionQueryError as exc:
        raise InvalidRequest(str(exc), param=exc.field) from exc


def _parse_action(body: Mapping[str, Any]) -> ActOnSession | CloseInJournal | DropResponse:
    _refuse_others(body, (ACTION, SESSION, IN_JOURNAL, ENTRY))
    action, session = body[ACTION], body.get(SESSION)
    if action not in SESSION_ACTIONS:
        raise InvalidRequest(f"'action' must be one of {', '.join(SESSION_ACTIONS)}", param=ACTION)
    if not isinstance(session, str) or not SESSION_HASH.fullmatch(session):
        raise InvalidRequest("'session' must be a session's hash, of 16 hexadecimal digits", param=SESSION)
    if ENTRY in body:
        if action != operations.CLOSE or not is_int(body[ENTRY]) or IN_JOURNAL in body:
            raise InvalidRequest("'entry' must be a whole number, with the action close alone", param=ENTRY)
        return DropResponse(session, body[ENTRY])
    if IN_JOURNAL not in body:
        return ActOnSession(action, session)
    if action != operations.CLOSE or body[IN_JOURNAL] is not True:
        raise InvalidRequest("'in_journal' must be true, with the action close", param=IN_JOURNAL)
    return CloseInJournal(session)


def _parse_closed(body: Mapping[str, Any]) -> EndClosed:
    """Read an end-closed operation: {"session_ids": [ID, ...]}."""
    _refuse_others(body, (SESSION_IDS,))
    ids = body.get(SESSION_IDS)
    if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids) or len(ids) > MAX_ENDED:
        raise InvalidRequest(f"'session_ids' must be a list of at most {MAX_ENDED} ids", param=SESSION_IDS)
    return EndClosed(tuple(ids))


def _refuse_others(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    others = body.keys() - set(known)
    if others:
        raise InvalidRequest(f"this operation has {', '.join(known)}, not {names(others)}")
