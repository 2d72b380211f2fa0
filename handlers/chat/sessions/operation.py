"""The operation `sessions`, by which operators see this worker's sessions, close them, and pin what they hold.

Sessions are named by a hash, since their ids are as good as credentials; an id is never a hash, because it is longer.
Only the proxy's admin plane sends operations: it takes the header that says so from what comes from outside.
"""

from collections.abc import Mapping
from typing import Any

from handlers.chat.checks import names
from handlers.chat.commands import ActOnSession, ListSessions
from handlers.chat.pictures.store import Tier
from handlers.chat.sessions.store import Session, SessionStore
from handlers.errors import InvalidRequest, SessionUnknown
from torchmoor.wire.operations import MAX_SESSIONS, SESSION_ACTIONS
from torchmoor.wire.session_hash import SESSION_HASH, SESSION_HASH_PREFIX

_TIERS = {Tier.FEATURES: "device", Tier.HOST: "host", Tier.JOURNAL: "journal"}


def parse_sessions_operation(body: Mapping[str, Any]) -> ListSessions | ActOnSession:
    """What an operation's body asks for. Raises InvalidRequest.

    {"after": HASH, "prefix": DIGITS, "limit": N}, each optional; or {"action": "close", "session": HASH}.
    """
    if "action" in body:
        _refuse_others(body, ("action", "session"))
        action, session = body["action"], body.get("session")
        if action not in SESSION_ACTIONS:
            raise InvalidRequest(f"'action' must be one of {', '.join(SESSION_ACTIONS)}", param="action")
        if not isinstance(session, str) or not SESSION_HASH.fullmatch(session):
            raise InvalidRequest("'session' must be a session's hash, of 16 hexadecimal digits", param="session")
        return ActOnSession(action, session)
    _refuse_others(body, ("after", "prefix", "limit"))
    after, prefix, limit = body.get("after", ""), body.get("prefix", ""), body.get("limit", MAX_SESSIONS)
    for name, value in (("after", after), ("prefix", prefix)):
        if not isinstance(value, str) or not SESSION_HASH_PREFIX.fullmatch(value):
            raise InvalidRequest(f"'{name}' must be at most 16 hexadecimal digits", param=name)
    if type(limit) is not int or not 1 <= limit <= MAX_SESSIONS:
        raise InvalidRequest(f"'limit' must be from 1 to {MAX_SESSIONS}", param="limit")
    return ListSessions(after=after, prefix=prefix, limit=limit)


def list_sessions(store: SessionStore, wanted: ListSessions) -> dict[str, Any]:
    """A page: `sessions`; `next`, the hash after which another begins, or None; `open`, how many there are."""
    sessions = store.snapshot()
    matching = [each for each in sessions if each.hash > wanted.after and each.hash.startswith(wanted.prefix)]
    matching.sort(key=lambda session: session.hash)
    page = matching[: wanted.limit]
    return {
        "sessions": [describe(store, session) for session in page],
        "next": page[-1].hash if len(matching) > len(page) else None,
        "open": len(sessions),
    }


def get_session(store: SessionStore, name: str) -> Session:
    """The session of a hash. Raises SessionUnknown."""
    session = store.find_by_hash(name)
    if session is None:
        raise SessionUnknown("this worker holds no session of this hash")
    return session


def describe(store: SessionStore, session: Session) -> dict[str, Any]:
    """What an operator is told of a session, never its id nor what is said in it.

    bytes: of its KV blocks and pictures; what several sessions share counts for each. tier: where what its next turn
    needs is; of its pictures the farthest, unless its blocks are there.
    """
    num_bytes, tier = store.measure(session)
    kv_bytes = session.cache.num_bytes
    num_images = len(session.images) + len(session.pending_images)
    return {
        "session": session.hash,
        "tier": "device" if kv_bytes else _TIERS[tier] if num_images else "host",
        "bytes": kv_bytes + num_bytes,
        "turns": session.num_dropped + len(session.messages) // 2,
        "images": num_images,
        "waiting": len(session.waiting),
        "is_running": session.turn is not None,
        "is_pinned": session.is_pinned,
        "opened_at": session.opened_at,
        "last_used_at": session.used_at,
        "expires_at": session.id.expires_at,
    }


def _refuse_others(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    others = body.keys() - set(known)
    if others:
        raise InvalidRequest(f"a sessions operation has {', '.join(known)}, not {names(others)}")
