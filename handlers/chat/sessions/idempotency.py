"""Without a journal: which session an opening was answered with, so that one that is sent again opens no second one."""

import threading
from collections.abc import Callable


class IdempotencyCache:
    """The last openings of this worker, at most max_remembered. Any thread.

    is_open: whether a session of that id is still there.
    """

    def __init__(self, is_open: Callable[[str], bool], max_remembered: int) -> None:
        self._is_open = is_open
        self._max_remembered = max_remembered
        self._lock = threading.Lock()
        self._sessions: dict[str, str] = {}  # by the opening's name, oldest first
        self._shared: set[str] = set()  # those of them that a second request was answered with too

    def claim(self, name: str, session_id: str) -> str:
        """The session that an opening of that name is answered with: the first one's while that is open, else this."""
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
        """Undo the opening of a session; False if another request was answered with it, so that it has to stay."""
        with self._lock:
            if session_id in self._shared:
                return False
            undo()
            return True
