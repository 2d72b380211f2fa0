"""Models in a directory of this host, or one that is mounted."""

import os
import stat
from functools import partial
from pathlib import Path
from typing import BinaryIO

from handlers.errors import ModelUnknown, SourceUnavailable
from handlers.many.folder import list_files
from handlers.many.model import LoadProgress
from handlers.many.sources.source import (
    Replaced,
    SourceFile,
    SourceModel,
    check_number_of_files,
    is_archive,
    unknown_model,
    version_of,
)


class DirectorySource:
    """root: the directory of the models, perhaps on a file system that may be unmounted while the worker runs."""

    def __init__(self, root: Path, max_files: int) -> None:
        self._root = root
        self._max_files = max_files
        self._device = self._find_device()  # of the file system in which a model was found last

    def _find_device(self) -> int | None:
        try:
            return self._root.stat().st_dev
        except OSError:
            return None

    def find(self, name: str) -> SourceModel:
        device = self._find_device()
        try:
            found = find_in(self._root / name, name, self._max_files)
        except ModelUnknown:
            if self._find_device() != self._device:  # all models are missing, and will be back
                raise SourceUnavailable("the models' directory is missing, or its file system is unmounted") from None
            raise
        self._device = device
        return found


def find_in(path: Path, name: str, max_files: int) -> SourceModel:
    """Find the model at this path, through symbolic links: the owner of the directory chooses the models."""
    try:
        status = path.stat()
        open_file = partial(_open, path)
        if stat.S_ISREG(status.st_mode) and is_archive(path.name):
            archive = SourceFile(path.name, status.st_size, _tag(status))
            return SourceModel(name, archive.tag, [archive], is_archive=True, open=open_file)
        if stat.S_ISDIR(status.st_mode):
            files = _walk(path, max_files)
            return SourceModel(name, version_of(files), files, is_archive=False, open=open_file, folder=path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as exc:
        raise SourceUnavailable(f"the models' directory cannot be read: {exc.strerror or exc}") from exc
    raise unknown_model(name)


def _open(path: Path, file: SourceFile, progress: LoadProgress) -> BinaryIO:
    try:
        opened = path.open("rb")
    except OSError as exc:
        raise Replaced(f"its file can no longer be read: {exc.strerror or exc}") from exc
    if _tag(os.fstat(opened.fileno())) != file.tag:
        opened.close()
        raise Replaced("it was replaced while it was read")
    return opened


def _tag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"


def _fail_unless_removed(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _walk(folder: Path, max_files: int) -> list[SourceFile]:
    files: list[SourceFile] = []
    for path in list_files(folder, _fail_unless_removed):
        try:
            status = path.stat()
        except FileNotFoundError:  # a link to nothing, or a file that was removed since it was listed
            continue
        files.append(SourceFile(str(path.relative_to(folder)), status.st_size, _tag(status)))
        check_number_of_files(len(files), max_files)
    return files
