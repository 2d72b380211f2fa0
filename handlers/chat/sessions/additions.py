"""What requests other than turns add to a session: images, entries without an answer, responses in the background."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from handlers.chat.commands import AddImages
from handlers.chat.images.receiver import ImageReceiver, ReceivedImage
from handlers.chat.images.store import digests
from handlers.chat.queued_response import QueuedResponse
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.session_images import SessionImages
from handlers.errors import TurnConflict
from handlers.journal.event import Event
from handlers.requests.reply import PendingReply


class SessionAdditions:
    """Adds to held sessions, in memory and in their journals. Worker threads only: all methods may take long."""

    def __init__(self, recorder: SessionRecorder, receiver: ImageReceiver, images: SessionImages) -> None:
        self._recorder = recorder
        self._receiver = receiver
        self._images = images

    def add_images(self, session: Session, command: AddImages, reply: PendingReply) -> None:
        """Add images for the session's next question, only once if the client retries the request."""
        received = self._receiver.receive(session.scope, command.images, reply)
        images = digests(item.image for item in received)
        event = Event(kind="images", images=images, invocation_id=command.invocation_id)
        self._record_once(
            session,
            received,
            lambda: self._recorder.has_added(session, command.invocation_id, images),
            lambda: self.record(session, event, received),
        )

    def add_entry(self, session: Session, question: str, received: Sequence[ReceivedImage], name: str) -> int:
        """Add items to the conversation, without an answer, only once if the client retries the request.

        name: of the request, by `name_request`. Return the number of their entry. Raises TurnConflict,
        InvalidRequest, or the SessionGone family.
        """
        images = digests(item.image for item in received)
        event = Event(kind="turn", images=images, question=question, response="{}", invocation_id=name)
        with session.recording:
            self._record_once(
                session,
                received,
                lambda: self._recorder.find_answer(session, name, question) is not None,
                lambda: self._record(session, event, received, self._recorder.add),
            )
            found = self._recorder.find_answer(session, name, question)
            return len(session.entries) if found is None else session.entries.index(found) + 1

    def queue_response(
        self,
        session: Session,
        event: Event,
        received: Sequence[ReceivedImage],
        find: Callable[[], QueuedResponse | None],
    ) -> QueuedResponse:
        """Record the question of a response in the background, and return the response.

        find: returns the response that an earlier attempt of the same request queued; then nothing is recorded. In a
        conversation, the response reserves an entry. Raises TurnConflict, or the SessionGone family.
        """
        images = digests(item.image for item in received)

        def record() -> None:
            entry = "" if session.resource is None else str(len(session.entries) + 1)
            self.record(session, replace(event, images=images, entry=entry), received)

        with session.recording:
            self._record_once(session, received, lambda: find() is not None, record)
            return find() or session.queued[max(session.queued)]

    def _record_once(
        self,
        session: Session,
        received: Sequence[ReceivedImage],
        is_recorded: Callable[[], bool],
        record: Callable[[], None],
    ) -> None:
        """Record a request, unless an earlier attempt did so. Raises TurnConflict, or the SessionGone family."""
        with session.recording:
            with self._receiver.released_on_error(received):
                self._recorder.catch_up(session)
            if is_recorded():
                self._receiver.release(received)
                return
            try:
                record()
            except TurnConflict:  # perhaps by this same request, sent to another instance
                self._recorder.catch_up(session)
                if not is_recorded():
                    raise

    def record(self, session: Session, event: Event, received: Sequence[ReceivedImage]) -> None:
        """Record an event together with the images that it adds to the session."""
        self._record(session, event, received, self._recorder.record)

    def _record(
        self,
        session: Session,
        event: Event,
        received: Sequence[ReceivedImage],
        record: Callable[[Session, Event, Sequence[bytes]], None],
    ) -> None:
        images = [item.image for item in received]
        with session.recording:  # no turn may use an image before it is recorded
            with self._receiver.released_on_error(received):
                self._images.add(session, images)
            try:
                record(session, event, [item.encoded for item in received])
            except Exception:
                self._images.drop(session, images)
                raise
