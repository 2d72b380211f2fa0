"""The sessions that this worker holds: opens, adopts, evicts, expires and closes them.

The contract: a session ends only by close or expiry. With a journal the store is a cache: when it is full, or its
sessions have too many texts, the idle session that was used least recently is evicted, and its next request adopts it
again. Without a journal, sessions may expire after some idle time, too. A session is idle while no request uses it and
it is not pinned. When a session has ended and its last turn is over, it holds nothing.

All methods may be called from any thread. The turns of sessions are queued by turn_queues.py, and session_images.py
keeps their images, both under this store's lock.
"""

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable

from handlers.chat.images.store import ImageStore, ImageTier
from handlers.chat.sessions.expiry import ExpiryOrder
from handlers.chat.sessions.session import Session, owner_of
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.chat.sessions.tombstones import Tombstones
from handlers.engine.contract import KvPool
from handlers.errors import Overloaded, SessionClosed, SessionExpired, SessionGone, SessionLost, SessionUnknown
from handlers.requests.incoming import Caller
from handlers.settings.session import ChatSessionSettings
from handlers.worker.counters import Counters
from torchmoor.wire.session_ids import SessionId

logger = logging.getLogger(__name__)


class SessionStore:
    """Sessions by id.

    wall: seconds since 1970. is_durable: a journal has each session, so it can be evicted. lock: guards all sessions.
    """

    def __init__(
        self,
        settings: ChatSessionSettings,
        ids: SessionIdMinter,
        pool: KvPool,
        images: ImageStore,
        counters: Counters,
        wall: Callable[[], float],
        *,
        is_durable: bool,
    ) -> None:
        self.settings = settings
        self.num_chars = 0  # of the texts of all sessions
        self.pool = pool
        self.images = images
        self.counters = counters
        self._ids = ids
        self.wall = wall
        self.lock = threading.RLock()
        self.is_durable = is_durable
        self._sessions: dict[str, Session] = {}
        self._expiries = ExpiryOrder()
        self._idle = IdleSessions()
        self._idle_ttl_s = 0 if is_durable else settings.idle_ttl_s
        self._ending: set[Session] = set()  # ended, while their last turn still runs
        self._tombstones = Tombstones(settings)

    def __len__(self) -> int:
        return len(self._sessions)

    def holds(self, text: str) -> bool:
        """Return True if the session of this id is open here."""
        with self.lock:
            session = self._sessions.get(text)
            return session is not None and self.expires_at(session.id) > self.wall()

    def expires_at(self, sid: SessionId) -> int:
        """Return when the session ends unless it is used before, in seconds since 1970."""
        with self.lock:
            session = self._sessions.get(sid.text)
            if not self._idle_ttl_s or session is None or session not in self._idle:
                return sid.expires_at
            return min(sid.expires_at, math.ceil(session.used_at + self._idle_ttl_s))

    def seconds_until(self, time_s: float) -> int:
        """Return the seconds until a time (in seconds since 1970), at least 1, for Retry-After."""
        return max(1, math.ceil(time_s - self.wall()))

    def session_ids(self) -> list[str]:
        with self.lock:
            return list(self._sessions)

    def snapshot(self) -> list[Session]:
        with self.lock:
            return list(self._sessions.values())

    def find(self, text: str) -> Session | None:
        with self.lock:
            return self._sessions.get(text)

    def open(self, ttl_s: float, caller: Caller) -> Session:
        """Open a session without images and hold it. Raises Overloaded if there are too many."""
        with self.lock:
            return self._add(self._ids.mint(self.wall() + ttl_s, caller), caller)

    def _add(self, sid: SessionId, caller: Caller) -> Session:
        if len(self._sessions) >= self.settings.max_sessions:
            self._make_room()
        now = self.wall()
        cache = self.pool.open(caller.scope)
        session = Session(sid, caller.scope, owner_of(caller), cache, opened_at=now, used_at=now)
        session.num_holds = 1
        self._sessions[sid.text] = session
        self._expiries.add(session)
        return session

    def _make_room(self) -> None:
        """End the expired sessions, or else evict one. Raises Overloaded."""
        self.expire()
        if len(self._sessions) < self.settings.max_sessions:
            return
        if self._evict():
            return
        message = f"{len(self._sessions)} sessions are open, the most this worker holds; close one or try again later"
        raise self._full(message)

    def _evict(self) -> bool:
        """With a journal, evict an idle session. Return False if there is none."""
        victim = self._idle.first()
        if not self.is_durable or victim is None:
            return False
        self._forget(victim)
        self._release(victim, keeps_features=True)
        self.counters.add("sessions_evicted")
        return True

    def _full(self, message: str) -> Overloaded:
        """Return the error for a full worker. Without a journal, it says when the first session ends."""
        if self.is_durable:
            return Overloaded(message)
        first, idle = self._expiries.first() or 0, self._idle.first()
        if idle is not None:
            first = min(first, self.expires_at(idle.id))
        wait_s = self.seconds_until(first)
        error = Overloaded(f"{message}: the first one expires in {wait_s} s")
        error.retry_after_s = wait_s
        return error

    def add_chars(self, session: Session, num_chars: int) -> None:
        """Count a session's new texts. With a journal, evict idle sessions until all texts fit their limit."""
        with self.lock:
            session.num_chars += num_chars
            if self._sessions.get(session.id.text) is session:
                self.num_chars += num_chars
                while self.num_chars > self.settings.max_total_history_chars and self._evict():
                    pass

    def check_chars(self, num_chars: int) -> None:
        """Make room for further characters of a session's texts. Raises Overloaded if there is none."""
        limit = self.settings.max_total_history_chars
        with self.lock:
            self.expire()
            while self.num_chars + num_chars > limit:
                if not self._evict():
                    raise self._full(f"this worker's sessions have {self.num_chars} characters, and may have {limit}")

    def hold(self, text: str, caller: Caller) -> Session:
        """Return the open session of this id and keep it from eviction until `unhold`. Raises SessionGone."""
        with self.lock:
            session = self.get(text, caller)
            session.num_holds += 1
            self.begin_use(session)
            return session

    def unhold(self, session: Session) -> None:
        """End one hold."""
        with self.lock:
            session.num_holds -= 1
            self.note_use(session)

    def begin_use(self, session: Session) -> None:
        """Keep the session from eviction until `note_use`. Hold the lock."""
        self._idle.remove(session)

    def note_use(self, session: Session) -> None:
        """If the session is idle, make it the most recently used one. Hold the lock."""
        if not session.is_busy and self._sessions.get(session.id.text) is session:
            session.used_at = self.wall()
            self._idle.add(session)

    def _forget(self, session: Session) -> None:
        """Remove the session from the table."""
        self._idle.remove(session)
        self._expiries.remove(session)
        del self._sessions[session.id.text]
        self.num_chars -= session.num_chars

    def raise_if_gone(self, session: Session) -> None:
        """Raise the session's error if it has ended, SessionLost if it was evicted. Hold the lock."""
        if session.end is not None:
            raise session.end
        if self._sessions.get(session.id.text) is not session:
            raise SessionLost()

    def adopt(self, text: str, caller: Caller) -> Session:
        """Hold a session. If this worker does not have it, add it without messages and images.

        Raises the SessionGone family, Overloaded.
        """
        with self.lock:
            try:
                return self.hold(text, caller)
            except SessionLost:
                sid = self._ids.verify(text, caller)
                assert sid is not None
            session = self._add(sid, caller)
            self.counters.add("sessions_adopted")
            return session

    def get(self, text: str, caller: Caller) -> Session:
        """Return the open session of this id. Raises the SessionGone family, each case with its own message."""
        with self.lock:
            sid = self._ids.verify(text, caller)
            if sid is None:
                raise SessionUnknown("no session of this id is known here; open one with a start_session request")
            now = self.wall()
            session = self._sessions.get(text)
            if session is not None and self.expires_at(sid) > now:
                return session
            if session is not None:
                self._end(session, SessionExpired)
            raise self._tombstones.why_gone(sid, now)

    def close(self, session: Session) -> None:
        """End a session. Its memory is freed when its running turn, if any, has stopped."""
        with self.lock:
            current = self._sessions.get(session.id.text)  # another object if it was evicted and read again meanwhile
            if current is not None:
                self._end(current, SessionClosed)

    def expire(self) -> None:
        """End every session whose time is over, and forget old tombstones."""
        now = self.wall()
        with self.lock:
            for session in self._expiries.remove_expired(now):
                self._end(session, SessionExpired)
            while self._idle_ttl_s and (idle := self._idle.first()) and self.expires_at(idle.id) <= now:
                self._end(idle, SessionExpired)
            self._tombstones.forget_old(now)

    def lose(self, text: str, end: SessionLost) -> None:
        """End the session of this id, if it is open here. Its next request, if one comes, reads its journal again."""
        with self.lock:
            session = self._sessions.get(text)
            if session is not None:
                self._forget(session)
                self._stop(session, end)

    def _end(self, session: Session, error: type[SessionGone]) -> None:
        self._forget(session)
        self._stop(session, self._tombstones.add(session.id, error, self.wall()))

    def _stop(self, session: Session, end: SessionGone) -> None:
        session.end = end
        for queued in tuple(session.queued.values()):  # another thread may add one
            if session.turn not in queued.turns or not isinstance(end, SessionExpired):
                queued.end_feed(end)
        logger.info("session ended session_id=%s reason=%s", session.id.text[:24], end.code)
        if session.turn is None:
            self._release(session)
            return
        self._ending.add(session)
        if not isinstance(end, SessionExpired):
            session.turn.stop(end)

    def free_if_ended(self, session: Session) -> None:
        """Free the memory of a session that ended while its last turn, which is now over, ran. Hold the lock."""
        if session.end is not None:
            self._ending.discard(session)
            self._release(session)

    def _release(self, session: Session, *, keeps_features: bool = False) -> None:
        """Free the session's memory. keeps_features: leave its images' features until others need the memory."""
        session.cache.drop()
        for image in (*session.images, *session.pending_images):
            self.images.release(image, is_kept=keeps_features)
        session.images, session.pending_images = [], []
        for queued in tuple(session.queued.values()):  # another thread may add one
            queued.images = []

    def measure(self, session: Session) -> tuple[int, ImageTier]:
        """Return the bytes of the session's images and the slowest of their tiers."""
        with self.lock:
            return self.images.measure([*session.images, *session.pending_images])

    def count_waiting(self) -> int:
        """Count the turns that wait for an earlier turn of their session."""
        with self.lock:
            return sum(len(session.waiting) for session in [*self._sessions.values(), *self._ending])

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the pool and the image store hold exactly the sessions' caches and images."""
        with self.lock:
            for session in self._sessions.values():
                if session.turn is None and not session.is_pinned and session.cache.is_pinned:
                    raise RuntimeError(f"a cache is pinned that no turn uses: {session!r}")
            self._idle.check_integrity(lambda session: self._sessions.get(session.id.text) is session)
            self._expiries.check_integrity(self._sessions.values())
            if self.num_chars != sum(session.num_chars for session in self._sessions.values()):
                raise RuntimeError(f"the sessions' texts do not have {self.num_chars} characters")
            if any(session.turn is None for session in self._ending):
                raise RuntimeError("a session has ended and its last turn is over, but it is kept")
            sessions = [*self._sessions.values(), *self._ending]
            self.pool.check_integrity([session.cache for session in sessions])
            self.images.check_integrity(sum(session.num_images for session in sessions))


class IdleSessions:
    """Sessions that no request uses and that are not pinned, in the order of their last use: a full worker evicts them.

    Not thread-safe: the store's lock guards it.
    """

    def __init__(self) -> None:
        self._sessions: OrderedDict[Session, None] = OrderedDict()

    def __contains__(self, session: Session) -> bool:
        return session in self._sessions

    def add(self, session: Session) -> None:
        """Add a session as the most recently used one."""
        self._sessions[session] = None
        self._sessions.move_to_end(session)

    def remove(self, session: Session) -> None:
        """Remove a session, if it is there."""
        self._sessions.pop(session, None)

    def first(self) -> Session | None:
        """Return the session to evict first, the least recently used one; None without idle sessions."""
        return next(iter(self._sessions), None)

    def check_integrity(self, is_held: Callable[[Session], bool]) -> None:
        """Raise RuntimeError unless each session is held and not in use."""
        for session in self._sessions:
            if session.is_busy or not is_held(session):
                raise RuntimeError("a session may be evicted that is in use or not held")
