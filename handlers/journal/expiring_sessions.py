"""Lists the sessions of a directory that expire soon, so that most sweeps need not list the directory."""

import threading
from heapq import heappop, heappush

from handlers.journal.journal import expiry


class ExpiringSessions:
    """Sessions that expire before a time (the end). Any thread. Later sessions take no memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end = 0
        self._order: list[tuple[int, str]] = []  # a heap: expiry, session
        self._names: set[str] = set()

    def begin(self, end: int) -> None:
        """Forget all sessions; from now on list those that expire before this time, in seconds since 1970."""
        with self._lock:
            self._end = end
            self._order, self._names = [], set()

    def add(self, session_id: str) -> None:
        """List a session, if it expires before the end. Raises ValueError if this is not a session's id."""
        expires_at = expiry(session_id)
        with self._lock:
            if expires_at < self._end and session_id not in self._names:
                self._names.add(session_id)
                heappush(self._order, (expires_at, session_id))

    def pop(self, expired_before: int, most: int) -> list[str]:
        """Remove and return up to `most` sessions that expired before this time."""
        popped: list[str] = []
        with self._lock:
            while self._order and self._order[0][0] < expired_before and len(popped) < most:
                popped.append(heappop(self._order)[1])
            self._names.difference_update(popped)
        return popped
