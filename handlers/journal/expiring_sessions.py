"""The sessions of a directory that expire soon, by expiry, so that most sweeps do not list the directory."""

import threading
from collections.abc import Mapping, Set
from heapq import heappop, heappush

from handlers.journal.journal import expiry


class ExpiringSessions:
    """Sessions that expire before a time, the end. Any thread. Sessions that expire later take no memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end = 0
        self._order: list[tuple[int, str]] = []  # a heap: expiry, session
        self._bytes: dict[str, int] = {}

    def begin(self, end: int) -> None:
        """Forget all sessions; from now on list those that expire before this time, in seconds since 1970."""
        with self._lock:
            self._end = end
            self._order, self._bytes = [], {}

    def add(self, session_id: str) -> None:
        """List a session, if it expires before the end. Raises ValueError if this is not a session's id."""
        expires_at = expiry(session_id)
        with self._lock:
            if expires_at < self._end and session_id not in self._bytes:
                self._bytes[session_id] = 0
                heappush(self._order, (expires_at, session_id))

    def first(self) -> int | None:
        """Return when the first session expires, in seconds since 1970; None if no session is listed."""
        with self._lock:
            return self._order[0][0] if self._order else None

    def names(self) -> Set[str]:
        with self._lock:
            return frozenset(self._bytes)

    def note_sizes(self, sizes: Mapping[str, int]) -> None:
        """Note the bytes of listed sessions."""
        with self._lock:
            for session_id in sizes.keys() & self._bytes.keys():
                self._bytes[session_id] = sizes[session_id]

    def pop(self, expired_before: int, most: int) -> list[tuple[str, int]]:
        """Remove up to `most` sessions that expired before this time. Return each with its bytes, 0 if unknown."""
        popped: list[tuple[str, int]] = []
        with self._lock:
            while self._order and self._order[0][0] < expired_before and len(popped) < most:
                _, session_id = heappop(self._order)
                popped.append((session_id, self._bytes.pop(session_id)))
        return popped
