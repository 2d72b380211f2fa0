"""Journals in a directory that the instances share: a folder per session, a file per event.

A file is written under a temporary name, synced, and linked to its own name; link(2) fails if that exists. Each record
costs two fsyncs, of its file and of its folder. Sessions share only images and their owners' lists, see
handlers/journal/directory_images.py and directory_lists.py.
"""

import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path

from handlers.journal import directory_files as files
from handlers.journal.directory_images import DirectorySharedImages
from handlers.journal.directory_lists import DirectoryLists
from handlers.journal.directory_usage import CLOSED, FIRST_EVENT, KV_MARK, OWNER_MARK, expiry_of, measure, owner_of
from handlers.journal.event import Event, image_hash
from handlers.journal.journal import (
    ANYONE,
    MAX_CLAIM_BYTES,
    NO_KEYS,
    EventTaken,
    JournalClosed,
    JournalFull,
    Listed,
    check_expired,
    check_image,
    check_image_name,
    check_owner,
    claim_key,
    expiry,
    is_image_name,
    is_session_id,
    make_listed,
)
from handlers.journal.stored_journal import StoredJournal
from handlers.settings.journal import JournalSettings
from torchmoor.wire.disk_sync import sync_to_disk

CLAIMS = "claims"
MAX_SWEPT = 10_000  # limit of folders and claims that one sweep deletes
LISTED_S = 1_500  # a full sweep lists the sessions that expire until the next one, and some time after it


class DirectoryJournal(StoredJournal):
    """Journals below `root`, which is created if missing. keys: see EventCodec."""

    def __init__(self, root: Path, settings: JournalSettings, keys: Mapping[str, bytes] = NO_KEYS) -> None:
        super().__init__(settings, keys, max_bytes=settings.max_bytes)
        self._root = root
        self._claims = root / CLAIMS
        self._images = DirectorySharedImages(root)
        self._lists = DirectoryLists(root)
        self._expiring = ExpiringSessions()
        files.make_folder(root, parents=True)

    def check_room(self, owner: str) -> None:
        super().check_room(owner)
        free = shutil.disk_usage(self._root).free
        if free < self._settings.min_free_bytes:
            raise self._budget.full(f"the journal's disk has {free} bytes left, too few (journal.min_free_bytes)")

    def append(self, session_id: str, number: int, event: Event, owner: str) -> None:
        data = self._codec.encode(event, session_id)
        if self._lacks_event_before(session_id, number) and not (self._folder(session_id) / CLOSED).exists():
            check_expired(session_id, number)
        folder = self._make_folder(session_id)
        if number == 0:
            _mark(folder, owner)
        try:
            self._create(folder / _name(number), data, owner)
        except FileExistsError as exc:
            raise EventTaken(number) from exc

    def read(self, session_id: str, start: int = 0, max_events: int | None = None) -> list[Event]:
        events: list[Event] = []
        while max_events is None or len(events) < max_events:
            try:
                events.append(self._read_event(session_id, _name(start + len(events))))
            except FileNotFoundError:
                if not self._root.is_dir():
                    raise
                break
        has_gap = not events and self._lacks_event_before(session_id, start)
        try:
            return [self._read_event(session_id, CLOSED)]
        except FileNotFoundError:  # checked last: nothing had been deleted before
            if has_gap:
                check_expired(session_id, start)
            return events

    def _lacks_event_before(self, session_id: str, number: int) -> bool:
        """Return whether the directory, if it is there, has lost the event before this one."""
        return number > 0 and not (self._folder(session_id) / _name(number - 1)).exists() and self._root.is_dir()

    def put_image(self, session_id: str, data: bytes, owner: str) -> str:
        name = image_hash(data)
        folder = self._make_folder(session_id)
        if not (folder / name).is_file():
            self._put(folder / name, data, owner)
        return name

    def _put(self, path: Path, data: bytes, owner: str) -> None:
        try:
            _mark(path.parent, owner)
            self._count(path.parent, owner, self._images.link(owner, path, data))
            self._settle(path)
        except FileNotFoundError:
            if not _is_expired(path.parent):
                raise
        except JournalClosed:
            self._count(path.parent, owner, -self._images.release(owner, path.name))
            raise

    def get_image(self, session_id: str, image: str) -> bytes:
        check_image_name(image)
        return check_image(image, files.read(self._folder(session_id) / image, self._settings.max_image_bytes))

    def put_kv(self, session_id: str, number: int, data: bytes, owner: str) -> bool:
        folder = self._folder(session_id)
        path = folder / f"{KV_MARK}{number:06d}"
        self._budget.check_kv(owner, files.size_of_new(len(data)))
        if shutil.disk_usage(self._root).free - len(data) < self._settings.min_free_bytes:
            raise JournalFull("the journal's disk has too few bytes left for a KV cache (journal.min_free_bytes)")
        before = files.find_size(path)
        try:
            files.replace(path, data)
        except FileNotFoundError:  # the session has ended
            return False
        self._budget.add(owner, expiry(session_id), kv_bytes=files.size_of_new(len(data)) - before)
        if (folder / CLOSED).exists():  # checked after the write: a later close deletes the file
            self._budget.add(owner, expiry(session_id), kv_bytes=-files.remove(path))
            return False
        return True

    def read_kv(self, session_id: str, first: int, count: int, max_bytes: int) -> list[bytes]:
        folder = self._folder(session_id)
        found: list[bytes] = []
        with suppress(FileNotFoundError):
            for number in range(first, first + count):
                found.append(files.read(folder / f"{KV_MARK}{number:06d}", max_bytes))
        return found

    def close(self, session_id: str, event: Event) -> Event:
        folder = self._make_folder(session_id)
        with suppress(FileExistsError):
            self._publish(folder / CLOSED, self._codec.encode(event, session_id), ANYONE)
        sync_to_disk(folder)
        self._clear(folder)
        return self._read_event(session_id, CLOSED)

    def delete(self, session_id: str) -> None:
        folder = self._folder(session_id)
        with suppress(FileNotFoundError):
            self._clear(folder)
            shutil.rmtree(folder)

    def _clear(self, folder: Path) -> None:
        """Delete a session's events and images, and count their bytes no longer."""
        names = os.listdir(folder)
        owner = _owners(names)[-1]
        kv_names = {name for name in names if name.startswith(KV_MARK)}
        self._budget.add(owner, expiry(folder.name), kv_bytes=-sum(files.remove(folder / name) for name in kv_names))
        others = [name for name in names if name != CLOSED and name not in kv_names and owner_of(name) is None]
        num_bytes = sum(files.remove(folder / name) for name in others)
        num_sessions = int(FIRST_EVENT in names)
        self._count(folder, owner, -num_bytes - self._release(names), -num_sessions)

    def _release(self, names: Sequence[str]) -> int:
        """Delete the session's images that no other session has. Return the freed bytes.

        names: of the files in the session's folder.
        """
        images = [name for name in names if is_image_name(name)]
        return sum(self._images.release(owner, image) for owner in _owners(names) for image in images)

    def claim(self, name: str, value: str) -> str:
        path = self._claims / claim_key(name)
        self._make(self._claims)
        try:
            self._create(path, value.encode(), ANYONE)
        except FileExistsError:
            return files.read_beginning(path, MAX_CLAIM_BYTES).decode(errors="replace")
        return value

    def enlist(self, session_id: str, label: str, owner: str) -> None:
        self._lists.add(owner, make_listed(session_id, label))

    def delist(self, session_id: str, label: str, owner: str) -> None:
        self._lists.remove(owner, make_listed(session_id, label))

    def list_owned(self, owner: str) -> list[Listed]:
        return self._lists.read(owner)

    def list_ids(self, cursor: str = "") -> tuple[list[str], str]:
        """Return all ids in one page."""
        return [name for name in os.listdir(self._root) if is_session_id(name)], ""

    def sweep(self, expired_before: int, *, is_full: bool) -> None:
        """Delete the expired sessions that the last full sweep has listed, and those that this worker wrote since.

        is_full: scan the whole directory, which takes about 10 microseconds per file. Measure it, too.
        """
        try:
            if is_full:
                self._scan(expired_before)
            else:
                for name in self._expiring.pop(expired_before, MAX_SWEPT):
                    self._remove_expired(self._root / name)
        finally:
            self._budget.expire(expired_before)

    def _remove_expired(self, folder: Path) -> None:
        with suppress(OSError):  # the next full sweep finds what is left
            names = os.listdir(folder)
            for name in names:
                files.remove(folder / name)
            folder.rmdir()
            self._release(names)

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
                with suppress(FileNotFoundError, IsADirectoryError):  # another instance sweeps too; not a claim
                    if path.stat().st_mtime + self._settings.claim_s < expired_before and num_swept < MAX_SWEPT:
                        path.unlink()
                        num_swept += 1
        os.utime(self._root)  # by the file system's clock, which may differ from this machine's
        self._images.sweep()
        self._lists.sweep(expired_before)
        found = self._budget.begin_measurement()
        measure(self._root, found)
        self._budget.replace(found)

    def _create(self, path: Path, data: bytes, owner: str) -> None:
        """Create a file atomically and durably. Raises FileExistsError, JournalClosed."""
        self._publish(path, data, owner)
        self._settle(path)

    def _settle(self, path: Path) -> None:
        """Make a new file durable, or delete it if the session is closed. Raises JournalClosed."""
        folder = path.parent
        if (folder / CLOSED).exists():  # checked after the link: a later close deletes the file
            path.unlink(missing_ok=True)
            raise JournalClosed()
        try:
            sync_to_disk(folder)
        except FileNotFoundError:
            if not _is_expired(folder):
                raise

    def _publish(self, path: Path, data: bytes, owner: str) -> None:
        """Create a file with all of its content, unless the session is closed. Raises FileExistsError."""
        folder = path.parent
        try:
            if files.create(path, data):
                self._count(folder, owner, files.size_of_new(len(data)), int(path.name == FIRST_EVENT))
        except FileNotFoundError:
            # A close deletes temporary files, too, and so does the sweep of an expired session.
            if not (folder / CLOSED).exists() and not _is_expired(folder):
                raise

    def _count(self, folder: Path, owner: str, num_bytes: int, num_sessions: int = 0) -> None:
        """Count bytes in a session's folder or in the folder of claims. Negative numbers subtract."""
        self._budget.add(owner, expiry_of(folder), num_bytes, num_sessions)

    def _read_event(self, session_id: str, name: str) -> Event:
        """Read an event from its file. Raises FileNotFoundError."""
        data = files.read(self._folder(session_id) / name, self._settings.max_event_bytes)
        return self._codec.decode(data, session_id)

    def _make_folder(self, session_id: str) -> Path:
        folder = self._folder(session_id)
        if self._make(folder):
            self._expiring.add(session_id)
        return folder

    def _make(self, folder: Path) -> bool:
        """Make a folder if it is not there. Return whether it was missing."""
        if folder.is_dir():
            return False
        files.make_folder(folder)
        sync_to_disk(self._root)
        return True

    def _folder(self, session_id: str) -> Path:
        expiry(session_id)  # only a valid id becomes a path
        return self._root / session_id


def _name(number: int) -> str:
    """Return the name of an event's file."""
    return f"{number:08d}"


def _mark(folder: Path, owner: str) -> None:
    """Note the owner of a session in its folder."""
    if check_owner(owner) != ANYONE:
        (folder / f"{OWNER_MARK}{owner}").touch(mode=files.FILE_MODE)


def _owners(names: Iterable[str]) -> list[str]:
    """Return the owners whose images a session may have, its own last. names: of the files in its folder."""
    return [ANYONE, *(owner for name in names if (owner := owner_of(name)) is not None)]


def _is_expired(folder: Path) -> bool:
    """Return True for the folder of an expired session."""
    return expiry_of(folder) <= time.time()


class ExpiringSessions:
    """Sessions that expire before a time (the end), so that most sweeps need not list the directory. Any thread.

    Later sessions take no memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end = 0
        self._order: list[tuple[int, str]] = []  # a heap: expiry, session
        self._names: set[str] = set()

    def begin(self, end: int) -> None:
        """Forget all sessions; from now on list those that expire before this time, in seconds since 1970."""
        with self._lock:
            self._end = end
            self._order, self._names = [], set()

    def add(self, session_id: str) -> None:
        """List a session, if it expires before the end. Raises ValueError if this is not a session's id."""
        expires_at = expiry(session_id)
        with self._lock:
            if expires_at < self._end and session_id not in self._names:
                self._names.add(session_id)
                heappush(self._order, (expires_at, session_id))

    def pop(self, expired_before: int, most: int) -> list[str]:
        """Remove and return up to `most` sessions that expired before this time."""
        popped: list[str] = []
        with self._lock:
            while self._order and self._order[0][0] < expired_before and len(popped) < most:
                popped.append(heappop(self._order)[1])
            self._names.difference_update(popped)
        return popped
