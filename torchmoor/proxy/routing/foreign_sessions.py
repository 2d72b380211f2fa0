"""Sessions whose ids were minted by the instances' own handlers: which instance opened each.

Such an id proves nothing and names nobody, so what this process has seen opened is all that is known, and another
proxy does not know it. Nor can another instance take such a session over.
"""

from __future__ import annotations

from typing import NamedTuple

from torchmoor.wire.session_ids import SessionId


class _Key(NamedTuple):
    endpoint: str
    principal: str
    text: str


class ForeignSessions:
    """At most max_sessions; the one that was used the longest ago is forgotten first. Event loop's thread only."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._sessions: dict[_Key, SessionId] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, text: str, instance: str, *, endpoint: str, principal: str) -> None:
        """An instance has answered with this id."""
        self._sessions.pop(_Key(endpoint, principal, text), None)
        if len(self._sessions) >= self._max_sessions:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[_Key(endpoint, principal, text)] = SessionId(text, instance, 0, "")

    def find(self, text: str, *, endpoint: str, principal: str) -> SessionId | None:
        """The session of this caller; None if it was never opened here, or is forgotten."""
        key = _Key(endpoint, principal, text)
        session = self._sessions.pop(key, None)
        if session is not None:
            self._sessions[key] = session  # the newest again
        return session

    def remove(self, text: str, *, endpoint: str, principal: str) -> None:
        """It was closed."""
        self._sessions.pop(_Key(endpoint, principal, text), None)
