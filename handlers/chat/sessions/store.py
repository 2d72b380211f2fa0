"""The sessions that this worker holds, with their queues of turns, their pins and their images.

While a turn runs, the session's KV cache is pinned. Between turns the cache may be evicted, and the features of its
images may be dropped (handlers/engine/contract.py, handlers/chat/images/store.py); then the next turn takes longer.

All methods may be called from any thread.
"""

import logging
from collections.abc import Sequence
from typing import Any

from handlers.chat.images.receiver import check_num_images
from handlers.chat.images.store import Image, ImageTier
from handlers.chat.queued_response import QueuedResponse, QueuedTurn
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.table import SessionTable
from handlers.errors import InvalidRequest, OutOfMemory, Overloaded

logger = logging.getLogger(__name__)


class SessionStore(SessionTable):
    """Queues turns, pins caches and holds images of the table's sessions."""

    def measure(self, session: Session) -> tuple[int, ImageTier]:
        """Return the bytes of the session's images and the slowest of their tiers."""
        with self._lock:
            return self.images.measure([*session.images, *session.pending_images])

    def count_waiting(self) -> int:
        """Count the turns that wait for an earlier turn of their session."""
        with self._lock:
            return sum(len(session.waiting) for session in [*self._sessions.values(), *self._ending])

    def enqueue(self, session: Session, turn: QueuedTurn, *, may_wait: bool = True) -> bool:
        """Append a turn to the session's queue. Return True if it may begin now, False if it waits or may not.

        Raises Overloaded if too many turns wait, the session's error if it has ended, SessionLost if it was evicted.
        """
        with self._lock:
            self._raise_if_gone(session)
            session.used_at = self._wall()
            self._idle.remove(session)
            if session.turn is None:
                session.turn = turn
                session.cache.pin()
                return True
            if may_wait and len(session.waiting) >= self.settings.max_waiting_turns:
                raise Overloaded(f"{len(session.waiting)} questions of this session are waiting; wait for an answer")
            if may_wait:
                session.waiting.append(turn)
            return False

    def dequeue(self, session: Session, turn: QueuedTurn) -> QueuedTurn | None:
        """Remove a turn that has ended or stops waiting. Return the turn that must begin now, if any."""
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

        Raises the session's error if it has ended, SessionLost if it was evicted, OutOfMemory if pinned sessions would
        exceed their limit, InvalidRequest if the engine cannot pin.
        """
        with self._lock:
            self._raise_if_gone(session)
            if not self.pool.can_pin:
                raise InvalidRequest("this engine decides by itself what it evicts, so sessions cannot be pinned")
            if not self._can_pin(session):
                raise OutOfMemory(
                    f"pinned sessions may hold {self.settings.max_pinned_fraction:.0%} of the KV cache; unpin one first"
                )
            session.is_pinned = True
            self._idle.remove(session)
            if session.turn is None:
                session.cache.pin()

    def unpin(self, session: Session) -> None:
        """Let the session's blocks be evicted between its turns."""
        with self._lock:
            session.is_pinned = False
            if session.turn is None and self._sessions.get(session.id.text) is session:
                session.cache.unpin()
            self._note_use(session)

    def add_images(self, session: Session, images: Sequence[Image], *, are_recorded: bool = False) -> None:
        """Add images for the session's next question. The session holds them from now on.

        are_recorded: another worker recorded them; images that came with the running turn then do not count.

        Raises InvalidRequest if there are too many, the session's error if it has ended; then the caller still holds
        them.
        """
        with self._lock:
            if session.end is not None:
                raise session.end
            num_images = session.num_images + len(images)
            num_images -= len(session.unrecorded) if are_recorded else 0
            check_num_images(num_images, self.settings.max_images)
            session.used_at = self._wall()
            session.pending_images.extend(images)

    def check_images(self, session: Session) -> None:
        """Raise InvalidRequest if the session has too many images, because other workers have added some, too."""
        with self._lock:
            num_images = session.num_images
        check_num_images(num_images, self.settings.max_images)

    def recorded_images_for(self, session: Session, queued: QueuedResponse | None) -> list[Image]:
        """Return `Session.images_for`, without images that the journal does not have. Hold `session.recording`."""
        with self._lock:
            images = session.images_for(queued)
            for image in session.unrecorded:
                images.remove(image)
            return images

    def drop_unrecorded(self, session: Session) -> None:
        """Remove and release the images that came with the running turn."""
        with self._lock:
            self.drop_images(session, session.unrecorded)
            session.unrecorded = []

    def drop_repeated(self, session: Session) -> None:
        """Remove and release pending images that equal those that came with the turn just committed.

        The journal does not say which images came with a turn. So other workers count an image that was added during
        the turn as the turn's own.
        """
        with self._lock:
            pending = session.images_for(None)
            for image in session.unrecorded:
                if image in pending:
                    pending.remove(image)
                    self.drop_images(session, [image])

    def drop_images(self, session: Session, images: Sequence[Image]) -> None:
        """Remove and release the images of a request that failed."""
        with self._lock:
            for image in images:
                if image in session.pending_images:
                    # An equal one may wait before this one; all workers have them in the same order.
                    places = [place for place, each in enumerate(session.pending_images) if each is image]
                    del session.pending_images[places[0] if places else session.pending_images.index(image)]
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
        """Raise RuntimeError unless the pool and the image store hold exactly the sessions' caches and images."""
        with self._lock:
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
