"""The turns of sessions: which one runs, which wait for it, and what is pinned.

While a turn runs, the session's KV cache is pinned. Between turns the cache may be evicted, and the features of its
images may be dropped (handlers/engine/contract.py, handlers/chat/images/store.py); then the next turn takes longer.
"""

import logging

from handlers.chat.queued_response import QueuedTurn
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.store import SessionStore
from handlers.errors import InvalidRequest, OutOfMemory, Overloaded

logger = logging.getLogger(__name__)


class TurnQueues:
    """Queues the turns of the store's sessions, and pins sessions. All methods may be called from any thread."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store

    def enqueue(self, session: Session, turn: QueuedTurn, *, may_wait: bool = True) -> bool:
        """Append a turn to the session's queue. Return True if it may begin now, False if it waits or may not.

        Raises Overloaded if too many turns wait, the session's error if it has ended, SessionLost if it was evicted.
        """
        with self._store.lock:
            self._store.raise_if_gone(session)
            session.used_at = self._store.wall()
            self._store.begin_use(session)
            if session.turn is None:
                session.turn = turn
                session.cache.pin()
                return True
            if may_wait and len(session.waiting) >= self._store.settings.max_waiting_turns:
                raise Overloaded(f"{len(session.waiting)} questions of this session are waiting; wait for an answer")
            if may_wait:
                session.waiting.append(turn)
            return False

    def dequeue(self, session: Session, turn: QueuedTurn) -> QueuedTurn | None:
        """Remove a turn that has ended or stops waiting. Return the turn that must begin now, if any."""
        with self._store.lock:
            if session.turn is not turn:
                if turn in session.waiting:
                    session.waiting.remove(turn)
                return None
            session.used_at = self._store.wall()
            session.turn = session.waiting.popleft() if session.waiting else None
            if session.turn is None:
                self._rest(session)
                self._store.note_use(session)
                self._store.free_if_ended(session)
            return session.turn

    def _rest(self, session: Session) -> None:
        """Allow the eviction of the session's cache, unless it is pinned and pinned sessions are within their limit."""
        if session.is_pinned and not self._can_pin(session):
            session.is_pinned = False
            logger.warning("session unpinned, pinned ones have grown too large session_id=%s", session.id.text[:24])
        session.cache.unpin(is_kept=session.is_pinned)

    def _can_pin(self, session: Session) -> bool:
        pinned = {session, *(other for other in self._store.snapshot() if other.is_pinned)}
        num_bytes = sum(each.cache.num_bytes for each in pinned)
        return num_bytes <= self._store.settings.max_pinned_fraction * self._store.pool.capacity_bytes

    def pin(self, session: Session) -> None:
        """Keep the session's blocks between its turns, until `unpin` or its end.

        Raises the session's error if it has ended, SessionLost if it was evicted, OutOfMemory if pinned sessions would
        exceed their limit, InvalidRequest if the engine cannot pin.
        """
        with self._store.lock:
            self._store.raise_if_gone(session)
            if not self._store.pool.can_pin:
                raise InvalidRequest("this engine decides by itself what it evicts, so sessions cannot be pinned")
            if not self._can_pin(session):
                limit = self._store.settings.max_pinned_fraction
                raise OutOfMemory(f"pinned sessions may hold {limit:.0%} of the KV cache; unpin one first")
            session.is_pinned = True
            self._store.begin_use(session)
            if session.turn is None:
                session.cache.pin()

    def unpin(self, session: Session) -> None:
        """Let the session's blocks be evicted between its turns."""
        with self._store.lock:
            session.is_pinned = False
            if session.turn is None and self._store.find(session.id.text) is session:
                session.cache.unpin()
            self._store.note_use(session)

    def is_waiting(self, session: Session, turn: QueuedTurn) -> bool:
        with self._store.lock:
            return turn in session.waiting
