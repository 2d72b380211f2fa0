"""The sessions that this worker holds, and the device memory they cost.

The contract: `used_bytes` is the sum of the real tensor bytes of all sessions; `add_images`, `reserve` and the ends of
turns and sessions change it. A session with a turn is pinned and gives up nothing. Under pressure the least recently
used idle session loses its KV cache, which its next turn computes again from the image's features; a session itself
goes only by close or expiry. What cannot fit even so is refused.

All methods may be called from any thread; tensors of a session are touched only by its one running turn.
"""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from handlers.chat.session_id import SessionId, SessionIds
from handlers.engine.kv_cache import SequenceCache
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

if TYPE_CHECKING:
    from handlers.chat.turn import Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class SessionImage:
    """One picture of a conversation, on the device."""

    key: int  # negative: stands for the image in the cache's list of tokens
    digest: str  # of the encoded bytes, the image's name in the journal
    pixels: Tensor  # (1, channels, height, width)
    features: Tensor  # (image tokens, hidden size)

    @property
    def num_bytes(self) -> int:
        return self.pixels.nbytes + self.features.nbytes


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """A picture that has just come in, with the bytes that it came as."""

    image: SessionImage
    encoded: bytes


@dataclass(slots=True, eq=False)
class Session:
    """A conversation: its messages in order, its images, its cache, its turns."""

    id: SessionId
    cache: SequenceCache
    images: list[SessionImage] = field(default_factory=list)
    pending_images: list[SessionImage] = field(default_factory=list)  # belong to the next question
    messages: list[dict[str, Any]] = field(default_factory=list)
    turn: "Turn | None" = None  # the running one; it pins the session
    waiting: "deque[Turn]" = field(default_factory=deque)
    num_events: int = 0  # how much of its journal this session has seen
    replays: list[Event] = field(default_factory=list)  # the last requests that were done, to be known if they return
    recording: threading.RLock = field(default_factory=threading.RLock)  # held while session and journal change as one
    last_used: float = 0.0
    counted_bytes: int = 0  # this session's part of the store's used_bytes
    end: SessionGone | None = None  # why it is over, once it is

    def __repr__(self) -> str:
        state = "ended" if self.end else "pinned" if self.turn else "idle"
        return f"<Session {self.id.text[:24]} {state} {len(self.images)} images {self.cache!r}>"

    @property
    def num_bytes(self) -> int:
        """Bytes really held on the device."""
        images = [*self.images, *self.pending_images]
        return self.cache.num_bytes + sum(image.num_bytes for image in images)


@dataclass(frozen=True, slots=True)
class _Tombstone:
    error: type[SessionGone]
    forget_at: float  # until then the id is answered with `error`, afterwards it is unknown
    keep_until: float  # until the id itself has expired it must not look lost


class SessionStore:
    """wall: seconds since 1970, against which sessions expire; ids: tells real ids from forged ones."""

    def __init__(self, settings: SessionSettings, ids: SessionIds, wall: Callable[[], float]) -> None:
        self.settings = settings
        self.used_bytes = 0
        self.num_demoted = 0
        self.num_adopted = 0
        self._ids = ids
        self._wall = wall
        self._lock = threading.RLock()
        self._sessions: dict[str, Session] = {}
        self._ending: set[Session] = set()  # over, but their last turn still runs
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def session_ids(self) -> list[str]:
        with self._lock:
            return list(self._sessions)

    def turn_counts(self) -> dict[str, int]:
        """How many turns hold their session, and how many wait behind one."""
        with self._lock:
            sessions = [*self._sessions.values(), *self._ending]
            running = sum(session.turn is not None for session in sessions)
            return {"running": running, "waiting": sum(len(session.waiting) for session in sessions)}

    def open(self, cache: SequenceCache, ttl_s: float, endpoint: str, principal: str) -> Session:
        """A new session without images. Raises Overloaded if there are too many."""
        self.expire()
        now = self._wall()
        with self._lock:
            return self._add(Session(self._ids.mint(int(now + ttl_s), endpoint, principal), cache, last_used=now))

    def _add(self, session: Session) -> Session:
        if len(self._sessions) >= self.settings.max_sessions:
            raise Overloaded(
                f"{len(self._sessions)} sessions are open, the most this worker holds; close one or try again later"
            )
        self._sessions[session.id.text] = session
        return session

    def adopt(self, text: str, cache: SequenceCache, endpoint: str, principal: str) -> Session:
        """Hold a session that another worker opened, still without messages and images. Returns the one already held.

        Raises the SessionGone family, Overloaded.
        """
        with self._lock:
            try:
                return self.get(text, endpoint, principal)
            except SessionLost:
                sid = self._ids.verify(text, endpoint, principal)
                assert sid is not None
            session = self._add(Session(sid, cache, last_used=self._wall()))
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
                session.last_used = now
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
        session.images.clear()
        session.pending_images.clear()
        self._account(session)

    def enqueue(self, session: Session, turn: "Turn") -> bool:
        """Give the session to this turn; True if it may run now, False if it waits behind another.

        Raises Overloaded when too many wait, the session's end if it is over.
        """
        with self._lock:
            if session.end is not None:
                raise session.end
            if session.turn is None:
                session.turn = turn
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
            session.last_used = self._wall()
            try:
                session.cache.trim()
            except torch.OutOfMemoryError:  # no room for the smaller copy: the larger one stays, and stays counted
                logger.warning("cache not trimmed session_id=%s", session.id.text[:24])
            session.turn = session.waiting.popleft() if session.waiting else None
            if session.end is not None and session.turn is None:
                self._ending.discard(session)
                self._release(session)
            else:
                self._account(session)
            return session.turn

    def add_images(self, session: Session, images: Sequence[SessionImage]) -> None:
        """Images for the session's next question. Raises OutOfMemory, InvalidRequest if there are too many."""
        with self._lock:
            if session.end is not None:
                raise session.end
            num_images = len(session.images) + len(session.pending_images) + len(images)
            if num_images > self.settings.max_images:
                raise InvalidRequest(f"a session may have {self.settings.max_images} images, not {num_images}")
            self._make_room(sum(image.num_bytes for image in images))
            session.pending_images.extend(images)
            self._account(session)

    def drop_images(self, session: Session, images: Sequence[SessionImage]) -> None:
        """Take back images that came with a question that failed."""
        with self._lock:
            session.pending_images = [image for image in session.pending_images if image not in images]
            self._account(session)

    def commit(self, session: Session, messages: list[dict[str, Any]], images: list[SessionImage]) -> None:
        """A turn has finished: the conversation and its images are these now; images added meanwhile stay pending."""
        with self._lock:
            if session.end is not None and session.turn is None:
                return  # its memory is free already
            session.messages = messages
            session.images = images
            session.pending_images = [image for image in session.pending_images if image not in images]
            self._account(session)

    def is_waiting(self, session: Session, turn: "Turn") -> bool:
        with self._lock:
            return turn in session.waiting

    def reserve(self, session: Session, num_tokens: int) -> None:
        """Room in the session's cache for `num_tokens` positions in all. Raises OutOfMemory."""
        with self._lock:
            self._make_room(session.cache.shape.num_bytes(num_tokens) - session.cache.num_bytes)
            try:
                session.cache.reserve(num_tokens)
            except RuntimeError as exc:  # torch.OutOfMemoryError on a GPU, a plain one from the CPU's allocator
                raise OutOfMemory(f"the device has no room for {num_tokens} tokens; try again later") from exc
            self._account(session)

    def _account(self, session: Session) -> None:
        """Count what the session's tensors hold now."""
        held = session.num_bytes
        self.used_bytes += held - session.counted_bytes
        session.counted_bytes = held

    def _make_room(self, num_bytes: int) -> None:
        """Demote idle sessions until `num_bytes` more fit. Raises OutOfMemory, and demotes none, if they cannot."""
        missing = self.used_bytes + num_bytes - self.settings.budget_bytes
        if missing <= 0:
            return
        idle = [s for s in self._sessions.values() if s.turn is None and s.cache.capacity]
        if missing > sum(s.cache.num_bytes for s in idle):
            raise OutOfMemory(
                f"the session memory of {self.settings.budget_bytes} bytes has no room for {num_bytes} more; "
                "close sessions or try again later"
            )
        for session in sorted(idle, key=lambda s: s.last_used):
            if missing <= 0:
                return
            missing -= session.cache.num_bytes
            logger.info("session demoted session_id=%s bytes=%d", session.id.text[:24], session.cache.num_bytes)
            session.cache.drop()
            self.num_demoted += 1
            self._account(session)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the sessions' bytes add up to the counted total, within the budget."""
        with self._lock:
            held = sum(session.num_bytes for session in [*self._sessions.values(), *self._ending])
            if held != self.used_bytes:
                raise RuntimeError(f"the store counts {self.used_bytes} bytes but its sessions hold {held}")
            if held > self.settings.budget_bytes:
                raise RuntimeError(f"the sessions hold {held} bytes, more than the budget")


def _gone(error: type[SessionGone]) -> SessionGone:
    if error is SessionClosed:
        return SessionClosed("this session was closed; open a new one")
    return SessionExpired("this session has expired; open a new one")
