"""Journals in a directory that the instances share: a folder per session, a file per event.

A file is written under a temporary name, synced, and linked to its own name; link(2) fails if that exists.
"""

import errno
import os
import secrets
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

from handlers.journal.disk_budget import DiskBudget
from handlers.journal.event import DamagedRecord, Event, check_size, decode_close, image_hash
from handlers.journal.expiring_sessions import ExpiringSessions
from handlers.journal.journal import (
    MAX_CLAIM_BYTES,
    REMOVED_WITHIN_S,
    EventTaken,
    JournalClosed,
    JournalFull,
    check_image,
    check_image_name,
    claim_key,
    expiry,
    is_session_id,
)
from handlers.settings import JournalSettings

CLOSED = "closed"
CLAIMS = "claims"
MAX_SWEPT = 10_000  # folders and claims that one sweep deletes
LISTED_S = 1_500  # a full sweep lists the sessions that expire until the next one, and some time after it


class DirectoryJournal:
    """root: created if missing."""

    def __init__(self, root: Path, settings: JournalSettings) -> None:
        self._root = root
        self._claims = root / CLAIMS
        self._settings = settings
        self._budget = DiskBudget(root, settings.max_bytes, settings.min_free_bytes)
        self._expiring = ExpiringSessions()
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def used_bytes(self) -> int:
        return self._budget.used_bytes

    def check_room(self) -> None:
        try:
            self._budget.check_room()
        except JournalFull as full:
            first = self._expiring.first()
            full.room_at = None if first is None else first + REMOVED_WITHIN_S
            raise

    def append(self, session_id: str, number: int, event: Event) -> None:
        data = event.encode(session_id, self._settings.max_event_bytes)
        try:
            self._create(self._make_folder(session_id) / f"{number:08d}", data)
        except FileExistsError as exc:
            raise EventTaken(f"event {number} of this session has been written already") from exc

    def read(self, session_id: str, start: int = 0, max_events: int | None = None) -> list[Event]:
        folder = self._folder(session_id)
        events: list[Event] = []
        while max_events is None or len(events) < max_events:
            try:
                data = _read(folder / f"{start + len(events):08d}", self._settings.max_event_bytes)
                events.append(Event.decode(data, session_id))
            except FileNotFoundError:
                if not self._root.is_dir():
                    raise
                break
        try:
            return [self._read_close(session_id)]
        except FileNotFoundError:  # checked last: nothing had been deleted before
            return events

    def put_image(self, session_id: str, data: bytes) -> str:
        name = image_hash(data)
        path = self._make_folder(session_id) / name
        if not path.is_file():
            with suppress(FileExistsError):
                self._create(path, data)
        return name

    def get_image(self, session_id: str, image: str) -> bytes:
        check_image_name(image)
        return check_image(image, _read(self._folder(session_id) / image, self._settings.max_image_bytes))

    def close(self, session_id: str, event: Event) -> Event:
        folder = self._make_folder(session_id)
        with suppress(FileExistsError):
            self._publish(folder / CLOSED, event.encode(session_id, self._settings.max_event_bytes))
        _sync_folder(folder)
        for path in folder.iterdir():
            if path.name != CLOSED:
                self._budget.remove(path)
        return self._read_close(session_id)

    def delete(self, session_id: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self._folder(session_id))

    def claim(self, name: str, value: str) -> str:
        path = self._claims / claim_key(name)
        self._make(self._claims)
        try:
            self._create(path, value.encode())
        except FileExistsError:
            return _read_beginning(path, MAX_CLAIM_BYTES).decode(errors="replace")
        return value

    def list_ids(self, cursor: str = "") -> tuple[list[str], str]:
        """Return all ids in one page."""
        return [name for name in os.listdir(self._root) if is_session_id(name)], ""

    def sweep(self, expired_before: int, *, is_full: bool = True) -> None:
        """Delete the expired sessions that the last full sweep has listed, and those that this worker wrote since.

        is_full: scan the whole directory, which takes about 10 microseconds per file. Measure it, too.
        """
        if is_full:
            self._scan(expired_before)
        else:
            for name, num_bytes in self._expiring.pop(expired_before, MAX_SWEPT):
                self._budget.remove_folder(self._root / name, num_bytes)

    def _scan(self, expired_before: int) -> None:
        self._expiring.begin(expired_before + LISTED_S)
        num_swept = 0
        for folder in self._root.iterdir():
            with suppress(ValueError):  # not a session
                if expiry(folder.name) < expired_before and num_swept < MAX_SWEPT:
                    shutil.rmtree(folder, ignore_errors=True)
                    num_swept += 1
                else:
                    self._expiring.add(folder.name)
        if self._claims.is_dir():
            for path in self._claims.iterdir():
                with suppress(FileNotFoundError):  # another instance sweeps too
                    if path.stat().st_mtime + self._settings.claim_s < expired_before and num_swept < MAX_SWEPT:
                        path.unlink()
                        num_swept += 1
        self._expiring.note_sizes(self._budget.measure(self._expiring.names()))

    def _create(self, path: Path, data: bytes) -> None:
        """Create a file atomically and durably. Raises FileExistsError, JournalClosed."""
        folder = path.parent
        self._publish(path, data)
        if (folder / CLOSED).exists():  # checked after the link: a later close deletes the file
            path.unlink(missing_ok=True)
            raise JournalClosed("this session was closed")
        try:
            _sync_folder(folder)
        except FileNotFoundError:
            if not _is_expired(folder.name):
                raise

    def _publish(self, path: Path, data: bytes) -> None:
        """Create a file with all of its content, unless the session is closed. Raises FileExistsError."""
        folder = path.parent
        partial = folder / f".{secrets.token_hex(8)}"
        try:
            _write_durably(partial, data)
            _link(partial, path, data)
            self._budget.add(len(data))
        except FileNotFoundError:
            # A close deletes temporary files, too, and so does the sweep of an expired session.
            if not (folder / CLOSED).exists() and not _is_expired(folder.name):
                raise
        finally:
            partial.unlink(missing_ok=True)

    def _read_close(self, session_id: str) -> Event:
        """Read the record of a closed session. Raises FileNotFoundError."""
        data = _read(self._folder(session_id) / CLOSED, self._settings.max_event_bytes)
        return decode_close(data, session_id)

    def _make_folder(self, session_id: str) -> Path:
        folder = self._folder(session_id)
        if self._make(folder):
            self._expiring.add(session_id)
        return folder

    def _make(self, folder: Path) -> bool:
        """Make a folder if it is not there. Return whether it was missing."""
        if folder.is_dir():
            return False
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(self._root)
        return True

    def _folder(self, session_id: str) -> Path:
        expiry(session_id)  # only a valid id becomes a path
        return self._root / session_id


def _is_expired(name: str) -> bool:
    """Return True for the id of an expired session, False for another name."""
    try:
        return expiry(name) <= time.time()
    except ValueError:
        return False


def _read(path: Path, max_bytes: int) -> bytes:
    """Read a whole file. Raises DamagedRecord if it is larger than max_bytes, or not a file."""
    data = _read_beginning(path, max_bytes + 1)
    check_size(len(data), max_bytes)
    return data


def _read_beginning(path: Path, num_bytes: int) -> bytes:
    """Read up to num_bytes of a file. Raises DamagedRecord if it is not a file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise DamagedRecord("a record is not a file") from exc
        raise
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise DamagedRecord("a record is not a file")
        with open(handle, "rb", closefd=False) as file:
            return file.read(min(num_bytes, info.st_size))
    finally:
        os.close(handle)


def _link(partial: Path, path: Path, data: bytes) -> None:
    """Link, or raise FileExistsError unless the content is equal: NFS may report it for its own link."""
    try:
        os.link(partial, path)
    except FileExistsError:
        with suppress(FileNotFoundError):  # closed meanwhile
            if _read_beginning(path, len(data) + 1) != data:
                raise


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
