"""The durable copy of a session, from which any instance can rebuild it.

A session's journal is a list of events, numbered from 0, each written once: the opening, images that were added, turns.
Whoever writes number n first has it; the other one learns so and gives way. Encoded images are kept beside
the events under the hash of their bytes. A journal holds what is needed to compute the session again, no tensors.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from handlers.errors import ConfigError

_SESSION = re.compile(r"[a-zA-Z0-9-]{1,256}")
_EXPIRY = re.compile(r"ts-seq-[a-z2-7]{16}-([0-9a-f]{8})-")
_HASH = re.compile(r"[0-9a-f]{64}")
_KINDS = ("open", "images", "turn", "close")
CLOSED = "closed"


class EventTaken(Exception):
    """Somebody else wrote the event of this number: another instance serves the session too."""


class JournalClosed(Exception):
    """The session was closed: nothing of it is kept any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One step of a session's life.

    kind: "open", "images", "turn" or "close". images: hashes of the pictures that it added or, of a turn, that the
    question is about, in order. question, answer: a turn's. invocation_id: the client's, so that a turn that is sent
    again is not asked twice.
    """

    kind: str
    images: tuple[str, ...] = ()
    question: str = ""
    answer: str = ""
    invocation_id: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Event":
        """Raises ValueError if the bytes are no event."""
        value: Any = json.loads(data)
        if not isinstance(value, dict) or value.get("kind") not in _KINDS:
            raise ValueError("not an event of a known kind")
        try:
            return cls(**{**value, "images": tuple(value.get("images", ()))})
        except TypeError as exc:
            raise ValueError(f"not an event: {exc}") from exc


class Journal(Protocol):
    """Where journals live. All methods may block, raise OSError when the store cannot be reached, and are
    thread-safe."""

    def append(self, session_id: str, number: int, event: Event) -> None:
        """Write an event durably. Raises EventTaken if there is one of this number, JournalClosed."""
        ...

    def read(self, session_id: str, start: int = 0, max_events: int | None = None) -> list[Event]:
        """The events from `start` on, in order; none if there is no such session."""
        ...

    def put_image(self, session_id: str, data: bytes) -> str:
        """Keep an encoded image for the session; returns its hash. Raises JournalClosed."""
        ...

    def get_image(self, session_id: str, image: str) -> bytes:
        """Raises OSError if it is not there, or not whole."""
        ...

    def close(self, session_id: str) -> None:
        """Delete all of a session but the fact that it was closed, which `read` then answers."""
        ...

    def delete(self, session_id: str) -> None:
        """Delete all of a session that nobody knows of."""
        ...

    def sweep(self, expired_before: int) -> None:
        """Delete what is left of sessions whose ids expired before this time, in seconds since 1970."""
        ...


def image_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class DirectoryJournal:
    """Journals in a directory that the instances share: a folder a session, a file an event.

    A file is written under another name, made durable, and linked to its own; link(2) fails if that exists.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def append(self, session_id: str, number: int, event: Event) -> None:
        try:
            self._create(self._make_folder(session_id) / f"{number:08d}", event.encode())
        except FileExistsError as exc:
            raise EventTaken(f"event {number} of this session has been written already") from exc

    def read(self, session_id: str, start: int = 0, max_events: int | None = None) -> list[Event]:
        folder = self._folder(session_id)
        events: list[Event] = []
        while max_events is None or len(events) < max_events:
            try:
                events.append(Event.decode((folder / f"{start + len(events):08d}").read_bytes()))
            except FileNotFoundError:
                if not self._root.is_dir():
                    raise
                break
        if (folder / CLOSED).exists():  # looked for last: before that, nothing of what was read had been deleted
            return [Event(kind="close")]
        return events

    def put_image(self, session_id: str, data: bytes) -> str:
        name = image_hash(data)
        path = self._make_folder(session_id) / name
        if not path.is_file():
            with suppress(FileExistsError):
                self._create(path, data)
        return name

    def get_image(self, session_id: str, image: str) -> bytes:
        if not _HASH.fullmatch(image):
            raise FileNotFoundError("not the name of an image")
        data = (self._folder(session_id) / image).read_bytes()
        if image_hash(data) != image:
            raise OSError(f"image {image} of this session is damaged")
        return data

    def close(self, session_id: str) -> None:
        folder = self._make_folder(session_id)
        _write_durably(folder / CLOSED, b"")
        _sync_folder(folder)
        for path in folder.iterdir():
            if path.name != CLOSED:
                path.unlink(missing_ok=True)

    def delete(self, session_id: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self._folder(session_id))

    def sweep(self, expired_before: int) -> None:
        for folder in self._root.iterdir():
            match = _EXPIRY.match(folder.name)
            if match is not None and int(match[1], 16) < expired_before:
                shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def _create(path: Path, data: bytes) -> None:
        """A file with these bytes, whole and durable or not at all. Raises FileExistsError, JournalClosed."""
        folder = path.parent
        partial = folder / f".{secrets.token_hex(8)}"
        try:
            _write_durably(partial, data)
            os.link(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        if (folder / CLOSED).exists():  # looked for after the link: whoever closes later sees the file and deletes it
            path.unlink(missing_ok=True)
            raise JournalClosed("this session was closed")
        _sync_folder(folder)

    def _make_folder(self, session_id: str) -> Path:
        folder = self._folder(session_id)
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
            _sync_folder(self._root)
        return folder

    def _folder(self, session_id: str) -> Path:
        if not _SESSION.fullmatch(session_id):
            raise ValueError("not a session id")
        return self._root / session_id


def open_journal(url: str) -> Journal | None:
    """The journal that a setting names: "off", or file:///a/directory. Raises ConfigError on anything else."""
    if url == "off":
        return None
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path.startswith("/") and not (parts.netloc or parts.query or parts.fragment):
        try:
            return DirectoryJournal(Path(unquote(parts.path)))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"handler.journal.url names a directory that cannot be used: {exc}") from exc
    raise ConfigError(f"handler.journal.url must be off or file:///a/directory, not {url!r}")


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
