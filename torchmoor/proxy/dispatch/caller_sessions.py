"""Open sessions of each caller: counted from their opening until they are closed or expire.

A session may be opened through one process and closed through another. So that the sum over all processes is right,
the process that sees only the close allows the caller one more opening until that session would have expired.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush

SPARE = 64  # up to this many entries of a heap, or idle callers, are not cleaned


class _Lifetime:
    """When a session expires, in seconds since 1970. Each turn sets that to idle_s later, but not past last_at."""

    __slots__ = ("expires_at", "last_at", "idle_s")

    def __init__(self, expires_at: float, last_at: float, idle_s: float) -> None:
        self.expires_at = expires_at
        self.last_at = last_at
        self.idle_s = idle_s


class _Expiring:
    """Sessions by their keys, the next to expire first."""

    __slots__ = ("lifetimes", "_heap")

    def __init__(self) -> None:
        self.lifetimes: dict[Hashable, _Lifetime] = {}
        self._heap: list[tuple[float, int, Hashable, _Lifetime]] = []

    def __len__(self) -> int:
        return len(self.lifetimes)

    def add(self, key: Hashable, lifetime: _Lifetime) -> None:
        self.lifetimes[key] = lifetime
        heappush(self._heap, (lifetime.expires_at, id(lifetime), key, lifetime))
        if len(self._heap) > SPARE + 2 * len(self.lifetimes):  # most of the entries belong to removed sessions
            self._heap = [(each.expires_at, id(each), key, each) for key, each in self.lifetimes.items()]
            heapify(self._heap)

    def try_remove(self, key: Hashable) -> bool:
        return self.lifetimes.pop(key, None) is not None

    def expire(self, now: float) -> None:
        """Forget expired sessions."""
        while (first_at := self.first_expiry()) is not None and first_at <= now:
            del self.lifetimes[heappop(self._heap)[2]]

    def first_expiry(self) -> float | None:
        """Return when the first session expires; None without sessions."""
        heap = self._heap
        while heap:
            at, number, key, lifetime = heap[0]
            if self.lifetimes.get(key) is not lifetime:
                heappop(heap)
            elif at != lifetime.expires_at:
                heappop(heap)
                heappush(heap, (lifetime.expires_at, number, key, lifetime))
            else:
                return at
        return None


class _OneCaller:
    """The sessions of one caller.

    openings: sessions' keys by the ids of the invocations that opened them, ended sessions included. opened_elsewhere:
    sessions that were opened through another process and closed here. ended: the last sessions that were opened and
    closed here, so that an answer that is sent again counts once.
    """

    __slots__ = ("num_opening", "open", "openings", "opened_elsewhere", "ended")

    def __init__(self) -> None:
        self.num_opening = 0
        self.open = _Expiring()
        self.openings: dict[bytes, Hashable] = {}
        self.opened_elsewhere = _Expiring()
        self.ended: dict[Hashable, None] = {}

    def count_at(self, now: float) -> int:
        self.open.expire(now)
        self.opened_elsewhere.expire(now)
        return len(self.open) + self.num_opening - len(self.opened_elsewhere)

    def has_opened(self, invocation_id: bytes) -> bool:
        """Return True if an invocation of this id has opened a session that is still open."""
        return self.openings.get(invocation_id) in self.open.lifetimes

    def add(self, key: Hashable, lifetime: _Lifetime, invocation_id: bytes) -> None:
        if self.has_opened(invocation_id):  # the instance did not recognize the repetition, so the next is counted
            del self.openings[invocation_id]
        elif invocation_id:
            self.openings[invocation_id] = key
        self.open.add(key, lifetime)
        if len(self.openings) > SPARE + 2 * len(self.open):
            self.openings = {name: key for name, key in self.openings.items() if key in self.open.lifetimes}

    @property
    def is_empty(self) -> bool:
        return not (self.open or self.opened_elsewhere or self.num_opening)


class CallerSessions:
    """The open sessions of all callers. A session's key is any value that no other session has.

    wall: seconds since 1970, as in session ids.
    """

    def __init__(self, max_sessions: int, *, wall: Callable[[], float]) -> None:
        self._max_sessions = max_sessions
        self._wall = wall
        self._callers: dict[str, _OneCaller] = {}
        self._clean_at = SPARE

    def count(self, caller: str) -> int:
        """Return how many sessions a caller has open or is opening."""
        found = self._callers.get(caller)
        return 0 if found is None else max(0, found.count_at(self._wall()))

    def is_full(self, caller: str, invocation_id: bytes) -> bool:
        """Return True if a caller may not open another session.

        A repeated opening, with the invocation id of one that opened a session, opens no other session.
        """
        found = self._callers.get(caller)
        is_at_limit = found is not None and found.count_at(self._wall()) >= self._max_sessions
        return found is not None and is_at_limit and not found.has_opened(invocation_id)

    def try_begin_opening(self, caller: str, invocation_id: bytes) -> bool:
        """Count an opening until `end_opening`. Returns False if `is_full`."""
        found = self._get(caller)
        if self.is_full(caller, invocation_id):
            return False
        found.num_opening += 1
        return True

    def first_expiry_s(self, caller: str) -> float | None:
        """Return the seconds until the first session of a caller expires; None if none is open."""
        found = self._callers.get(caller)
        first_at = None if found is None else found.open.first_expiry()
        return None if first_at is None else first_at - self._wall()

    def end_opening(self, caller: str) -> None:
        """Stop counting an opening, which has ended."""
        self._callers[caller].num_opening -= 1

    def opened(
        self, caller: str, key: Hashable, *, expires_at: float, last_at: float, invocation_id: bytes = b""
    ) -> None:
        """Count a session, once for all answers to its opening.

        expires_at: without turns, in seconds since 1970. last_at: however many turns it has.
        """
        found, now = self._get(caller), self._wall()
        if expires_at > now and key not in found.open.lifetimes and key not in found.ended:
            found.add(key, _Lifetime(expires_at, last_at, expires_at - now), invocation_id)

    def used(self, caller: str, key: Hashable) -> None:
        """Note a turn of a session."""
        found = self._callers.get(caller)
        lifetime = None if found is None else found.open.lifetimes.get(key)
        if lifetime is not None and lifetime.expires_at < lifetime.last_at:
            lifetime.expires_at = min(lifetime.last_at, self._wall() + lifetime.idle_s)

    def closed(self, caller: str, key: Hashable, *, expires_at: float) -> None:
        """Stop counting a session. If another process saw it opened, allow one more until it would have expired."""
        found = self._get(caller)
        if found.open.try_remove(key):
            found.ended[key] = None
            if len(found.ended) > self._max_sessions:
                del found.ended[next(iter(found.ended))]
            return
        elsewhere = found.opened_elsewhere
        is_known = key in found.ended or key in elsewhere.lifetimes
        if not is_known and expires_at > self._wall() and len(elsewhere) < self._max_sessions:
            elsewhere.add(key, _Lifetime(expires_at, expires_at, 0.0))

    def lost(self, caller: str, key: Hashable) -> None:
        """Stop counting a session that its instance no longer has."""
        found = self._callers.get(caller)
        if found is not None:
            found.open.try_remove(key)

    def _get(self, caller: str) -> _OneCaller:
        found = self._callers.get(caller)
        if found is None:
            if len(self._callers) >= self._clean_at:
                self._clean()
            found = self._callers[caller] = _OneCaller()
        return found

    def _clean(self) -> None:
        """Forget callers without sessions."""
        now = self._wall()
        for each in self._callers.values():
            each.count_at(now)
        self._callers = {name: each for name, each in self._callers.items() if not each.is_empty}
        self._clean_at = SPARE + 2 * len(self._callers)
