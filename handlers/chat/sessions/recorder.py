"""Sessions and their journals: what happens is recorded before it is acknowledged, and what others recorded is read.

With the journal off, only openings are remembered (`openings`). A session that this worker does not hold is adopted
empty; its next turn catches up with the journal like any session that has fallen behind, so rebuilding needs no code of
its own.
Blocks on the journal: worker threads only, never the engine's or TorchServe's.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from handlers.chat.messages import answer_message, question_message
from handlers.chat.pictures.store import Image, ImageStore
from handlers.chat.sessions.idempotency import IdempotencyCache
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.store import SessionStore
from handlers.errors import JournalUnavailable, SessionClosed, TurnConflict
from handlers.journal.event import Event
from handlers.journal.journal import EventTaken, Journal, JournalClosed
from handlers.requests import Caller

logger = logging.getLogger(__name__)
CONFLICT = "another instance has answered in this session meanwhile; ask again"
CLOSED = "this session was closed; open a new one"
KEPT, DISCARDED = "kept", "discarded"  # the fate of a session whose opening was sent twice: the first word counts


class SessionRecorder:
    """What sessions and their journal have in common.

    max_replays: of a session, how many requests are remembered so that they are not done twice.
    """

    def __init__(self, journal: Journal | None, store: SessionStore, images: ImageStore, max_replays: int) -> None:
        self._journal = journal
        self._store = store
        self._images = images
        self._max_replays = max_replays
        self.openings = IdempotencyCache(store.holds, store.settings.max_sessions)

    def is_known(self, session_id: str) -> bool:
        """True if there is a journal of this session. Raises SessionClosed, JournalUnavailable."""
        if self._journal is None:
            return False
        with _translated():
            events = self._journal.read(session_id, max_events=1)
        if events and events[0].kind == "close":
            raise SessionClosed(CLOSED)
        return bool(events)

    def must_rebuild(self, session: Session) -> bool:
        """True if this worker has seen nothing of the session yet: catching up will take in all of its images."""
        return self._journal is not None and session.num_events == 0

    def catch_up(self, session: Session) -> int:
        """Apply what other workers recorded; returns how many events that was.

        Raises SessionClosed, JournalUnavailable, OutOfMemory.
        """
        if self._journal is None:
            return 0
        with session.recording:
            with _translated():
                events = self._journal.read(session.id.text, session.num_events)
            for event in events:
                self._apply(session, event)
                self._remember(session, event)
                session.num_events += 1
        return len(events)

    def _apply(self, session: Session, event: Event) -> None:
        if event.kind == "close":
            self._store.close(session)
            raise SessionClosed(CLOSED)
        if event.kind != "turn":
            self._take_in(session, event.images)
            return
        pending = list(session.pending_images)
        used: list[Image] = []
        for name in event.images:
            image = next((image for image in pending if image.digest == name), None)
            if image is None:
                (image,) = self._take_in(session, [name])
            else:
                pending.remove(image)
            used.append(image)
        messages = [*session.messages, question_message(event.question, len(used)), answer_message(event.answer)]
        self._store.commit(session, messages, used)

    def _take_in(self, session: Session, names: Sequence[str]) -> list[Image]:
        """Pictures that another worker recorded, for the session's next question."""
        images: list[Image] = []
        try:
            for name in names:
                images.append(self._images.take_in(session.scope, self.fetch(session, name)))
            self._store.add_images(session, images)
        except BaseException:
            for image in images:
                self._images.release(image)
            raise
        return images

    def fetch(self, session: Session, digest: str) -> bytes:
        """The encoded bytes of one of the session's images. Raises JournalUnavailable."""
        assert self._journal is not None
        with _translated():
            return self._journal.get_image(session.id.text, digest)

    def record(self, session: Session, event: Event, encoded_images: Sequence[bytes] = ()) -> None:
        """Write an event, after the images that it brings. Raises TurnConflict if another worker wrote first,
        SessionClosed, JournalUnavailable.

        Hold `session.recording` over this and the change to the session that the event stands for.
        """
        with session.recording:
            self._write(session, event, encoded_images)
            self._remember(session, event)

    def _write(self, session: Session, event: Event, encoded_images: Sequence[bytes]) -> None:
        if self._journal is not None:
            try:
                with _translated():
                    for data in encoded_images:
                        self._journal.put_image(session.id.text, data)
                    self._journal.append(session.id.text, session.num_events, event)
            except SessionClosed:
                self._store.close(session)
                raise
            session.num_events += 1

    def _remember(self, session: Session, event: Event) -> None:
        """What was done for a client's invocation id. Its texts are the conversation's own, so this costs no copy."""
        if event.invocation_id and event.kind != "open":
            session.replays.append(event)
            del session.replays[: -self._max_replays]

    def find_answer(self, session: Session, invocation_id: str, question: str) -> str | None:
        """The answer that this request has got already, if it is one that the client sends again.

        Catch up first. The question is compared too: a client that gives all it asks one id does not get one answer.
        """
        for event in reversed(session.replays):
            if event.kind == "turn" and (event.invocation_id, event.question) == (invocation_id, question):
                return event.answer
        return None

    def has_added(self, session: Session, invocation_id: str, images: tuple[str, ...]) -> bool:
        """True if this request added these images already, and the client sends it again. Catch up first."""
        done = (event for event in session.replays if event.kind == "images")
        return any((event.invocation_id, event.images) == (invocation_id, images) for event in done)

    def claim_opening(self, caller: Caller, invocation_id: str, images: tuple[str, ...], session_id: str) -> str:
        """The session that an opening is answered with: this one, or the one that the same request, which the client
        has sent again, opened before, with a journal perhaps on another instance.

        Call it when the opening is recorded, so that what another instance answers with is there. If the answer is
        another session, `discard` this one. Raises JournalUnavailable.
        """
        if not invocation_id:
            return session_id
        name = _name("opening", caller.endpoint, caller.principal, invocation_id, *images)
        if self._journal is None:
            return self.openings.claim(name, session_id)
        with _translated():
            first = self._journal.claim(name, session_id)
            if first != session_id and self._journal.claim(_name("fate", first), KEPT) != KEPT:
                return session_id  # its client left before it had the answer, so it was deleted
        return first

    def close(self, session_id: str) -> None:
        """Delete the session's journal; that it was closed is remembered until it expires."""
        if self._journal is not None:
            with _translated():
                self._journal.close(session_id)

    def discard(self, session_id: str) -> None:
        """Delete the journal of a session whose opening is undone, unless the client, who sent its request again, was
        answered with this very session elsewhere. Raises JournalUnavailable."""
        if self._journal is not None:
            with _translated():
                if self._journal.claim(_name("fate", session_id), DISCARDED) == DISCARDED:
                    self._journal.delete(session_id)

    def sweep(self, expired_before: int) -> None:
        """Delete journals of sessions that expired before this time."""
        if self._journal is not None:
            self._journal.sweep(expired_before)


def _name(*parts: str) -> str:
    """One name of several texts, in which none can pass for another's end."""
    return json.dumps(parts)


@contextmanager
def _translated() -> Iterator[None]:
    """A journal's own failures as errors for the client."""
    try:
        yield
    except EventTaken as exc:
        raise TurnConflict(CONFLICT) from exc
    except JournalClosed as exc:
        raise SessionClosed(CLOSED) from exc
    except (OSError, ValueError) as exc:
        logger.error("journal failed error=%s", exc)
        raise JournalUnavailable("the session's journal cannot be reached; try again later") from exc
