"""Downloads: the newest version of a model from its source, unpacked into the disk cache.

Refuses models above the limits on archives and unpacked files. A folder of a directory source is used in place and
takes no space in the cache.
"""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from handlers.errors import ModelBroken, OutOfDisk, SourceUnavailable
from handlers.many.folder import find_model_folder
from handlers.many.model import DiskLease, LoadProgress
from handlers.many.residency.disk_cache import DiskCache, PartialFolder
from handlers.many.sources.source import Find, Replaced, SourceModel
from handlers.many.unpack import PIECE_BYTES, unpack_tar, unpack_zip
from handlers.settings.many import ManySettings

logger = logging.getLogger(__name__)
MAX_CHANGES = 5  # of a model while it is read


class Downloader:
    """Any thread may call any method."""

    def __init__(self, disk: DiskCache, find: Find, settings: ManySettings) -> None:
        self.disk = disk
        self._find = find
        self._settings = settings

    def fetch(self, name: str, progress: LoadProgress) -> DiskLease:
        """Unpack the newest version of a model. Two threads that want the same one both do the work.

        Raises ModelUnknown, ModelBroken, SourceUnavailable, OutOfDisk, and the errors of progress.
        """
        for _ in range(MAX_CHANGES):
            try:
                lease = self._fetch_newest(name, progress)
            except SourceUnavailable as exc:
                lease = self.disk.find_latest(name)
                if lease is None:
                    raise
                logger.warning("source unavailable, using what is on disk name=%s reason=%s", name, exc)
            if lease is not None:
                return lease
        raise ModelBroken("it is replaced again and again while it is read")

    def _fetch_newest(self, name: str, progress: LoadProgress) -> DiskLease | None:
        """Return the newest version, downloaded if it is not on disk; None if it was replaced meanwhile."""
        found = self._find(name)
        try:
            if found.folder is not None:
                return DiskLease(found.version, find_model_folder(found.folder), None, is_new=False)
            return self.disk.find(name, found.version) or self._download(found, progress)
        except ModelBroken as exc:
            exc.version = found.version
            raise

    def _download(self, found: SourceModel, progress: LoadProgress) -> DiskLease | None:
        """Download and unpack a model; None if it was replaced meanwhile."""
        self._check_size(found)
        try:
            with _translated(), self.disk.new_folder() as folder:
                self._read(found, folder, progress)
                model = find_model_folder(folder.files)
                if self._find(found.name).version != found.version:
                    return None
                return self.disk.keep(folder, found.name, found.version, model)
        except Replaced:
            return None

    def _check_size(self, found: SourceModel) -> None:
        limit = self._settings.max_archive_bytes if found.is_archive else self._settings.max_unpacked_bytes
        if found.num_bytes > limit:
            setting = "max_archive_bytes" if found.is_archive else "max_unpacked_bytes"
            raise ModelBroken(f"it has {found.num_bytes} bytes, more than handler.many.{setting} ({limit})")

    def _read(self, found: SourceModel, folder: PartialFolder, progress: LoadProgress) -> None:
        """Write the source's files."""
        if not found.is_archive:
            progress.begin("download", found.num_bytes)
            for file in found.files:
                folder.take(file.num_bytes)
                with found.open(file, progress) as content:
                    target = folder.files / file.path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("xb") as copy:
                        _copy(content, copy, file.num_bytes, progress)
            return
        (archive,) = found.files
        with found.open(archive, progress) as content:
            if not found.name.endswith(".mar"):
                unpack_tar(content, archive.num_bytes, folder.files, self._settings, folder.take, progress)
                return
            progress.begin("download", archive.num_bytes)
            whole = folder.path / "archive"
            folder.take(archive.num_bytes)  # a zip's directory is at its end
            with whole.open("xb") as copy:
                _copy(content, copy, archive.num_bytes, progress)
        unpack_zip(whole, folder.files, self._settings, folder.take, progress)
        whole.unlink()
        folder.release(archive.num_bytes)


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
