"""The events of the sessions that this worker holds: recorded before they are acknowledged, and applied.

A session that this worker does not hold is adopted empty, and its next turn reads the missing events, as for any
session that another worker has served meanwhile. All methods block on the journal: call them on worker threads only,
never on the engine's or TorchServe's.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from handlers.chat.images.store import Image, ImageStore
from handlers.chat.sessions.entries import entries_of, find_queued, messages_added, remember_entry
from handlers.chat.sessions.journal_failures import JournalFailures
from handlers.chat.sessions.known_sessions import KnownSessions
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.session_images import SessionImages
from handlers.chat.sessions.store import SessionStore
from handlers.errors import BadImage, ContextTooLong, InvalidRequest, SessionClosed, SessionLost
from handlers.journal.event import Event


class SessionRecorder:
    """Keeps sessions and their journals in step.

    max_replays: requests of a session that are remembered, so that a retry is not executed again.
    """

    def __init__(
        self,
        known: KnownSessions,
        store: SessionStore,
        session_images: SessionImages,
        images: ImageStore,
        failures: JournalFailures,
        max_replays: int,
    ) -> None:
        self._known = known
        self._store = store
        self._session_images = session_images
        self._images = images
        self._failures = failures
        self._max_replays = max_replays

    def must_rebuild(self, session: Session) -> bool:
        """Return True if `catch_up` would read the whole session, because this worker has none of its events."""
        return session.num_events == 0

    def catch_up(self, session: Session) -> int:
        """Apply the events that other workers recorded; return their number.

        Raises SessionClosed, SessionLost, JournalUnavailable, OutOfMemory.
        """
        with session.recording:
            events = self._known.read_events(session)
            for event in events:
                try:
                    self._apply(session, event)
                    self._remember(session, event)
                except (BadImage, InvalidRequest) as exc:  # workers record neither
                    raise self._failures.lose(session.id.text, exc) from exc
                session.num_events += 1
            if session.num_events == 0:  # deleted since this worker learned that there is a journal
                error = SessionLost()
                self._store.lose(session.id.text, error)
                raise error
        return len(events)

    def _apply(self, session: Session, event: Event) -> None:
        if event.kind == "close":
            self._store.close(session)
            raise SessionClosed()
        if (event.kind == "open") != (session.num_events == 0):
            raise self._failures.lose(session.id.text, "the opening is not the first event")
        if event.kind != "turn":
            self._take_in(session, event.images)
            return
        self._apply_turn(session, event)

    def _apply_turn(self, session: Session, event: Event) -> None:
        queued = find_queued(session, event) if event.entry else None
        pending = self._session_images.recorded_for(session, queued)
        used: list[Image] = []
        for name in event.images:
            image = next((image for image in pending if image.digest == name), None)
            if image is None:
                (image,) = self._take_in(session, [name])
            else:
                pending.remove(image)
            used.append(image)
        self._session_images.commit(session, [*session.messages, *messages_added(event)], used)

    def _take_in(self, session: Session, names: Sequence[str]) -> list[Image]:
        """Load images that another worker recorded, for the session's next question."""
        images: list[Image] = []
        try:
            for name in names:
                encoded = self.fetch(session, name)
                images.append(self._images.take_in(session.scope, encoded, is_recorded=True))
            self._session_images.add(session, images, are_recorded=True)
        except BaseException:
            for image in images:
                self._images.release(image)
            raise
        return images

    def read_entries(self, session: Session, num_entries: int) -> list[tuple[Event, list[Image]]]:
        """Return the first entries of a held session, each with its images.

        Raises InvalidRequest if an entry is damaged, the session's error if it has ended.
        """
        with session.recording:
            entries = entries_of(session, num_entries)
            with self._kept_open(session):
                images = iter(list(session.images))
        return [(event, list(islice(images, len(event.images)))) for event in entries]

    @contextmanager
    def _kept_open(self, session: Session) -> Iterator[None]:
        """Keep a session from ending, which would release its images. Raises its error if it has ended."""
        with self._store.lock:
            self._store.raise_if_gone(session)
            yield

    def copy(self, source: Session, num_entries: int, target: Session) -> None:
        """Record a session's first entries in a new session, which shares the images and KV blocks of the source.

        Hold both sessions. Raises InvalidRequest, Overloaded, JournalUnavailable, and the source's error if it ends.
        """
        entries = self.read_entries(source, num_entries)
        self._store.check_chars(sum(event.num_chars for event, _ in entries))
        for event, images in entries:
            encoded = [self.fetch(source, image.digest) for image in images] if self._store.is_durable else []
            with target.recording:
                copied = replace(event, invocation_id="", entry="", nonce=secrets.token_hex(8))
                self._write(target, copied, encoded)
                self._share(source, images, target)
                self._apply_turn(target, copied)
                self._remember(target, copied)

    def _share(self, source: Session, images: Sequence[Image], target: Session) -> None:
        """Add images of a session to another one. Raises the source's error if it has ended."""
        with self._kept_open(source):
            for image in images:
                self._images.share(image)
        try:
            self._session_images.add(target, images)
        except BaseException:
            for image in images:
                self._images.release(image)
            raise

    def read_image(self, session: Session, digest: str) -> bytes:
        """Return the bytes of one of a held session's images. Raises the SessionGone family, JournalUnavailable."""
        with self._kept_open(session):
            images = [*session.images, *session.pending_images]
            image = next((each for each in images if each.digest == digest), None)
            encoded = None if image is None else self._images.find_encoded(image)
        return self.fetch(session, digest) if encoded is None else encoded

    def add(self, session: Session, event: Event, encoded: Sequence[bytes]) -> None:
        """Record a turn without a generated answer, whose images the session already holds. Raises as `record` does."""
        with session.recording:
            self.record(session, event, encoded)
            self._apply_turn(session, event)

    def fetch(self, session: Session, digest: str) -> bytes:
        """Read the encoded bytes of one of its images. Raises the SessionGone family, JournalUnavailable."""
        return self._known.read_image(session, digest)

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
            if event.kind == "open" and session.label:
                self._known.enlist(session)

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
        try:
            self._known.write(session, event, encoded_images)
        except SessionClosed:
            self._store.close(session)
            raise
        session.num_events += 1

    def _remember(self, session: Session, event: Event) -> None:
        """Remember an entry, and its event by the client's invocation id; the conversation shares its texts."""
        self._store.add_chars(session, event.num_chars)
        unused = remember_entry(session, event, lambda messages: self._session_images.commit(session, messages, []))
        self._session_images.drop(session, unused)
        if event.invocation_id and event.kind != "open":
            session.replays.append(event)
            del session.replays[: -self._max_replays]

    def find_answer(self, session: Session, name: str, question: str) -> Event | None:
        """Return the recorded turn of a request that the client retries, or None. Call `catch_up` first.

        name: the request's, by `name_request`. The question is compared too, because a client may use one id for all
        its requests.
        """
        for event in reversed(session.replays):
            if event.kind == "turn" and (event.invocation_id, event.question) == (name, question):
                return event
        return None

    def has_added(self, session: Session, invocation_id: str, images: tuple[str, ...]) -> bool:
        """Return True if this request has already added these images. Call `catch_up` first."""
        added = (event for event in session.replays if event.kind == "images")
        return any((event.invocation_id, event.images) == (invocation_id, images) for event in added)
