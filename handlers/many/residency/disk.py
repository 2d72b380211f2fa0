"""The disk cache: unpacked models on this worker's disk, within a budget of bytes.

    {home}/{hash of name}-{hash of version}/marker.json     {home}/.../files/
    {home}/.partial-*                                       in progress

A folder is filled under a temporary name and renamed, so a folder with a marker is complete. Folders outlive a worker;
the next one uses them if the source still has their version. Eviction deletes the least recently used folder without a
lease. Folders of a directory source are used in place and take no space here.

Files are not synced: after a crash of the host, not of the worker, they may contain zeros and fail to load; delete the
directory then.
"""

import errno
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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from handlers.errors import ModelBroken, OutOfDisk, SettingsError, SourceUnavailable
from handlers.many.folder import find_model_folder
from handlers.many.model import DiskLease, LoadProgress
from handlers.many.residency.memory_budget import TierBudget
from handlers.many.sources.source import Find, Replaced, SourceModel
from handlers.many.unpack import PIECE_BYTES, unpack_tar, unpack_zip
from handlers.settings import ManySettings

logger = logging.getLogger(__name__)
MARKER = "marker.json"
FILES = "files"
PARTIAL = ".partial-"
SPARE_BYTES = 64 << 20  # left free on the disk in addition to the budget
MAX_WORKERS = 256  # per host, each with its folder
MAX_CHANGES = 5  # of a model while it is read


@dataclass(slots=True, eq=False)
class _Unpacked:
    name: str
    version: str
    num_bytes: int
    home: Path
    folder: Path  # of the model, inside home
    num_leases: int = 0


class DiskCache:
    """Any thread may call any method. home: locked by this process, see take_home."""

    def __init__(self, home: Path, find: Find, settings: ManySettings) -> None:
        self._home = home
        self._find_newest = find
        self._settings = settings
        self._lock = threading.Lock()
        self._unpacked: OrderedDict[tuple[str, str], _Unpacked] = OrderedDict()  # the least recently used first
        self.budget = TierBudget(settings.disk_bytes)  # for complete folders and what is being written
        self._restore()

    def models(self) -> list[tuple[str, str, int]]:
        """Return the name, version and bytes of each model, least recently used first."""
        with self._lock:
            return [(each.name, each.version, each.num_bytes) for each in self._unpacked.values()]

    def fetch(self, name: str, progress: LoadProgress) -> DiskLease:
        """Unpack the newest version of a model. Two threads that want the same one both do the work.

        Raises ModelUnknown, ModelBroken, SourceUnavailable, OutOfDisk, and the errors of progress.
        """
        for _ in range(MAX_CHANGES):
            try:
                found = self._find_newest(name)
            except SourceUnavailable as exc:
                lease = self._newest_here(name)
                if lease is None:
                    raise
                logger.warning("source unavailable, using what is on disk name=%s reason=%s", name, exc)
                return lease
            try:
                if found.folder is not None:
                    return DiskLease(found.version, find_model_folder(found.folder), None, is_new=False)
                lease = self._find(name, found.version) or self._fill(found, progress)
            except ModelBroken as exc:
                exc.version = found.version
                raise
            if lease is not None:
                return lease
        raise ModelBroken("it is replaced again and again while it is read")

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the folders add up to the counted bytes. Call while nothing is being filled."""
        with self._lock:
            held = sum(each.num_bytes for each in self._unpacked.values())
            if held != self.budget.used_bytes:
                raise RuntimeError(f"the disk cache counts {self.budget.used_bytes} bytes but holds {held}")

    def _find(self, name: str, version: str) -> DiskLease | None:
        with self._lock:
            entry = self._unpacked.get((name, version))
            if entry is not None and not (entry.home / MARKER).is_file():  # deleted by another program
                del self._unpacked[name, version]
                self.budget.used_bytes -= entry.num_bytes
                shutil.rmtree(entry.home, ignore_errors=True)
                entry = None
            return None if entry is None else self._lease(entry)

    def _newest_here(self, name: str) -> DiskLease | None:
        with self._lock:
            ours = [each for each in self._unpacked.values() if each.name == name]
            return self._lease(ours[-1]) if ours else None

    def _lease(self, entry: _Unpacked, *, is_new: bool = False) -> DiskLease:
        os.utime(entry.home / MARKER)  # keeps the order for the next worker; raises if it was deleted
        entry.num_leases += 1
        self._unpacked.move_to_end((entry.name, entry.version))
        return DiskLease(entry.version, entry.folder, partial(self._give_back, entry), is_new=is_new)

    def _give_back(self, entry: _Unpacked) -> None:
        with self._lock:
            entry.num_leases -= 1

    def _fill(self, found: SourceModel, progress: LoadProgress) -> DiskLease | None:
        """Download and unpack a model; None if it was replaced meanwhile."""
        limit = self._settings.max_archive_bytes if found.is_archive else self._settings.max_unpacked_bytes
        if found.num_bytes > limit:
            setting = "max_archive_bytes" if found.is_archive else "max_unpacked_bytes"
            raise ModelBroken(f"it has {found.num_bytes} bytes, more than handler.many.{setting} ({limit})")
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=self._home))
        space = _Space(self)
        try:
            with _translated():
                files = partial / FILES
                files.mkdir()
                self._read(found, partial, space, progress)
                model = find_model_folder(files).relative_to(partial)
                if self._find_newest(found.name).version != found.version:
                    return None
                return self._keep(found, partial, model, space)
        except Replaced:
            return None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            space.give_back(space.num_bytes)

    def _read(self, found: SourceModel, partial: Path, space: "_Space", progress: LoadProgress) -> None:
        """Write the source's files below partial."""
        files = partial / FILES
        if not found.is_archive:
            progress.begin("download", found.num_bytes)
            for file in found.files:
                space.take(file.num_bytes)
                with found.open(file, progress) as content:
                    target = files / file.path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("xb") as copy:
                        _copy(content, copy, file.num_bytes, progress)
            return
        (archive,) = found.files
        with found.open(archive, progress) as content:
            if not found.name.endswith(".mar"):
                unpack_tar(content, archive.num_bytes, files, self._settings, space.take, progress)
                return
            progress.begin("download", archive.num_bytes)
            whole = partial / "archive"
            space.take(archive.num_bytes)  # a zip's directory is at its end
            with whole.open("xb") as copy:
                _copy(content, copy, archive.num_bytes, progress)
        unpack_zip(whole, files, self._settings, space.take, progress)
        whole.unlink()
        space.give_back(archive.num_bytes)

    def _keep(self, found: SourceModel, partial: Path, model: Path, space: "_Space") -> DiskLease:
        marker = {"name": found.name, "version": found.version, "num_bytes": space.num_bytes, "model": str(model)}
        (partial / MARKER).write_text(json.dumps(marker))
        home = self._home / f"{_digest(found.name)}-{_digest(found.version)}"
        with self._lock:
            known = self._unpacked.get((found.name, found.version))
            if known is not None:  # another thread was faster, as when a model is unloaded and wanted again
                return self._lease(known)
            partial.rename(home)
            entry = _Unpacked(found.name, found.version, space.num_bytes, home, home / model)
            self._unpacked[found.name, found.version] = entry
            space.num_bytes = 0  # the cache keeps them
            return self._lease(entry, is_new=True)

    def _make_room(self, num_bytes: int) -> None:
        """Reserve bytes, and delete models without a lease for them. Raises OutOfDisk."""
        while True:
            with self._lock:
                is_full = not self.budget.has_room(num_bytes)
                if not is_full:
                    free = shutil.disk_usage(self._home).free
                    if free >= num_bytes + SPARE_BYTES:
                        self.budget.used_bytes += num_bytes
                        return
                victim = next((each for each in self._unpacked.values() if not each.num_leases), None)
                if victim is None:
                    what = f"{self.budget.used_bytes} of handler.many.disk_bytes ({self.budget.max_bytes}) are in use"
                    if not is_full:
                        what = f"the disk of {self._home} has only {free} bytes left"
                    raise OutOfDisk(f"there is no room on disk for {num_bytes} bytes more of this model: {what}")
                del self._unpacked[victim.name, victim.version]
                gone = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=self._home))
                victim.home.rename(gone / "old")
            shutil.rmtree(gone, ignore_errors=True)
            with self._lock:
                self.budget.used_bytes -= victim.num_bytes
            logger.info("model deleted from disk name=%s bytes=%d", victim.name, victim.num_bytes)

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
            self._unpacked[entry.name, entry.version] = entry
            self.budget.used_bytes += entry.num_bytes
        if found:
            logger.info("models found on disk models=%d bytes=%d", len(found), self.budget.used_bytes)
        try:
            self._make_room(0)  # the budget may be smaller than it was
        except OutOfDisk as exc:
            logger.warning("%s", exc)


class _Space:
    """The reserved bytes of one model while it is written."""

    def __init__(self, cache: DiskCache) -> None:
        self.num_bytes = 0
        self._cache = cache

    def take(self, num_bytes: int) -> None:
        self._cache._make_room(num_bytes)
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        with self._cache._lock:
            self._cache.budget.used_bytes -= num_bytes
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
    raise SettingsError(f"{MAX_WORKERS} workers use handler.many.cache_dir {base} already")


def _read_marker(home: Path) -> _Unpacked | None:
    """Read a complete folder's marker; None if the files do not match it."""
    try:
        said = json.loads((home / MARKER).read_text())
        name, version, num_bytes = str(said["name"]), str(said["version"]), int(said["num_bytes"])
        model = home / str(said["model"])
        held = sum(path.stat().st_size for path in (home / FILES).rglob("*") if path.is_file())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_right = home.name == f"{_digest(name)}-{_digest(version)}" and held == num_bytes and model.is_dir()
    return _Unpacked(name, version, num_bytes, home, model) if is_right else None


def _copy(content: IO[bytes], copy: IO[bytes], num_bytes: int, progress: LoadProgress) -> None:
    left = num_bytes
    while left:
        piece = content.read(min(left, PIECE_BYTES))
        if not piece:
            raise ModelBroken("it was cut off while it was read")
        copy.write(piece)
        left -= len(piece)
        progress.add(len(piece))


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfDisk("the disk that models are unpacked on is full") from exc
        raise ModelBroken(f"it cannot be unpacked: {exc.strerror or exc}") from exc


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
