"""The images of sessions: those of the next question, and those of the conversation."""

from collections.abc import Sequence
from typing import Any

from handlers.chat.images.receiver import check_num_images
from handlers.chat.images.store import Image
from handlers.chat.queued_response import QueuedResponse
from handlers.chat.sessions.session import Session
from handlers.chat.sessions.store import SessionStore


class SessionImages:
    """Adds and removes images of the store's sessions. All methods may be called from any thread."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store

    def add(self, session: Session, images: Sequence[Image], *, are_recorded: bool = False) -> None:
        """Add images for the session's next question. The session holds them from now on.

        are_recorded: another worker recorded them; images that came with the running turn then do not count.

        Raises InvalidRequest if there are too many, the session's error if it has ended; then the caller still holds
        them.
        """
        with self._store.lock:
            if session.end is not None:
                raise session.end
            num_images = session.num_images + len(images)
            num_images -= len(session.unrecorded) if are_recorded else 0
            check_num_images(num_images, self._store.settings.max_images)
            session.used_at = self._store.wall()
            session.pending_images.extend(images)

    def check(self, session: Session) -> None:
        """Raise InvalidRequest if the session has too many images, because other workers have added some, too."""
        with self._store.lock:
            num_images = session.num_images
        check_num_images(num_images, self._store.settings.max_images)

    def recorded_for(self, session: Session, queued: QueuedResponse | None) -> list[Image]:
        """Return `Session.images_for`, without images that the journal does not have. Hold `session.recording`."""
        with self._store.lock:
            images = session.images_for(queued)
            for image in session.unrecorded:
                images.remove(image)
            return images

    def drop_unrecorded(self, session: Session) -> None:
        """Remove and release the images that came with the running turn."""
        with self._store.lock:
            self.drop(session, session.unrecorded)
            session.unrecorded = []

    def drop_repeated(self, session: Session) -> None:
        """Remove and release pending images that equal those that came with the turn just committed.

        The journal does not say which images came with a turn. So other workers count an image that was added during
        the turn as the turn's own.
        """
        with self._store.lock:
            pending = session.images_for(None)
            for image in session.unrecorded:
                if image in pending:
                    pending.remove(image)
                    self.drop(session, [image])

    def drop(self, session: Session, images: Sequence[Image]) -> None:
        """Remove and release the images of a request that failed."""
        with self._store.lock:
            for image in images:
                if image in session.pending_images:
                    # An equal one may wait before this one; all workers have them in the same order.
                    places = [place for place, each in enumerate(session.pending_images) if each is image]
                    del session.pending_images[places[0] if places else session.pending_images.index(image)]
                    self._store.images.release(image)

    def commit(self, session: Session, messages: list[dict[str, Any]], new_images: Sequence[Image]) -> None:
        """Replace the conversation after a turn, and move its images from the pending ones."""
        with self._store.lock:
            if session.end is not None and session.turn is None:
                return  # its memory is free
            session.messages = messages
            for image in new_images:
                session.pending_images.remove(image)
                session.images.append(image)
