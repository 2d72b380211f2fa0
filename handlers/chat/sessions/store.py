"""The sessions that this worker holds: their queues of turns, their ends and their limits.

The contract: a session ends only by close or expiry. With a journal the table is a cache: when it is full, the idle
session that was used least recently is evicted, and its next request adopts it again. Without a journal, sessions may
expire after some idle time, too. A session is idle while no request uses it and it is not pinned. While a turn runs,
the session's KV cache is pinned. Between turns the cache may be evicted (handlers/engine/contract.py) and the features
of its images may be dropped (handlers/chat/pictures/store.py); then the next turn only takes longer. When a session has
ended and its last turn is over, it holds nothing.

All methods may be called from any thread.
"""

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from handlers.chat.pictures.receiver import check_num_images
from handlers.chat.pictures.store import Image, ImageStore, ImageTier
from handlers.chat.sessions.expiry import ExpiryOrder, Tombstones, lost
from handlers.chat.sessions.session import QueuedTurn, Session, owner_of
from handlers.chat.sessions.session_id_minter import SessionIdMinter
from handlers.engine.contract import KvPool
from handlers.errors import (
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    SessionClosed,
    SessionExpired,
    SessionGone,
    SessionLost,
    SessionUnknown,
)
from handlers.requests import Caller
from handlers.settings import ChatSessionSettings
from torchmoor.wire.session_ids import SessionId

logger = logging.getLogger(__name__)


class SessionStore:
    """Sessions by their ids. wall: seconds since 1970. is_durable: a journal has each session, so it can be evicted."""

    def __init__(
        self,
        settings: ChatSessionSettings,
        ids: SessionIdMinter,
        pool: KvPool,
        images: ImageStore,
        wall: Callable[[], float],
        *,
        is_durable: bool,
    ) -> None:
        self.settings = settings
        self.sessions_adopted = self.sessions_evicted = 0
        self.pool = pool
        self.images = images
        self._ids = ids
        self._wall = wall
        self._lock = threading.RLock()
        self.is_durable = is_durable
        self._sessions: dict[str, Session] = {}
        self._expiries = ExpiryOrder()
        self._idle: OrderedDict[Session, None] = OrderedDict()  # the least recently used one first
        self._idle_ttl_s = 0 if is_durable else settings.idle_ttl_s
        self._ending: set[Session] = set()  # ended, while their last turn still runs
        self._tombstones = Tombstones(settings)

    def __len__(self) -> int:
        return len(self._sessions)

    def holds(self, text: str) -> bool:
        """True if the session of this id is open here."""
        with self._lock:
            session = self._sessions.get(text)
            return session is not None and self.expires_at(session.id) > self._wall()

    def expires_at(self, sid: SessionId) -> int:
        """Return when the session ends unless it is used before, in seconds since 1970."""
        with self._lock:
            session = self._sessions.get(sid.text)
            if not self._idle_ttl_s or session is None or session not in self._idle:
                return sid.expires_at
            return min(sid.expires_at, math.ceil(session.used_at + self._idle_ttl_s))

    def seconds_until(self, time_s: float) -> int:
        """Return how long it is until this time, in seconds since 1970, for Retry-After: at least 1."""
        return max(1, math.ceil(time_s - self._wall()))

    def session_ids(self) -> list[str]:
        with self._lock:
            return list(self._sessions)

    def snapshot(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())

    def find(self, text: str) -> Session | None:
        with self._lock:
            return self._sessions.get(text)

    def find_by_hash(self, name: str) -> Session | None:
        """Return the open session with this hash; None if there is none, or more than one."""
        found = [session for session in self.snapshot() if session.hash == name]
        return found[0] if len(found) == 1 else None

    def measure(self, session: Session) -> tuple[int, ImageTier]:
        """Return the bytes of the session's images and the slowest of their tiers."""
        with self._lock:
            return self.images.measure([*session.images, *session.pending_images])

    def turn_counts(self) -> dict[str, int]:
        """Count the turns that run, and those that wait behind them."""
        with self._lock:
            sessions = [*self._sessions.values(), *self._ending]
            running = sum(session.turn is not None for session in sessions)
            return {"running": running, "waiting": sum(len(session.waiting) for session in sessions)}

    def open(self, ttl_s: float, caller: Caller) -> Session:
        """Open a session without images and hold it. Raises Overloaded if there are too many."""
        with self._lock:
            return self._add(self._ids.mint(int(self._wall() + ttl_s), caller), caller)

    def _add(self, sid: SessionId, caller: Caller) -> Session:
        if len(self._sessions) >= self.settings.max_sessions:
            self._make_room()
        now = self._wall()
        cache = self.pool.open(caller.scope)
        session = Session(sid, caller.scope, owner_of(caller), cache, opened_at=now, used_at=now)
        session.num_holds = 1
        self._sessions[sid.text] = session
        self._expiries.add(session)
        return session

    def _make_room(self) -> None:
        """End the expired sessions, or else evict the idle one that was used least recently. Raises Overloaded."""
        self.expire()
        if len(self._sessions) < self.settings.max_sessions:
            return
        oldest = next(iter(self._idle), None)
        if self.is_durable and oldest is not None:
            self._forget(oldest)
            self._release(oldest, keeps_features=True)
            self.sessions_evicted += 1
            return
        message = f"{len(self._sessions)} sessions are open, the most this worker holds; close one or try again later"
        if self.is_durable:
            raise Overloaded(message)
        first = self._expiries.first() or 0
        if oldest is not None:
            first = min(first, self.expires_at(oldest.id))
        wait_s = self.seconds_until(first)
        error = Overloaded(f"{message}: the first one expires in {wait_s} s")
        error.retry_after_s = wait_s
        raise error

    def hold(self, text: str, caller: Caller) -> Session:
        """Return the open session of this id and keep it from eviction until `unhold`. Raises SessionGone."""
        with self._lock:
            session = self.get(text, caller)
            session.num_holds += 1
            self._idle.pop(session, None)
            return session

    def unhold(self, session: Session) -> None:
        """End one hold."""
        with self._lock:
            session.num_holds -= 1
            self._note_use(session)

    def _note_use(self, session: Session) -> None:
        """Make the session the most recently used one of the idle ones, if it is idle."""
        self._idle.pop(session, None)
        is_busy = session.turn is not None or session.waiting or session.num_holds or session.is_pinned
        if not is_busy and self._sessions.get(session.id.text) is session:
            session.used_at = self._wall()
            self._idle[session] = None

    def _forget(self, session: Session) -> bool:
        """Remove the session from the table. Return False if it is not there."""
        self._idle.pop(session, None)
        self._expiries.remove(session)
        return self._sessions.pop(session.id.text, None) is not None

    def _raise_if_gone(self, session: Session) -> None:
        """Raise the session's end if it is over, SessionLost if it was evicted."""
        if session.end is not None:
            raise session.end
        if self._sessions.get(session.id.text) is not session:
            raise lost()

    def adopt(self, text: str, caller: Caller) -> Session:
        """Hold a session, and add it, still without messages and images, if this worker does not have it.

        Raises the SessionGone family, Overloaded.
        """
        with self._lock:
            try:
                return self.hold(text, caller)
            except SessionLost:
                sid = self._ids.verify(text, caller)
                assert sid is not None
            session = self._add(sid, caller)
            self.sessions_adopted += 1
            return session

    def get(self, text: str, caller: Caller) -> Session:
        """Return the open session of this id. Raises the SessionGone family, each case with its own message."""
        with self._lock:
            sid = self._ids.verify(text, caller)
            if sid is None:
                raise SessionUnknown("no session of this id is known here; open one with a start_session request")
            now = self._wall()
            session = self._sessions.get(text)
            if session is not None and self.expires_at(sid) > now:
                return session
            if session is not None:
                self._end(session, SessionExpired)
            raise self._tombstones.why_gone(sid, now)

    def close(self, session: Session) -> None:
        """End a session; its memory is free when its running turn, if any, has stopped."""
        with self._lock:
            self._end(session, SessionClosed)

    def discard(self, session: Session) -> None:
        """Undo an opening that failed, so that no client knows the id."""
        with self._lock:
            if self._forget(session):
                self._stop(session, lost())

    def expire(self) -> None:
        """End every session whose time is over, and forget old tombstones."""
        now = self._wall()
        with self._lock:
            for session in self._expiries.remove_expired(now):
                self._end(session, SessionExpired)
            while self._idle_ttl_s and self._idle and self.expires_at((oldest := next(iter(self._idle))).id) <= now:
                self._end(oldest, SessionExpired)
            self._tombstones.forget_old(now)

    def lose(self, text: str, end: SessionLost) -> None:
        """End the session of this id, if it is open here; its next request looks for its journal again."""
        with self._lock:
            session = self._sessions.get(text)
            if session is not None:
                self._forget(session)
                self._stop(session, end)

    def _end(self, session: Session, error: type[SessionGone]) -> None:
        if self._forget(session):
            self._stop(session, self._tombstones.add(session.id, error, self._wall()))

    def _stop(self, session: Session, end: SessionGone) -> None:
        session.end = end
        logger.info("session ended session_id=%s reason=%s", session.id.text[:24], end.code)
        if session.turn is None:
            self._release(session)
            return
        self._ending.add(session)
        if not isinstance(end, SessionExpired):
            session.turn.stop(end)

    def _release(self, session: Session, *, keeps_features: bool = False) -> None:
        """Free the session's memory. keeps_features: until others need their memory, for a session that comes back."""
        session.cache.drop()
        for image in (*session.images, *session.pending_images):
            self.images.release(image, is_kept=keeps_features)
        session.images, session.pending_images = [], []

    def enqueue(self, session: Session, turn: QueuedTurn, *, may_wait: bool = True) -> bool:
        """Append a turn to the session's queue. Return True if it may begin now, False if it waits or may not.

        Raises Overloaded when too many wait, the session's end if it is over, SessionLost if it was evicted.
        """
        with self._lock:
            self._raise_if_gone(session)
            session.used_at = self._wall()
            self._idle.pop(session, None)
            if session.turn is None:
                session.turn = turn
                session.cache.pin()
                return True
            if may_wait and len(session.waiting) >= self.settings.max_waiting_turns:
                raise Overloaded(f"{len(session.waiting)} questions of this session wait already; wait for an answer")
            if may_wait:
                session.waiting.append(turn)
            return False

    def dequeue(self, session: Session, turn: QueuedTurn) -> QueuedTurn | None:
        """Remove a turn that is over or stops waiting. Return the turn that must begin now, if any."""
        with self._lock:
            if session.turn is not turn:
                if turn in session.waiting:
                    session.waiting.remove(turn)
                return None
            session.used_at = self._wall()
            session.turn = session.waiting.popleft() if session.waiting else None
            if session.turn is None:
                self._rest(session)
                self._note_use(session)
                if session.end is not None:
                    self._ending.discard(session)
                    self._release(session)
            return session.turn

    def _rest(self, session: Session) -> None:
        """Allow the eviction of the session's cache, unless it is pinned and pinned sessions are within their limit."""
        if session.is_pinned and not self._can_pin(session):
            session.is_pinned = False
            logger.warning("session unpinned, pinned ones have grown too large session_id=%s", session.id.text[:24])
        session.cache.unpin(is_kept=session.is_pinned)

    def _can_pin(self, session: Session) -> bool:
        pinned = {session, *(other for other in self._sessions.values() if other.is_pinned)}
        num_bytes = sum(each.cache.num_bytes for each in pinned)
        return num_bytes <= self.settings.max_pinned_fraction * self.pool.capacity_bytes

    def pin(self, session: Session) -> None:
        """Keep the session's blocks between its turns, until `unpin` or its end.

        Raises the session's end if it is over, SessionLost if it was evicted, OutOfMemory if pinned sessions would hold
        more than they may, InvalidRequest if the engine cannot pin.
        """
        with self._lock:
            self._raise_if_gone(session)
            if not self.pool.can_pin:
                raise InvalidRequest("this engine chooses by itself what it keeps, so sessions cannot be pinned")
            if not self._can_pin(session):
                raise OutOfMemory(
                    f"pinned sessions may hold {self.settings.max_pinned_fraction:.0%} of the KV cache; unpin one first"
                )
            session.is_pinned = True
            self._idle.pop(session, None)
            if session.turn is None:
                session.cache.pin()

    def unpin(self, session: Session) -> None:
        """Let the session's blocks be evicted between its turns."""
        with self._lock:
            session.is_pinned = False
            if session.turn is None and self._sessions.get(session.id.text) is session:
                session.cache.unpin()
            self._note_use(session)

    def add_images(self, session: Session, images: Sequence[Image]) -> None:
        """Add images for the session's next question. The session holds them from now on.

        Raises InvalidRequest if there are too many, the session's end if it is over; then the caller still holds them.
        """
        with self._lock:
            if session.end is not None:
                raise session.end
            num_images = len(session.images) + len(session.pending_images) + len(images)
            check_num_images(num_images, self.settings.max_images)
            session.used_at = self._wall()
            session.pending_images.extend(images)

    def drop_images(self, session: Session, images: Sequence[Image]) -> None:
        """Remove and release the images of a request that failed."""
        with self._lock:
            for image in images:
                if image in session.pending_images:
                    session.pending_images.remove(image)
                    self.images.release(image)

    def commit(self, session: Session, messages: list[dict[str, Any]], new_images: Sequence[Image]) -> None:
        """Replace the conversation after a turn, and move its images from the pending ones."""
        with self._lock:
            if session.end is not None and session.turn is None:
                return  # its memory is free
            session.messages = messages
            for image in new_images:
                session.pending_images.remove(image)
                session.images.append(image)

    def is_waiting(self, session: Session, turn: QueuedTurn) -> bool:
        with self._lock:
            return turn in session.waiting

    def check_integrity(self) -> None:
        """Raise RuntimeError unless pool and images hold what the sessions hold, and nothing else.

        A cache may be evicted unless a turn uses it or its session is pinned.
        """
        with self._lock:
            for session in self._sessions.values():
                if session.turn is None and not session.is_pinned and session.cache.is_pinned:
                    raise RuntimeError(f"a cache is pinned that no turn uses: {session!r}")
            busy = (each for each in self._idle if each.turn is not None or each.num_holds or each.is_pinned)
            if next(busy, None) is not None or not all(self._sessions.get(each.id.text) is each for each in self._idle):
                raise RuntimeError("a session may be evicted that is in use or not held")
            self._expiries.check_integrity(self._sessions.values())
            if any(session.turn is None for session in self._ending):
                raise RuntimeError("a session has ended and its last turn is over, but it is kept")
            sessions = [*self._sessions.values(), *self._ending]
            self.pool.check_integrity([session.cache for session in sessions])
            self.images.check_integrity(sum(len(s.images) + len(s.pending_images) for s in sessions))
