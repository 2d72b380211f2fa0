"""Which sessions are known with a journal: those of all workers that share it."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from handlers.chat.sessions.entries import fields_of
from handlers.chat.sessions.journal_failures import JournalFailures
from handlers.chat.sessions.known_sessions import opening_name
from handlers.chat.sessions.session import Session, owner_of
from handlers.chat.sessions.store import SessionStore
from handlers.errors import CallerBudgetReached, JournalUnavailable, Overloaded, SessionClosed, SessionLost
from handlers.journal.event import Event
from handlers.journal.journal import Journal, JournalFull, Listed, OwnerFull, expiry, is_session_id
from handlers.requests.incoming import Caller
from handlers.worker.counters import Counters
from torchmoor.wire.last_kept import LastKept
from torchmoor.wire.session_ids import session_hash

FULL_RETRY_S = 60  # if the next session's expiry is not known
FIND_TIMEOUT_S = 20.0  # the admin plane waits 30 s for an action
KEPT, DISCARDED = "kept", "discarded"  # the outcome of a session whose opening was sent twice; the first claim counts
MAX_CLAIMS = 5  # that one opening reads; no retry mode of boto3 sends a request more often


class JournaledSessions:
    """Implements `KnownSessions` on a journal."""

    def __init__(self, journal: Journal, store: SessionStore, failures: JournalFailures, counters: Counters) -> None:
        self._journal = journal
        self._store = store
        self._translated = failures.translated
        self._counters = counters
        self._lock = threading.Lock()
        self._kept: LastKept[str, None] = LastKept(store.settings.max_sessions)  # for retries that came to this worker
        self._undone: LastKept[str, None] = LastKept(store.settings.max_sessions)

    @property
    def used_bytes(self) -> int:
        return self._journal.used_bytes

    @property
    def num_sessions(self) -> int:
        return self._journal.num_sessions

    def check_room(self, caller: Caller) -> None:
        try:
            with self._translated(session_id=""):
                self._journal.check_room(owner_of(caller))
        except JournalFull as exc:
            self._counters.add("journal_refusals")
            wait_s = FULL_RETRY_S if exc.room_at is None else self._store.seconds_until(exc.room_at)
            kind = CallerBudgetReached if isinstance(exc, OwnerFull) else Overloaded
            error = kind(f"{exc}; close sessions or try again in {wait_s} s")
            error.retry_after_s = wait_s
            raise error from exc

    def is_known(self, session_id: str) -> bool:
        """Also raise SessionLost for an opening that this worker has undone, whose journal may not be deleted yet."""
        if session_id in self._undone and self._is_discarded(session_id):
            raise SessionLost()
        return self._is_recorded(session_id)

    def _is_recorded(self, session_id: str) -> bool:
        """Return whether the journal has the session. Raises SessionClosed, SessionLost."""
        first = self._read_first(session_id)
        if first is not None and first.kind == "close":
            raise SessionClosed()
        return first is not None

    def _read_first(self, session_id: str) -> Event | None:
        """Read the session's opening, or its "close" if it is closed."""
        with self._translated(session_id):
            return next(iter(self._journal.read(session_id, max_events=1)), None)

    def read_events(self, session: Session) -> Sequence[Event]:
        with self._translated(session.id.text), _lost_if_undone(session):
            return self._journal.read(session.id.text, session.num_events)

    def write(self, session: Session, event: Event, encoded_images: Sequence[bytes]) -> None:
        with self._translated(session.id.text), _lost_if_undone(session):
            for data in encoded_images:
                self._journal.put_image(session.id.text, data, session.owner)
            self._journal.append(session.id.text, session.num_events, event, session.owner)

    def read_image(self, session: Session, digest: str) -> bytes:
        with self._translated(session.id.text), _lost_if_undone(session):
            try:
                return self._journal.get_image(session.id.text, digest)
            except FileNotFoundError:
                if self.is_known(session.id.text):  # raises SessionClosed if another worker has closed it meanwhile
                    raise
                raise SessionLost() from None

    def read_resource(self, session_id: str) -> dict[str, Any] | None:
        first = self._read_first(session_id)
        return None if first is None or first.kind != "open" else fields_of(first.response)

    def enlist(self, session: Session) -> None:
        with self._translated(session.id.text):
            self._journal.enlist(session.id.text, session.label, session.owner)

    def list_owned(self, caller: Caller) -> list[Listed]:
        with self._translated(session_id=""):
            return self._journal.list_owned(owner_of(caller))

    def find(self, name: str) -> str | None:
        """Search the journal. Raises JournalUnavailable also if that takes longer than FIND_TIMEOUT_S."""
        stop_at, cursor = time.monotonic() + FIND_TIMEOUT_S, ""
        while True:
            with self._translated(session_id=""):
                ids, cursor = self._journal.list_ids(cursor)
            found = next((text for text in ids if session_hash(text) == name), None)
            if found is not None or not cursor:
                return found
            if time.monotonic() > stop_at:
                raise JournalUnavailable("the journal has too many sessions to find one by its hash in time")

    def claim_opening(self, caller: Caller, invocation_id: str, names: tuple[str, ...], session_id: str) -> str:
        """Claim the opening in the journal. Claims last: after an ended session, the next one's name has its id, too.

        After MAX_CLAIMS ended sessions, the opening is not claimed, and a retry opens another session.
        """
        if not invocation_id:
            return session_id
        with self._translated(session_id):
            for _ in range(MAX_CLAIMS):
                first = self._journal.claim(opening_name(caller, invocation_id, names), session_id)
                if first == session_id or self._try_keep(first):
                    return first
                names = (*names, first)
        return session_id

    def _try_keep(self, session_id: str) -> bool:
        """Keep a session for a retry of its opening.

        Return False if it has ended, its client left before the answer, or the id is of a damaged claim.
        """
        if not is_session_id(session_id) or expiry(session_id) <= self._store.wall():
            return False
        is_kept = False
        with suppress(SessionClosed, SessionLost):
            is_kept = self._is_recorded(session_id) and self._journal.claim(_fate_name(session_id), KEPT) == KEPT
        if is_kept:
            with self._lock:
                self._kept.keep(session_id, None)
        return is_kept

    def try_undo(self, session_id: str) -> bool:
        """Look at this worker's retries only; `discard` finds out whether another worker has answered one."""
        with self._lock:
            if session_id in self._kept:
                return False
            self._undone.keep(session_id, None)
            return True

    def discard(self, session_id: str) -> None:
        if self._is_discarded(session_id):
            with self._translated(session_id):
                self._journal.delete(session_id)

    def _is_discarded(self, session_id: str) -> bool:
        with self._translated(session_id):
            return self._journal.claim(_fate_name(session_id), DISCARDED) == DISCARDED

    def try_close(self, session_id: str, session: Session | None, invocation_id: str) -> bool:
        event = Event(kind="close", invocation_id=invocation_id)
        with self._translated(session_id):
            first = self._journal.close(session_id, event)
            if session is not None and session.label:
                self._journal.delist(session_id, session.label, session.owner)
        return first.nonce == event.nonce

    def has_closed(self, session_id: str, invocation_id: str) -> bool:
        first = self._read_first(session_id)
        return bool(invocation_id) and first == Event(kind="close", invocation_id=invocation_id)

    def sweep(self, expired_before: int, *, is_full: bool) -> None:
        self._journal.sweep(expired_before, is_full=is_full)


@contextmanager
def _lost_if_undone(session: Session) -> Iterator[None]:
    """Raise SessionLost if the session's opening is undone before or during an operation on its journal.

    The journal is deleted then, so an OSError of the operation is not a failure.
    """
    try:
        if isinstance(session.end, SessionLost):
            raise session.end
        yield
    except OSError:
        if isinstance(session.end, SessionLost):
            raise session.end from None
        raise


def _fate_name(session_id: str) -> str:
    """Return the name of the claim that decides between KEPT and DISCARDED."""
    return json.dumps(["fate", session_id])
