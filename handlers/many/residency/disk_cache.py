"""The disk cache: unpacked models on this worker's disk, within a budget of bytes.

    {home}/{hash of source and name}-{hash of version}/marker.json     {home}/.../files/
    {home}/.partial-*                                                  in progress

A folder is filled under a temporary name and renamed, so a folder with a marker is complete. Folders outlive a worker.
The next one uses those of its own source, if the source still has their version; those of other sources only count
against the budget. Eviction deletes the least recently used folder without a lease. download.py fills the folders.

Files are not synced: after a crash of the host, not of the worker, they may contain zeros and fail to load; delete the
directory then.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO
from uuid import uuid4

from handlers.errors import OutOfDisk, SettingsError
from handlers.many.model import DiskLease
from handlers.many.residency.memory_budget import TierBudget
from handlers.settings.many import ManySettings

logger = logging.getLogger(__name__)
MARKER = "marker.json"
FILES = "files"
PARTIAL = ".partial-"
SPARE_BYTES = 64 << 20  # left free on the disk in addition to the budget
MAX_WORKERS = 256  # per host, each with its folder


@dataclass(slots=True, eq=False)
class _Unpacked:
    source: str
    name: str
    version: str
    num_bytes: int
    home: Path
    folder: Path  # of the model, inside home
    num_leases: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.source, self.name, self.version


class DiskCache:
    """Any thread may call any method. home: locked by this process, see take_home. source: `OpenedSource.identity`."""

    def __init__(self, home: Path, max_bytes: int, source: str) -> None:
        self._home = home
        self._source = source
        self._lock = threading.Condition()
        self._leaving_bytes = 0  # of folders that are being deleted
        self._unpacked: OrderedDict[tuple[str, str, str], _Unpacked] = OrderedDict()  # the least recently used first
        self.budget = TierBudget(max_bytes)  # for complete folders and what is being written
        self._restore()

    def models(self) -> list[tuple[str, str, int]]:
        """Return the name, version and bytes of each model of the source, least recently used first.

        Of several versions of a model, the one that was used last.
        """
        with self._lock:
            newest = {each.name: each for each in self._unpacked.values() if each.source == self._source}
            return [
                (each.name, each.version, each.num_bytes)
                for each in self._unpacked.values()
                if newest.get(each.name) is each
            ]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the folders add up to the counted bytes. Call while nothing is being filled."""
        with self._lock:
            held = sum(each.num_bytes for each in self._unpacked.values())
            if held != self.budget.used_bytes:
                raise RuntimeError(f"the disk cache counts {self.budget.used_bytes} bytes but holds {held}")

    def find(self, name: str, version: str) -> DiskLease | None:
        """Lease one version of a model; None if it is not here."""
        with self._lock:
            entry = self._unpacked.get((self._source, name, version))
            return self._lease(entry) if entry is not None and self._touch(entry) else None

    def find_latest(self, name: str) -> DiskLease | None:
        """Lease the version of a model that was used last; None if there is none."""
        with self._lock:
            ours = [each for each in self._unpacked.values() if (each.source, each.name) == (self._source, name)]
            latest = next((each for each in reversed(ours) if self._touch(each)), None)
            return None if latest is None else self._lease(latest)

    def _touch(self, entry: _Unpacked) -> bool:
        """Note a use, so that the next worker knows the order.

        Returns False, and forgets the folder, if another program has deleted it.
        """
        try:
            os.utime(entry.home / MARKER)
        except (FileNotFoundError, NotADirectoryError):
            del self._unpacked[entry.key]
            self.budget.used_bytes -= entry.num_bytes
            shutil.rmtree(entry.home, ignore_errors=True)
            return False
        return True

    def _lease(self, entry: _Unpacked, *, is_new: bool = False) -> DiskLease:
        entry.num_leases += 1
        self._unpacked.move_to_end(entry.key)
        return DiskLease(entry.version, entry.folder, partial(self._release, entry), is_new=is_new)

    def _release(self, entry: _Unpacked) -> None:
        with self._lock:
            entry.num_leases -= 1

    @contextmanager
    def new_folder(self) -> Iterator["PartialFolder"]:
        """Provide a folder to write a model into. It is deleted at the end unless `keep` has been called."""
        folder = PartialFolder(self, Path(tempfile.mkdtemp(prefix=PARTIAL, dir=self._home)))
        try:
            folder.files.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)
            folder.release(folder.num_bytes)

    def keep(self, folder: "PartialFolder", name: str, version: str, model: Path) -> DiskLease:
        """Add a version of a model. model: where it is below folder.files."""
        inner = model.relative_to(folder.path)
        own = {"source": self._source, "name": name, "version": version}
        marker = {**own, "num_bytes": folder.num_bytes, "model": str(inner)}
        (folder.path / MARKER).write_text(json.dumps(marker))
        home = self._home / _folder_name(self._source, name, version)
        with self._lock:
            known = self._unpacked.get((self._source, name, version))
            if known is not None and self._touch(known):
                return self._lease(known)  # another thread was faster, as when a model is unloaded and wanted again
            folder.path.rename(home)
            entry = _Unpacked(self._source, name, version, folder.num_bytes, home, home / inner)
            self._unpacked[entry.key] = entry
            folder.num_bytes = 0  # the cache keeps them
            return self._lease(entry, is_new=True)

    def make_room(self, num_bytes: int) -> None:
        """Reserve bytes, and delete models without a lease for them.

        Raises OutOfDisk, and deletes none, if the bytes of all of them do not suffice.
        """
        while (victim := self._reserve(num_bytes)) is not None:
            shutil.rmtree(victim.home, ignore_errors=True)
            with self._lock:
                self._leaving_bytes -= victim.num_bytes
                self.budget.used_bytes -= victim.num_bytes
                self._lock.notify_all()
            logger.info("model deleted from disk name=%s bytes=%d", victim.name, victim.num_bytes)

    def _reserve(self, num_bytes: int) -> _Unpacked | None:
        """Reserve bytes and return None, or return a forgotten model to delete first. Waits for other deletions."""
        with self._lock:
            while True:
                free = shutil.disk_usage(self._home).free
                over = self.budget.used_bytes + num_bytes - self.budget.max_bytes
                missing = max(over, num_bytes + SPARE_BYTES - free)
                if missing <= 0:
                    self.budget.used_bytes += num_bytes
                    return None
                idle = [each for each in self._unpacked.values() if not each.num_leases]
                if missing > self._leaving_bytes + sum(each.num_bytes for each in idle):
                    what = f"{self.budget.used_bytes} of handler.many.disk_bytes ({self.budget.max_bytes}) are in use"
                    if over <= 0:
                        what = f"the disk of {self._home} has only {free} bytes left, and {SPARE_BYTES} must stay free"
                    raise OutOfDisk(f"there is no room on disk for {num_bytes} bytes more of this model: {what}")
                if missing > self._leaving_bytes:
                    return self._forget(idle[0])
                self._lock.wait()

    def _forget(self, victim: _Unpacked) -> _Unpacked:
        """Move a model out of the cache. Hold the lock."""
        gone = self._home / f"{PARTIAL}{uuid4().hex}"  # a rename needs no space on a full disk
        with suppress(FileNotFoundError):  # another program has deleted it
            victim.home.rename(gone)
        victim.home = gone
        del self._unpacked[victim.key]
        self._leaving_bytes += victim.num_bytes
        return victim

    def release_room(self, num_bytes: int) -> None:
        """Undo make_room for bytes that no model has."""
        with self._lock:
            self.budget.used_bytes -= num_bytes

    def _restore(self) -> None:
        """Adopt an earlier worker's complete folders in the order of their last use, and delete the rest."""
        found: list[tuple[float, _Unpacked]] = []
        for home in self._home.iterdir():
            if not home.is_dir():
                continue
            entry = None if home.name.startswith(PARTIAL) else _read_marker(home)
            if entry is None:
                shutil.rmtree(home, ignore_errors=True)
            else:
                found.append(((home / MARKER).stat().st_mtime, entry))
        for _, entry in sorted(found, key=lambda pair: pair[0]):
            self._unpacked[entry.key] = entry
            self.budget.used_bytes += entry.num_bytes
        if found:
            logger.info("models found on disk models=%d bytes=%d", len(found), self.budget.used_bytes)
        try:
            self.make_room(0)  # the budget may be smaller than it was
        except OutOfDisk as exc:
            logger.warning("%s", exc)


class PartialFolder:
    """A folder that a model is written into, and the bytes that are reserved for it."""

    def __init__(self, cache: DiskCache, path: Path) -> None:
        self.path = path
        self.files = path / FILES
        self.num_bytes = 0
        self._cache = cache

    def take(self, num_bytes: int) -> None:
        """Reserve bytes. Raises OutOfDisk."""
        self._cache.make_room(num_bytes)
        self.num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self._cache.release_room(num_bytes)
        self.num_bytes -= num_bytes


def take_home(settings: ManySettings) -> tuple[Path, IO[str]]:
    """Lock a folder below cache_dir for this process. Returns it and its lock file, which must stay open.

    The lock ends with the process, so that the next worker gets the folder with its content. Raises SettingsError.
    """
    base = Path(settings.cache_dir).expanduser()
    try:
        for number in range(MAX_WORKERS):
            home = base / f"worker-{number}"
            home.mkdir(parents=True, exist_ok=True)
            lock = (home / "lock").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return home, lock
            except BlockingIOError:
                lock.close()
    except OSError as exc:
        raise SettingsError(f"handler.many.cache_dir {base} cannot be used: {exc.strerror or exc}") from exc
    raise SettingsError(f"{MAX_WORKERS} workers use handler.many.cache_dir {base} already; name another directory")


def _read_marker(home: Path) -> _Unpacked | None:
    """Read a complete folder's marker; None if the files do not match it."""
    try:
        marker = json.loads((home / MARKER).read_text())
        own = (str(marker["source"]), str(marker["name"]), str(marker["version"]))
        num_bytes = int(marker["num_bytes"])
        model = home / str(marker["model"])
        held = sum(path.stat().st_size for path in (home / FILES).rglob("*") if path.is_file())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_right = home.name == _folder_name(*own) and held == num_bytes and model.is_dir()
    return _Unpacked(*own, num_bytes, home, model) if is_right else None


def _folder_name(source: str, name: str, version: str) -> str:
    return f"{_digest(json.dumps([source, name]))}-{_digest(version)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
