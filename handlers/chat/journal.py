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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from handlers.errors import ConfigError

_SESSION = re.compile(r"[a-zA-Z0-9-]{1,256}")
_EXPIRY = re.compile(r"ts-seq-[a-z2-7]{16}-([0-9a-f]{8})-")
_HASH = re.compile(r"[0-9a-f]{64}")
CLOSED = "closed"


class EventTaken(Exception):
    """Somebody else wrote the event of this number: another instance serves the session too."""


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
        value: dict[str, Any] = json.loads(data)
        try:
            return cls(**{**value, "images": tuple(value.get("images", ()))})
        except TypeError as exc:
            raise ValueError(f"not an event: {exc}") from exc


class Journal(Protocol):
    """Where journals live. All methods may block, raise OSError when the store cannot be reached, and are
    thread-safe."""

    def append(self, session_id: str, number: int, event: Event) -> None:
        """Write an event durably. Raises EventTaken if there is one of this number."""
        ...

    def read(self, session_id: str, start: int = 0) -> list[Event]:
        """The events from `start` on, in order; none if there is no such session."""
        ...

    def put_image(self, session_id: str, data: bytes) -> str:
        """Keep an encoded image for the session; returns its hash."""
        ...

    def get_image(self, session_id: str, image: str) -> bytes:
        """Raises OSError if it is not there."""
        ...

    def close(self, session_id: str) -> None:
        """Delete all of a session but the fact that it was closed, which `read` then answers."""
        ...

    def sweep(self, expired_before: int) -> None:
        """Delete what is left of sessions whose ids expired before this time, in seconds since 1970."""
        ...


def image_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class DirectoryJournal:
    """Journals in a directory that the instances share: a folder a session, a file an event.

    An event is written to a file of another name, made durable, and linked to its number; link(2) fails if that exists.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def append(self, session_id: str, number: int, event: Event) -> None:
        folder = self._folder(session_id)
        folder.mkdir(mode=0o700, exist_ok=True)
        partial = folder / f".{secrets.token_hex(8)}"
        try:
            _write_durably(partial, event.encode())
            os.link(partial, folder / f"{number:08d}")
        except FileExistsError as exc:
            raise EventTaken(f"event {number} of this session has been written already") from exc
        finally:
            partial.unlink(missing_ok=True)
        _sync_folder(folder)

    def read(self, session_id: str, start: int = 0) -> list[Event]:
        folder = self._folder(session_id)
        if (folder / CLOSED).exists():
            return [Event(kind="close")]
        events: list[Event] = []
        while (path := folder / f"{start + len(events):08d}").is_file():
            events.append(Event.decode(path.read_bytes()))
        return events

    def put_image(self, session_id: str, data: bytes) -> str:
        name = image_hash(data)
        folder = self._folder(session_id)
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / name
        if not path.is_file():
            partial = folder / f".{secrets.token_hex(8)}"
            _write_durably(partial, data)
            partial.rename(path)
        return name

    def get_image(self, session_id: str, image: str) -> bytes:
        if not _HASH.fullmatch(image):
            raise FileNotFoundError("not the name of an image")
        return (self._folder(session_id) / image).read_bytes()

    def close(self, session_id: str) -> None:
        folder = self._folder(session_id)
        folder.mkdir(mode=0o700, exist_ok=True)
        _write_durably(folder / CLOSED, b"")
        _sync_folder(folder)
        for path in folder.iterdir():
            if path.name != CLOSED:
                path.unlink(missing_ok=True)

    def sweep(self, expired_before: int) -> None:
        for folder in self._root.iterdir():
            match = _EXPIRY.match(folder.name)
            if match is not None and int(match[1], 16) < expired_before:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, session_id: str) -> Path:
        if not _SESSION.fullmatch(session_id):
            raise ValueError("not a session id")
        return self._root / session_id


def open_journal(url: str) -> Journal | None:
    """The journal that a setting names: "off", or file:///a/directory. Raises ConfigError on anything else."""
    if url == "off":
        return None
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return DirectoryJournal(Path(unquote(parts.path)))
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
