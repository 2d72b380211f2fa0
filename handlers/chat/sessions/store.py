"""The sessions that this worker holds: their order of turns, their ends, and what each may take.

The contract: a session ends by close or expiry and by nothing else. While a turn has it, its KV cache is pinned;
between turns the cache may be evicted (see handlers/engine/kv_cache.py) and its images' features may be dropped (see
handlers/chat/pictures/store.py), which costs its next turn time and nothing else. When a session has ended and
its last turn is over, it holds nothing any more.

All methods may be called from any thread.
"""

import json
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from handlers.chat.pictures.store import Image, ImageStore, Tier
from handlers.chat.sessions.session_id import SessionIds
from handlers.engine.kv_cache import BlockPool, SequenceCache
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
from handlers.journal.event import Event
from handlers.settings import SessionSettings
from torchmoor.wire.session_hash import session_hash
from torchmoor.wire.session_ids import SessionId

if TYPE_CHECKING:
    from handlers.chat.turns.turn import Turn

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Session:
    """A conversation: its messages in order, its images, its cache, its turns.

    scope: with which other conversations it may share images and KV blocks. opened_at, used_at: here, in seconds since
    1970.
    """

    id: SessionId
    scope: str
    cache: SequenceCache
    opened_at: float
    used_at: float
    images: list[Image] = field(default_factory=list)
    pending_images: list[Image] = field(default_factory=list)  # belong to the next question
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_dropped: int = 0  # turns that are not among them any more, since the model cannot read so much
    turn: "Turn | None" = None  # the running one; it pins the session
    waiting: "deque[Turn]" = field(default_factory=deque)
    num_events: int = 0  # how much of its journal this session has seen
    replays: list[Event] = field(default_factory=list)  # the last requests that were done, to be known if they return
    recording: threading.RLock = field(default_factory=threading.RLock)  # held while session and journal change as one
    end: SessionGone | None = None  # why it is over, once it is
    is_pinned: bool = False  # an operator wants its blocks kept between turns
    hash: str = field(init=False)  # names it to operators, as in the proxy's access log: the id is a credential

    def __post_init__(self) -> None:
        self.hash = session_hash(self.id.text)

    def __repr__(self) -> str:
        state = "ended" if self.end else "pinned" if self.turn else "idle"
        return f"<Session {self.id.text[:24]} {state} {len(self.images)} images {self.cache!r}>"


@dataclass(frozen=True, slots=True)
class _Tombstone:
    error: type[SessionGone]
    forget_at: float  # until then the id is answered with `error`, afterwards it is unknown
    keep_until: float  # until the id itself has expired it must not look lost


class SessionStore:
    """wall: seconds since 1970, against which sessions expire; ids: tells real ids from forged ones."""

    def __init__(
        self,
        settings: SessionSettings,
        ids: SessionIds,
        pool: BlockPool,
        images: ImageStore,
        wall: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.num_adopted = 0
        self._pool = pool
        self._images = images
        self._ids = ids
        self._wall = wall
        self._lock = threading.RLock()
        self._sessions: dict[str, Session] = {}
        self._ending: set[Session] = set()  # over, but their last turn still runs
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def holds(self, text: str) -> bool:
        """True if the session of this id is open here."""
        with self._lock:
            session = self._sessions.get(text)
            return session is not None and session.id.expires_at > self._wall()

    def session_ids(self) -> list[str]:
        with self._lock:
            return list(self._sessions)

    def snapshot(self) -> list[Session]:
        """The sessions that are open at this moment."""
        with self._lock:
            return list(self._sessions.values())

    def find_by_hash(self, name: str) -> Session | None:
        """The one open session of this hash; None also if two should share it, since nobody can say which is meant."""
        found = [session for session in self.snapshot() if session.hash == name]
        return found[0] if len(found) == 1 else None

    def measure(self, session: Session) -> tuple[int, Tier]:
        """Bytes that the session's pictures take, and the tier of the one that is farthest; nothing once it is over."""
        with self._lock:
            return self._images.measure([*session.images, *session.pending_images])

    def turn_counts(self) -> dict[str, int]:
        """How many turns hold their session, and how many wait behind one."""
        with self._lock:
            sessions = [*self._sessions.values(), *self._ending]
            running = sum(session.turn is not None for session in sessions)
            return {"running": running, "waiting": sum(len(session.waiting) for session in sessions)}

    def open(self, ttl_s: float, endpoint: str, principal: str) -> Session:
        """A new session without images. Raises Overloaded if there are too many."""
        self.expire()
        with self._lock:
            return self._add(self._ids.mint(int(self._wall() + ttl_s), endpoint, principal), endpoint, principal)

    def _add(self, sid: SessionId, endpoint: str, principal: str) -> Session:
        if len(self._sessions) >= self.settings.max_sessions:
            raise Overloaded(
                f"{len(self._sessions)} sessions are open, the most this worker holds; close one or try again later"
            )
        scope = sharing_scope(endpoint, principal)
        now = self._wall()
        session = Session(sid, scope, SequenceCache(self._pool, scope), opened_at=now, used_at=now)
        self._sessions[sid.text] = session
        return session

    def adopt(self, text: str, endpoint: str, principal: str) -> Session:
        """Hold a session that another worker opened, still without messages and images. Returns the one already held.

        Raises the SessionGone family, Overloaded.
        """
        with self._lock:
            try:
                return self.get(text, endpoint, principal)
            except SessionLost:
                sid = self._ids.verify(text, endpoint, principal)
                assert sid is not None
            session = self._add(sid, endpoint, principal)
            self.num_adopted += 1
            return session

    def get(self, text: str, endpoint: str, principal: str) -> Session:
        """The open session of this id. Raises the SessionGone family, each case with its own message."""
        with self._lock:
            sid = self._ids.verify(text, endpoint, principal)
            if sid is None:
                raise SessionUnknown("no session of this id is known here; open one with a start_session request")
            now = self._wall()
            session = self._sessions.get(text)
            if session is not None and sid.expires_at > now:
                return session
            if session is not None:
                self._end(session, SessionExpired)
            raise self._why_gone(sid, now)

    def _why_gone(self, sid: SessionId, now: float) -> SessionGone:
        tombstone = self._tombstones.get(sid.text)
        if tombstone is not None and tombstone.forget_at > now:
            return _gone(tombstone.error)
        if tombstone is None and sid.expires_at > now:
            return SessionLost(
                "this session's memory is gone, because its worker was restarted or replaced; open a new one"
            )
        if tombstone is None and sid.expires_at + self.settings.tombstone_s > now:
            return _gone(SessionExpired)
        return SessionUnknown("no session of this id is known any more; open one with a start_session request")

    def close(self, session: Session) -> None:
        """End a session at its client's wish; its memory is free when its running turn, if any, has stopped."""
        with self._lock:
            self._end(session, SessionClosed)

    def discard(self, session: Session) -> None:
        """Undo an opening that failed: the id was never told to anyone."""
        with self._lock:
            self._sessions.pop(session.id.text, None)
            self._release(session)

    def expire(self) -> None:
        """End every session whose time is over; forget old tombstones."""
        now = self._wall()
        with self._lock:
            for session in [s for s in self._sessions.values() if s.id.expires_at <= now]:
                self._end(session, SessionExpired)
            while self._tombstones:
                text, oldest = next(iter(self._tombstones.items()))
                if oldest.keep_until > now and len(self._tombstones) <= self.settings.max_tombstones:
                    break
                del self._tombstones[text]

    def _end(self, session: Session, error: type[SessionGone]) -> None:
        if self._sessions.pop(session.id.text, None) is None:
            return
        session.end = _gone(error)
        forget_at = self._wall() + self.settings.tombstone_s
        keep_until = max(forget_at, session.id.expires_at + self.settings.tombstone_s)
        self._tombstones[session.id.text] = _Tombstone(error, forget_at, keep_until)
        logger.info("session ended session_id=%s reason=%s", session.id.text[:24], error.__name__)
        if session.turn is None:
            self._release(session)
            return
        self._ending.add(session)
        if error is SessionClosed:
            session.turn.stop(session.end)

    def _release(self, session: Session) -> None:
        session.cache.drop()
        for image in (*session.images, *session.pending_images):
            self._images.release(image)
        session.images, session.pending_images = [], []

    def enqueue(self, session: Session, turn: "Turn") -> bool:
        """Give the session to this turn; True if it may run now, False if it waits behind another.

        Raises Overloaded when too many wait, the session's end if it is over.
        """
        with self._lock:
            if session.end is not None:
                raise session.end
            session.used_at = self._wall()
            if session.turn is None:
                session.turn = turn
                self._pool.pin(session.cache)
                return True
            if len(session.waiting) >= self.settings.max_waiting_turns:
                raise Overloaded(f"{len(session.waiting)} questions of this session wait already; wait for an answer")
            session.waiting.append(turn)
            return False

    def dequeue(self, session: Session, turn: "Turn") -> "Turn | None":
        """This turn is over or gives up waiting. Returns the turn whose time has come, if any."""
        with self._lock:
            if session.turn is not turn:
                if turn in session.waiting:
                    session.waiting.remove(turn)
                return None
            session.used_at = self._wall()
            session.turn = session.waiting.popleft() if session.waiting else None
            if session.turn is None:
                self._rest(session)
                if session.end is not None:
                    self._ending.discard(session)
                    self._release(session)
            return session.turn

    def _rest(self, session: Session) -> None:
        """The session's last turn is over: its cache may be evicted, unless it is pinned and there is room for that."""
        if session.is_pinned and not self._can_pin(session):
            session.is_pinned = False
            logger.warning("session unpinned, pinned ones have grown too large session_id=%s", session.id.text[:24])
        with self._pool.lock:
            self._pool.unpin(session.cache)
            if session.is_pinned:
                self._pool.pin(session.cache)

    def _can_pin(self, session: Session) -> bool:
        pinned = {session, *(other for other in self._sessions.values() if other.is_pinned)}
        num_bytes = sum(each.cache.num_bytes for each in pinned)
        return num_bytes <= self.settings.max_pinned_fraction * self._pool.capacity_bytes

    def pin(self, session: Session) -> None:
        """Keep the session's blocks between its turns, until `unpin` or its end.

        Raises the session's end if it is over, OutOfMemory if pinned sessions would hold more than they may.
        """
        with self._lock:
            if session.end is not None:
                raise session.end
            if not self._can_pin(session):
                raise OutOfMemory(
                    f"pinned sessions may hold {self.settings.max_pinned_fraction:.0%} of the KV cache; unpin one first"
                )
            session.is_pinned = True
            if session.turn is None:
                self._pool.pin(session.cache)

    def unpin(self, session: Session) -> None:
        """The session's blocks may go between its turns, like any other's."""
        with self._lock:
            session.is_pinned = False
            if session.turn is None and session.end is None:
                self._pool.unpin(session.cache)

    def add_images(self, session: Session, images: Sequence[Image]) -> None:
        """Images for the session's next question, which the session holds from now on.

        Raises InvalidRequest if there are too many, the session's end if it is over; then the caller still holds them.
        """
        with self._lock:
            if session.end is not None:
                raise session.end
            num_images = len(session.images) + len(session.pending_images) + len(images)
            if num_images > self.settings.max_images:
                raise InvalidRequest(f"a session may have {self.settings.max_images} images, not {num_images}")
            session.used_at = self._wall()
            session.pending_images.extend(images)

    def drop_images(self, session: Session, images: Sequence[Image]) -> None:
        """Take back images that came with a request that failed."""
        with self._lock:
            for image in images:
                if image in session.pending_images:
                    session.pending_images.remove(image)
                    self._images.release(image)

    def commit(self, session: Session, messages: list[dict[str, Any]], new_images: Sequence[Image]) -> None:
        """A turn has finished: the conversation is this now, and these of the pending images belong to it."""
        with self._lock:
            if session.end is not None and session.turn is None:
                return  # its memory is free already
            session.messages = messages
            for image in new_images:
                session.pending_images.remove(image)
                session.images.append(image)

    def is_waiting(self, session: Session, turn: "Turn") -> bool:
        with self._lock:
            return turn in session.waiting

    def check_integrity(self) -> None:
        """Raise RuntimeError unless pool and images hold what the sessions hold, and nothing else."""
        with self._lock:
            sessions = [*self._sessions.values(), *self._ending]
            self._pool.check_integrity([session.cache for session in sessions])
            self._images.check_integrity(sum(len(s.images) + len(s.pending_images) for s in sessions))


def sharing_scope(endpoint: str, principal: str) -> str:
    """Conversations share images and KV blocks only with those of the same caller at the same endpoint."""
    return json.dumps([endpoint, principal])  # so that no name can pass for a part of another


def _gone(error: type[SessionGone]) -> SessionGone:
    if error is SessionClosed:
        return SessionClosed("this session was closed; open a new one")
    return SessionExpired("this session has expired; open a new one")
