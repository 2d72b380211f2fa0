"""The expiry of sessions and of their journals: their order, and the thread that ends them."""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from handlers.chat.sessions.known_sessions import KnownSessions
from handlers.chat.sessions.session import Session
from handlers.journal.journal import EXPIRED_KEPT_S

logger = logging.getLogger(__name__)
INTERVAL_S = 1.0
SWEEP_INTERVAL_S = 20  # between two deletions of the journals of expired sessions
NUM_LIGHT_SWEEPS = 30  # between two full sweeps, and until a clock that jumped forward is trusted


class Sweep(NamedTuple):
    """A deletion of journals. expired_before: in seconds since 1970. is_full: see `Journal.sweep`."""

    expired_before: int
    is_full: bool


class SweepSchedule:
    """Decides when the journals of expired sessions are deleted, so that each is gone within a minute.

    Workers share the journals, so a clock that jumps forward is believed only after ten minutes. A clock that is set
    back is believed at once.
    """

    def __init__(self, wall: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        """wall: seconds since 1970. clock: monotonic seconds."""
        self._wall = wall
        self._clock = clock
        self._next_at = clock()
        self._num_sweeps = 0
        self._offsets: deque[float] = deque(maxlen=NUM_LIGHT_SWEEPS)  # wall-clock times of the last sweeps

    def next(self) -> Sweep | None:
        """Return the sweep that is due, or None. Call it every second."""
        now = self._clock()
        if now < self._next_at:
            return None
        self._next_at = now + SWEEP_INTERVAL_S
        self._offsets.append(self._wall() - now)
        is_full = self._num_sweeps % NUM_LIGHT_SWEEPS == 0
        self._num_sweeps += 1
        return Sweep(int(now + min(self._offsets) - EXPIRED_KEPT_S), is_full)


class ExpiryThread:
    """Calls `expire` every second, and sweeps the journals that expired before a time. wall: seconds since 1970."""

    def __init__(self, expire: Callable[[], None], known: KnownSessions, wall: Callable[[], float]) -> None:
        self._expire = expire
        self._known = known
        self._schedule = SweepSchedule(wall)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="expiry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            try:
                self._expire()
                due = self._schedule.next()
                if due is not None:
                    self._known.sweep(due.expired_before, is_full=due.is_full)
            except Exception:
                logger.exception("sessions could not be expired")


class ExpiryOrder:
    """Sessions in the order of their expiry. Not thread-safe: the store's lock guards it.

    Operations cost nothing for sessions that have not expired. Memory is bounded by the number of sessions and of the
    seconds in which one may expire (session.max_ttl_s).
    """

    def __init__(self) -> None:
        self._sessions: defaultdict[int, set[Session]] = defaultdict(set)  # by the second of their expiry
        self._seconds: list[int] = []  # a heap of the keys; an ended session's key stays until it is the first

    def add(self, session: Session) -> None:
        second = session.id.expires_at
        if second not in self._sessions:
            heappush(self._seconds, second)
        self._sessions[second].add(session)

    def remove(self, session: Session) -> None:
        """Remove a session, if it is there."""
        self._sessions.get(session.id.expires_at, set()).discard(session)

    def first(self) -> int | None:
        """Return when the first session expires, in seconds since 1970; None without sessions."""
        while self._seconds:
            if self._sessions[self._seconds[0]]:
                return self._seconds[0]
            del self._sessions[heappop(self._seconds)]
        return None

    def remove_expired(self, now: float) -> list[Session]:
        """Remove and return the sessions whose time is over."""
        expired: list[Session] = []
        while (second := self.first()) is not None and second <= now:
            expired.extend(self._sessions.pop(second))
            heappop(self._seconds)
        return expired

    def check_integrity(self, sessions: Iterable[Session]) -> None:
        """Raise RuntimeError unless these sessions are in the order, and no others."""
        if set(sessions) != {each for together in self._sessions.values() for each in together}:
            raise RuntimeError("the order of expiry has other sessions than the store")
        if sorted(self._seconds) != sorted(self._sessions):
            raise RuntimeError("the order of expiry lacks a second or has it twice")
