"""Idempotent openings without a journal: a retried opening gets the session of the first one."""

import threading
from collections.abc import Callable


class IdempotencyCache:
    """Remembers the sessions of the last `max_remembered` openings. Any thread.

    is_open: whether the session of an id is open.
    """

    def __init__(self, is_open: Callable[[str], bool], max_remembered: int) -> None:
        self._is_open = is_open
        self._max_remembered = max_remembered
        self._lock = threading.Lock()
        self._sessions: dict[str, str] = {}  # by the opening's name, oldest first
        self._shared: set[str] = set()  # sessions that a second request was answered with

    def claim(self, name: str, session_id: str) -> str:
        """Return the session for an opening of this name: the first opening's while it is open, else this one."""
        with self._lock:
            first = self._sessions.get(name)
            if first is not None and first != session_id and self._is_open(first):
                self._shared.add(first)
                return first
            self._forget(name)
            if len(self._sessions) >= self._max_remembered:
                self._forget(next(iter(self._sessions)))
            self._sessions[name] = session_id
            return session_id

    def _forget(self, name: str) -> None:
        self._shared.discard(self._sessions.pop(name, ""))

    def try_undo(self, session_id: str, undo: Callable[[], None]) -> bool:
        """Undo an opening; return False if another request was answered with its session, which then stays."""
        with self._lock:
            if session_id in self._shared:
                return False
            undo()
            return True
