"""Records of sessions: events are written to the journal before they are acknowledged, and read from it.

Without a journal, only openings and closes are remembered. A session that this worker does not hold is adopted empty,
and its next turn reads the missing events, as for any session that another worker has served meanwhile. All methods
block on the journal: call them on worker threads only, never on the engine's or TorchServe's.
"""

import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

from handlers.chat.images.store import Image, ImageStore
from handlers.chat.sessions.entries import entries_of, fields_of, find_queued, messages_added, remember_entry
from handlers.chat.sessions.remembered_openings import RememberedOpenings
from handlers.chat.sessions.session import Session, owner_of
from handlers.chat.sessions.store import SessionStore
from handlers.errors import (
    BadImage,
    CallerBudgetReached,
    ContextTooLong,
    HandlerError,
    InvalidRequest,
    JournalUnavailable,
    Overloaded,
    SessionClosed,
    SessionLost,
    TurnConflict,
)
from handlers.journal.event import DamagedRecord, Event, EventTooLarge
from handlers.journal.failures import explain_failure
from handlers.journal.journal import EventTaken, Journal, JournalClosed, JournalFull, Listed, OwnerFull, make_listed
from handlers.requests.incoming import Caller
from handlers.worker.counters import Counters
from torchmoor.wire.session_hash import session_hash

logger = logging.getLogger(__name__)
CONFLICT = "another instance has answered in this session meanwhile; ask again"
FULL_RETRY_S = 60  # if the next session's expiry is not known
FIND_TIMEOUT_S = 20.0  # the admin plane waits 30 s for an action
KEPT, DISCARDED = "kept", "discarded"  # the outcome of a session whose opening was sent twice; the first claim counts


class SessionRecorder:
    """Keeps sessions and their journals in step.

    A session whose journal is damaged is lost: it ends in this worker's memory, and its requests get SessionLost.
    max_replays: requests of a session that are remembered, so that a retry is not executed again.
    """

    def __init__(
        self, journal: Journal | None, store: SessionStore, images: ImageStore, max_replays: int, counters: Counters
    ) -> None:
        self._journal = journal
        self._store = store
        self._images = images
        self._max_replays = max_replays
        self._counters = counters
        self._closes: OrderedDict[str, Event] = OrderedDict()  # without a journal: the last closes, by session
        self.openings = RememberedOpenings(store.holds, store.settings.max_sessions)

    @property
    def journal_bytes(self) -> int:
        """The bytes in the journal, as last measured."""
        return 0 if self._journal is None else self._journal.used_bytes

    @property
    def journal_sessions(self) -> int:
        """The open sessions in the journal, as last measured."""
        return 0 if self._journal is None else self._journal.num_sessions

    def check_room(self, caller: Caller) -> None:
        """Raise Overloaded or CallerBudgetReached if the journal has no room for another session of this caller.

        Raises JournalUnavailable.
        """
        if self._journal is None:
            return
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
        """Return True if the session has a journal. Raises SessionClosed, SessionLost, JournalUnavailable."""
        if self._journal is None:
            return False
        if (first := self._read_first(session_id)) is not None and first.kind == "close":
            raise SessionClosed()
        return first is not None

    def _read_first(self, session_id: str) -> Event | None:
        """Read the session's opening, or its "close" if it is closed."""
        assert self._journal is not None
        with self._translated(session_id):
            return next(iter(self._journal.read(session_id, max_events=1)), None)

    def must_rebuild(self, session: Session) -> bool:
        """Return True if `catch_up` would read the whole session, because this worker has none of its events."""
        return self._journal is not None and session.num_events == 0

    def catch_up(self, session: Session) -> int:
        """Apply the events that other workers recorded; return their number.

        Raises SessionClosed, SessionLost, JournalUnavailable, OutOfMemory.
        """
        if self._journal is None:
            return 0
        with session.recording:
            with self._translated(session.id.text):
                events = self._journal.read(session.id.text, session.num_events)
            for event in events:
                try:
                    self._apply(session, event)
                    self._remember(session, event)
                except (BadImage, InvalidRequest) as exc:  # workers record neither
                    raise self._lose(session.id.text, exc) from exc
                session.num_events += 1
        return len(events)

    def _apply(self, session: Session, event: Event) -> None:
        if event.kind == "close":
            self._store.close(session)
            raise SessionClosed()
        if (event.kind == "open") != (session.num_events == 0):
            raise self._lose(session.id.text, "the opening is not the first event")
        if event.kind != "turn":
            self._take_in(session, event.images)
            return
        self._apply_turn(session, event)

    def _apply_turn(self, session: Session, event: Event) -> None:
        queued = find_queued(session, event) if event.entry else None
        pending = self._store.recorded_images_for(session, queued)
        used: list[Image] = []
        for name in event.images:
            image = next((image for image in pending if image.digest == name), None)
            if image is None:
                (image,) = self._take_in(session, [name])
            else:
                pending.remove(image)
            used.append(image)
        self._store.commit(session, [*session.messages, *messages_added(event)], used)

    def _take_in(self, session: Session, names: Sequence[str]) -> list[Image]:
        """Load images that another worker recorded, for the session's next question."""
        images: list[Image] = []
        try:
            for name in names:
                images.append(self._images.take_in(session.scope, self.fetch(session, name), is_recorded=True))
            self._store.add_images(session, images, are_recorded=True)
        except BaseException:
            for image in images:
                self._images.release(image)
            raise
        return images

    def copy(self, source: Session, num_entries: int, target: Session) -> None:
        """Record a session's first entries in a new session, which shares the images and KV blocks of the source.

        Hold both sessions. Raises InvalidRequest, Overloaded, SessionLost, JournalUnavailable.
        """
        with source.recording:
            entries, images = entries_of(source, num_entries), iter(list(source.images))
        self._store.check_chars(sum(event.num_chars for event in entries))
        for event in entries:
            own = list(islice(images, len(event.images)))
            encoded = [] if self._journal is None else [self.fetch(source, image.digest) for image in own]
            with target.recording:
                copied = replace(event, invocation_id="", entry="", nonce=secrets.token_hex(8))
                self._write(target, copied, encoded)
                self._share(target, own)
                self._apply_turn(target, copied)
                self._remember(target, copied)

    def _share(self, session: Session, images: Sequence[Image]) -> None:
        """Add images to a session. They belong to another session, which holds them."""
        for image in images:
            self._images.share(image)
        try:
            self._store.add_images(session, images)
        except HandlerError:
            for image in images:
                self._images.release(image)
            raise

    def read_image(self, session: Session, image: Image) -> bytes:
        """Return the bytes of one of the session's images. Raises SessionLost, JournalUnavailable."""
        return self._images.find_encoded(image) or self.fetch(session, image.digest)

    def add(self, session: Session, event: Event, encoded: Sequence[bytes]) -> None:
        """Record a turn without a generated answer, whose images the session already holds. Raises as `record` does."""
        with session.recording:
            self.record(session, event, encoded)
            self._apply_turn(session, event)

    def fetch(self, session: Session, digest: str) -> bytes:
        """Read the encoded bytes of one of its images. Raises the SessionGone family, JournalUnavailable."""
        if self._journal is None:  # the session had the image until it ended
            raise session.end or SessionLost()
        with self._translated(session.id.text):
            try:
                return self._journal.get_image(session.id.text, digest)
            except FileNotFoundError:
                self.is_known(session.id.text)  # raises SessionClosed if another worker has closed it meanwhile
                raise

    def record(self, session: Session, event: Event, encoded_images: Sequence[bytes] = ()) -> None:
        """Write the images of an event, then the event.

        Hold `session.recording` over this call and the change that the event records. Raises TurnConflict if another
        worker wrote first, SessionClosed, SessionLost, InvalidRequest if the event is too large, JournalUnavailable.
        """
        with session.recording:
            if event.kind == "queue" or (event.kind in ("turn", "update") and not event.answer):
                self.check_history(session, event.num_chars)
            self._write(session, event, encoded_images)
            self._remember(session, event)
            if event.kind == "open" and session.label and self._journal is not None:
                with self._translated(session.id.text):
                    self._journal.enlist(session.id.text, session.label, session.owner)

    def list_owned(self, caller: Caller) -> list[Listed]:
        """Return the caller's listed sessions: from the journal; without a journal, from this worker.

        Some may have ended. Raises JournalUnavailable.
        """
        owner = owner_of(caller)
        if self._journal is None:
            own = [session for session in self._store.snapshot() if session.label and session.owner == owner]
            return [make_listed(session.id.text, session.label) for session in own]
        with self._translated(session_id=""):
            return self._journal.list_owned(owner)

    def read_resource(self, session_id: str) -> dict[str, Any] | None:
        """Return the fields that an open session was opened with; None if it has ended. Raises JournalUnavailable."""
        if self._journal is None:
            session = self._store.find(session_id)
            return None if session is None else session.resource
        first = self._read_first(session_id)
        return None if first is None or first.kind != "open" else fields_of(first.response)

    def check_history(self, session: Session, num_chars: int) -> None:
        """Raise ContextTooLong if the session's texts would exceed their limit, Overloaded if all sessions' would."""
        limit = self._store.settings.max_history_chars
        if session.num_chars + num_chars > limit:
            raise ContextTooLong(
                f"the session's texts would have {session.num_chars + num_chars} characters, more than {limit} "
                "(session.max_history_chars); open a new one"
            )
        self._store.check_chars(num_chars)

    def _write(self, session: Session, event: Event, encoded_images: Sequence[bytes]) -> None:
        if self._journal is not None:
            try:
                with self._translated(session.id.text):
                    for data in encoded_images:
                        self._journal.put_image(session.id.text, data, session.owner)
                    self._journal.append(session.id.text, session.num_events, event, session.owner)
            except SessionClosed:
                self._store.close(session)
                raise
            session.num_events += 1

    def _remember(self, session: Session, event: Event) -> None:
        """Remember an entry, and its event by the client's invocation id; the conversation shares its texts."""
        self._store.add_chars(session, event.num_chars)
        unused = remember_entry(session, event, lambda messages: self._store.commit(session, messages, []))
        self._store.drop_images(session, unused)
        if event.invocation_id and event.kind != "open":
            session.replays.append(event)
            del session.replays[: -self._max_replays]

    def find_answer(self, session: Session, name: str, question: str) -> Event | None:
        """Return the recorded turn of a request that the client retries, or None. Call `catch_up` first.

        name: the request's, by `name_request`. The question is compared too, because a client may use one id for all
        its requests.
        """
        turns = (event for event in reversed(session.replays) if event.kind == "turn")
        return next((each for each in turns if (each.invocation_id, each.question) == (name, question)), None)

    def has_added(self, session: Session, invocation_id: str, images: tuple[str, ...]) -> bool:
        """Return True if this request has already added these images. Call `catch_up` first."""
        return any((e.kind, e.invocation_id, e.images) == ("images", invocation_id, images) for e in session.replays)

    def claim_opening(self, caller: Caller, invocation_id: str, names: tuple[str, ...], session_id: str) -> str:
        """Return the session for an opening: `session`, or the one that the same request has opened before.

        With a journal, an earlier opening may be another instance's. Call this after the opening is recorded, because
        another instance may answer with the session at once. If another session is returned, discard this one. Raises
        JournalUnavailable.
        """
        if not invocation_id:
            return session_id
        name = _name("opening", caller.endpoint, caller.principal, invocation_id, *names)
        if self._journal is None:
            return self.openings.claim(name, session_id)
        with self._translated(session_id):
            first = self._journal.claim(name, session_id)
            if first != session_id and self._journal.claim(_name("fate", first), KEPT) != KEPT:
                return session_id  # deleted, because its client left before the answer
        return first

    def try_close(self, session_id: str, session: Session | None, invocation_id: str) -> bool:
        """Delete the session's journal, but remember which request closed it.

        session: None if not on this worker. Return False if another request was first. Raises JournalUnavailable.
        """
        event = Event(kind="close", invocation_id=invocation_id)
        if self._journal is not None:
            with self._translated(session_id):
                first = self._journal.close(session_id, event)
                if session is not None and session.label:
                    self._journal.delist(session_id, session.label, session.owner)
        else:
            first = self._closes.setdefault(session_id, event)
            while len(self._closes) > self._store.settings.max_tombstones:
                self._closes.popitem(last=False)
        return first.nonce == event.nonce

    def has_closed(self, session_id: str, invocation_id: str) -> bool:
        """Return True if this request closed the session before. Raises JournalUnavailable."""
        first = self._closes.get(session_id) if self._journal is None else self._read_first(session_id)
        return bool(invocation_id) and first == Event(kind="close", invocation_id=invocation_id)

    def find(self, name: str) -> str | None:
        """Return the id of a session in the journal by its hash; None without one. Raises JournalUnavailable.

        Lists the journal's sessions: for operators only.
        """
        if self._journal is None:
            return None
        stop_at, cursor = time.monotonic() + FIND_TIMEOUT_S, ""
        while True:
            with self._translated(session_id=""):
                ids, cursor = self._journal.list_ids(cursor)
            found = next((text for text in ids if session_hash(text) == name), None)
            if found is not None or not cursor:
                return found
            if time.monotonic() > stop_at:
                raise JournalUnavailable("the journal has too many sessions to find one by its hash in time")

    def discard(self, session_id: str) -> None:
        """Delete the journal of an undone opening, unless another instance has answered a retry with this session.

        Raises JournalUnavailable.
        """
        if self._journal is not None:
            with self._translated(session_id):
                if self._journal.claim(_name("fate", session_id), DISCARDED) == DISCARDED:
                    self._journal.delete(session_id)

    def sweep(self, expired_before: int, *, is_full: bool) -> None:
        """Delete journals of sessions that expired before this time. is_full: see `Journal.sweep`."""
        if self._journal is not None:
            self._journal.sweep(expired_before, is_full=is_full)

    @contextmanager
    def _translated(self, session_id: str) -> Iterator[None]:
        """Translate a journal's failures to errors for the client."""
        try:
            yield
        except EventTaken as exc:
            raise TurnConflict(CONFLICT) from exc
        except JournalClosed as exc:
            raise SessionClosed() from exc
        except EventTooLarge as exc:
            raise InvalidRequest(str(exc)) from exc
        except DamagedRecord as exc:
            raise self._lose(session_id, exc) from exc
        except (OSError, ValueError) as exc:
            self._counters.add("journal_failures")
            logger.error("journal failed error=%s", exc)
            raise JournalUnavailable(explain_failure(exc)) from exc

    def _lose(self, session_id: str, reason: object) -> SessionLost:
        """End a session whose journal is damaged. Return the error for its requests."""
        logger.warning("journal damaged session=%s reason=%s", session_hash(session_id), reason)
        self._counters.add("sessions_damaged")
        error = SessionLost(SessionLost.damaged_text)
        self._store.lose(session_id, error)
        return error


def _name(*parts: str) -> str:
    """Return a name for these texts; different texts have different names."""
    return json.dumps(parts)
