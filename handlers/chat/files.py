"""OpenAI's files for pictures: each is a session with one picture, which any later input may name."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from handlers.chat.commands import DeleteFile, ShowFile
from handlers.chat.messages import KeptImage
from handlers.chat.sessions.lifecycle import SessionLifecycle
from handlers.chat.sessions.recorder import SessionRecorder
from handlers.chat.sessions.session import Session
from handlers.errors import ResponseUnknown
from handlers.reply import PendingReply
from handlers.requests import Caller
from torchmoor.wire.response_ids import file_id, read_file_id

FILE = "file"


class Files:
    """Shows, reads and deletes files. Worker threads only: all methods may read a journal."""

    def __init__(self, sessions: SessionLifecycle, recorder: SessionRecorder) -> None:
        self._sessions = sessions
        self._recorder = recorder

    @contextmanager
    def found(self, caller: Caller, text: str) -> Iterator[Session]:
        """Hold the session of a file. Raises ResponseUnknown, also for other callers' files, JournalUnavailable."""
        unknown = ResponseUnknown(f"No such File object: {text[:256]}", param="id", api_code="not_found")
        with self._sessions.hold_resource(read_file_id(text), caller, unknown, FILE) as session:
            yield session

    def show(self, command: ShowFile) -> dict[str, Any]:
        with self.found(command.caller, command.file_id) as session:
            fields = session.resource or {}
            return {"id": file_id(session.id.text), **fields, "expires_at": session.id.expires_at}

    def find_picture(self, caller: Caller, text: str) -> KeptImage:
        """Return a file's picture, whose bytes are read later."""
        with self.found(caller, text) as session:
            return KeptImage(session.pending_images[0].digest, partial(self.read, caller, text))

    def read(self, caller: Caller, text: str) -> bytes:
        """Return a file's bytes."""
        with self.found(caller, text) as session:
            return self._recorder.read_image(session, session.pending_images[0])

    def delete(self, command: DeleteFile, reply: PendingReply) -> dict[str, Any]:
        with self.found(command.caller, command.file_id) as session:
            self._sessions.end(session, command.invocation_id, reply)
        return {"id": command.file_id, "object": FILE, "deleted": True}
