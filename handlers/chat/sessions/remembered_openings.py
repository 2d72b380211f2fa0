"""Idempotent openings without a journal: a retried opening gets the session of the first one."""

import threading
from collections.abc import Callable


class RememberedOpenings:
    """Remembers the sessions of the last `max_remembered` openings. Any thread.

    is_open: whether the session of an id is open. It is called without the lock, as is `undo`, because a thread that
    undoes an opening may hold the lock of the sessions.
    """

    def __init__(self, is_open: Callable[[str], bool], max_remembered: int) -> None:
        self._is_open = is_open
        self._max_remembered = max_remembered
        self._lock = threading.Lock()
        self._sessions: dict[str, str] = {}  # by the opening's name, oldest first
        self._shared: set[str] = set()  # sessions that were returned to a second request

    def claim(self, name: str, session_id: str) -> str:
        """Return the session of the first opening of this name while it is open, else `session_id`."""
        while True:
            first = self._sessions.get(name)
            is_open = first is not None and first != session_id and self._is_open(first)
            with self._lock:
                if self._sessions.get(name) != first:  # claimed or undone meanwhile
                    continue
                if first is not None and is_open:
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
        """Undo an opening. Return False, and keep the session, if it was also returned to another request."""
        with self._lock:
            if session_id in self._shared:
                return False
            for name in [name for name, own in self._sessions.items() if own == session_id]:
                self._forget(name)
        undo()
        return True
