"""Which sessions are known without a journal: those that this worker holds, and its last openings and closes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from handlers.chat.sessions.known_sessions import opening_name
from handlers.chat.sessions.session import Session, owner_of
from handlers.chat.sessions.store import SessionStore
from handlers.errors import SessionLost
from handlers.journal.event import Event
from handlers.journal.journal import Listed, make_listed
from handlers.requests.incoming import Caller


class UnjournaledSessions:
    """Implements `KnownSessions` in this worker's memory, in which nothing outlives a session but its close."""

    used_bytes = 0
    num_sessions = 0

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._openings = RememberedOpenings(store.holds, store.settings.max_sessions)
        self._closes: OrderedDict[str, Event] = OrderedDict()  # the last ones, by session

    def check_room(self, caller: Caller) -> None:
        pass

    def is_known(self, session_id: str) -> bool:
        return False

    def read_events(self, session: Session) -> Sequence[Event]:
        return ()

    def write(self, session: Session, event: Event, encoded_images: Sequence[bytes]) -> None:
        pass

    def read_image(self, session: Session, digest: str) -> bytes:
        raise session.end or SessionLost()  # the session had the image until it ended

    def read_resource(self, session_id: str) -> dict[str, Any] | None:
        session = self._store.find(session_id)
        return None if session is None else session.resource

    def enlist(self, session: Session) -> None:
        pass

    def list_owned(self, caller: Caller) -> list[Listed]:
        owner = owner_of(caller)
        own = [session for session in self._store.snapshot() if session.label and session.owner == owner]
        return [make_listed(session.id.text, session.label) for session in own]

    def find(self, name: str) -> str | None:
        return None

    def claim_opening(self, caller: Caller, invocation_id: str, names: tuple[str, ...], session_id: str) -> str:
        if not invocation_id:
            return session_id
        return self._openings.claim(opening_name(caller, invocation_id, names), session_id)

    def try_undo(self, session_id: str) -> bool:
        return self._openings.try_undo(session_id)

    def discard(self, session_id: str) -> None:
        pass

    def try_close(self, session_id: str, session: Session | None, invocation_id: str) -> bool:
        event = Event(kind="close", invocation_id=invocation_id)
        first = self._closes.setdefault(session_id, event)
        while len(self._closes) > self._store.settings.max_tombstones:
            self._closes.popitem(last=False)
        return first.nonce == event.nonce

    def has_closed(self, session_id: str, invocation_id: str) -> bool:
        first = self._closes.get(session_id)
        return bool(invocation_id) and first == Event(kind="close", invocation_id=invocation_id)

    def sweep(self, expired_before: int, *, is_full: bool) -> None:
        pass


class RememberedOpenings:
    """Remembers the sessions of the last `max_remembered` openings: a retried one gets the session of the first.

    Any thread.

    is_open: whether the session of an id is open. It is called without the lock, because a thread that undoes an
    opening may hold the lock of the sessions.
    """

    def __init__(self, is_open: Callable[[str], bool], max_remembered: int) -> None:
        self._is_open = is_open
        self._max_remembered = max_remembered
        self._lock = threading.Lock()
        self._sessions: dict[str, str] = {}  # by the opening's name, oldest first
        self._shared: set[str] = set()  # sessions that were returned to a second request

    def claim(self, name: str, session_id: str) -> str:
        """Return the session of the first opening of this name while it is open, else `session_id`."""
        while True:
            first = self._sessions.get(name)
            is_open = first is not None and first != session_id and self._is_open(first)
            with self._lock:
                if self._sessions.get(name) != first:  # claimed or undone meanwhile
                    continue
                if first is not None and is_open:
                    self._shared.add(first)
                    return first
                self._forget(name)
                if len(self._sessions) >= self._max_remembered:
                    self._forget(next(iter(self._sessions)))
                self._sessions[name] = session_id
                return session_id

    def _forget(self, name: str) -> None:
        self._shared.discard(self._sessions.pop(name, ""))

    def try_undo(self, session_id: str) -> bool:
        """Forget an opening that is undone. Return False, and keep it, if another request also got its session."""
        with self._lock:
            if session_id in self._shared:
                return False
            for name in [name for name, own in self._sessions.items() if own == session_id]:
                self._forget(name)
            return True
