"""OpenAI's files, images only: each is a session with one image, which later inputs can refer to.

Inputs can refer in the same way to images of stored items.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from handlers.chat.commands import DeleteFile, ListFiles, ShowFile
from handlers.chat.dialects.response_form import show_list
from handlers.chat.images.store import Image
from handlers.chat.items import images_in, read_items
from handlers.chat.messages import KeptImage
from handlers.chat.sessions.known_sessions import KnownSessions
from handlers.chat.sessions.lifecycle import SessionLifecycle
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.errors import InvalidRequest, ResponseUnknown, SessionLost
from handlers.journal.journal import is_session_id
from handlers.requests.incoming import Caller
from handlers.requests.reply import PendingReply
from torchmoor.wire.response_ids import Place, file_id, read_file_id, read_image_id
from torchmoor.wire.session_ids import expiry_order

FILE = "file"


class Files:
    """Shows, reads and deletes files. Worker threads only: all methods may read a journal."""

    def __init__(self, sessions: SessionLifecycle, known: KnownSessions, recorder: SessionRecorder) -> None:
        self._sessions = sessions
        self._known = known
        self._recorder = recorder

    def found(self, caller: Caller, text: str) -> AbstractContextManager[Session]:
        """Hold the session of a file.

        Raises JournalUnavailable, and ResponseUnknown, also if another caller owns the file.
        """
        return self._sessions.hold_resource(read_file_id(text), caller, _unknown(text), FILE)

    def show(self, command: ShowFile) -> dict[str, Any]:
        with self.found(command.caller, command.file_id) as session:
            return _show(session.id.text, session.id.expires_at, session.resource or {})

    def list(self, command: ListFiles) -> dict[str, Any]:
        """Return a page of the caller's files in the order of their expiry.

        Raises InvalidRequest if `after` is not a file of the caller's; it may have been deleted. JournalUnavailable.
        """
        page, caller = command.page, command.caller
        last = _read_after(page.after)
        listed = [(expiry_order(entry.session_id), entry) for entry in self._known.list_owned(caller)]
        shown: list[dict[str, Any]] = []
        for place, entry in sorted(listed, reverse=not page.is_ascending):
            is_before = last is not None and (place <= last if page.is_ascending else place >= last)
            if is_before or command.purpose not in ("", entry.label):
                continue
            fields = self._read(entry.session_id, caller)
            if fields is not None and len(shown) == page.limit:
                return show_list(shown, has_more=True)
            if fields is not None:
                shown.append(_show(entry.session_id, entry.expires_at, fields))
        return show_list(shown)

    def _read(self, session_id: str, caller: Caller) -> dict[str, Any] | None:
        """Return a file's fields; None if it has ended, is damaged, or is in a list by mistake."""
        if not self._sessions.is_own(session_id, caller):
            return None
        try:
            return self._known.read_resource(session_id)
        except (SessionLost, InvalidRequest):
            return None

    def find_image(self, caller: Caller, text: str) -> KeptImage:
        """Return the image of a file or of stored items, whose bytes are read later."""
        with self._held(caller, text) as (_, image):
            return KeptImage(image.digest, partial(self.read, caller, text))

    def read(self, caller: Caller, text: str) -> bytes:
        """Return the bytes of a file, or of an image of stored items."""
        with self._held(caller, text) as (session, image):
            return self._recorder.read_image(session, image.digest)

    @contextmanager
    def _held(self, caller: Caller, text: str) -> Iterator[tuple[Session, Image]]:
        """Hold the session of an image. Raises as `found`."""
        place = read_image_id(text)
        if place is None:
            with self.found(caller, text) as session:
                yield session, _image(session)
            return
        with self._sessions.hold_resource(place, caller, _unknown(text)) as session:
            image = _find_image(session, place)
            if image is None:
                raise _unknown(text)
            yield session, image

    def delete(self, command: DeleteFile, reply: PendingReply) -> dict[str, Any]:
        with self.found(command.caller, command.file_id) as session:
            self._sessions.end(session, command.invocation_id, reply)
        return {"id": command.file_id, "object": FILE, "deleted": True}


def _unknown(text: str) -> ResponseUnknown:
    return ResponseUnknown(f"No such File object: {text[:256]}", param="id", api_code="not_found")


def _find_image(session: Session, place: Place) -> Image | None:
    """Return an image of an entry's items, which were perhaps preceded by images of no item.

    The entry may be a response in the background, whose images wait for its turn.
    """
    with session.recording:
        queued = session.queued.get(place.number)
        event = session.find_turn(place.number) or (None if queued is None else queued.event)
        images = [*session.images, *session.pending_images]
    if event is None or not event.response or place.number in session.deleted:
        return None
    num_own = len(images_in(read_items(event.question)))
    if place.item >= num_own:
        return None
    digest = event.images[len(event.images) - num_own + place.item]
    return next((image for image in images if image.digest == digest), None)


def _image(session: Session) -> Image:
    """Return a file's image, even if a question in its session has used it. Raises SessionLost if the session ended."""
    with session.recording:
        images = [*session.images, *session.pending_images]
    if not images:
        raise SessionLost()
    return images[0]


def _show(session_id: str, expires_at: int, fields: dict[str, Any]) -> dict[str, Any]:
    return {"id": file_id(session_id), **fields, "expires_at": expires_at}


def _read_after(text: str) -> tuple[str, str, str] | None:
    """Return the place of a file in a list, from its id; None for no id. Raises InvalidRequest."""
    if not text:
        return None
    place = read_file_id(text)
    if place is None or not is_session_id(place.session_id):
        raise InvalidRequest("'after' must be the id of a file", param="after")
    return expiry_order(place.session_id)
