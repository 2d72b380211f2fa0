"""Sessions with ids from handlers that are not torchmoor's: the instance that opened each.

Such an id has no MAC and names no instance, so a proxy knows only the sessions that were opened through it, and no
other instance can take one over.
"""

from __future__ import annotations

from typing import NamedTuple

from torchmoor.wire.last_kept import LastKept
from torchmoor.wire.session_ids import SessionId


class _Key(NamedTuple):
    endpoint: str
    principal: str
    text: str


class ForeignSessions:
    """Remembers max_sessions sessions, the last used ones. For the event loop's thread only."""

    def __init__(self, max_sessions: int) -> None:
        self._sessions: LastKept[_Key, SessionId] = LastKept(max_sessions)

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, text: str, instance: str, *, endpoint: str, principal: str) -> SessionId:
        """Remember an id that an instance has answered with."""
        session = SessionId(text, instance, 0, "")
        self._sessions.keep(_Key(endpoint, principal, text), session)
        return session

    def find(self, text: str, *, endpoint: str, principal: str) -> SessionId | None:
        """Return this caller's session; None if it was not opened here or is forgotten."""
        key = _Key(endpoint, principal, text)
        session = self._sessions.get(key)
        if session is not None:
            self._sessions.keep(key, session)  # now the last used one
        return session

    def remove(self, text: str, *, endpoint: str, principal: str) -> None:
        self._sessions.pop(_Key(endpoint, principal, text), None)
