"""Where models come from: a directory here; handlers/many/sources/s3.py has the one in S3.

A model is a `.tar.gz`, a `.mar`, or a folder. Its version is anything that changes with its content: what is added or
replaced while the worker runs is found by asking again. Sources keep nothing; handlers/many/archives/disk.py does.
"""

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from handlers.errors import ConfigError, ModelBroken, ModelUnknown, SourceUnavailable
from handlers.many.model import Progress
from handlers.settings import ManySettings

ARCHIVES = (".tar.gz", ".tgz", ".mar")
MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255
MAX_GIVEN = 10_000
FILE_URL = "file://"


@dataclass(frozen=True, slots=True)
class File:
    """One file of a model: the archive, whose path is its name, or one of the files of a folder."""

    path: str  # below the model's folder
    num_bytes: int
    tag: str  # changes with the content


@dataclass(frozen=True, slots=True)
class Found:
    """A model as its source has it at this moment."""

    name: str
    version: str
    files: Sequence[File]
    is_archive: bool
    folder: Path | None = None  # where the files lie, if they can be used where they are

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class Replaced(ModelBroken):
    """A file is not the one that was found any more: look again."""


class ModelSource(Protocol):
    """All methods may be called from any thread and may take as long as the source's time-outs."""

    def find(self, name: str) -> Found:
        """Raises ModelUnknown, ModelBroken if there is no use in reading it, SourceUnavailable."""
        ...

    def open(self, found: Found, file: File, progress: Progress) -> BinaryIO:
        """The bytes of one of its files, to be read once from the beginning; progress counts them.

        Opening and reading raise Replaced if the file has changed since it was found, and SourceUnavailable.
        """
        ...


def check_name(name: str) -> str:
    """A model's name as a relative path, safe to be looked up. Raises ModelUnknown."""
    path = name.removeprefix("/")  # as some of SageMaker's examples write it
    parts = path.split("/")
    is_safe = (
        path.isprintable()
        and "\\" not in path
        and len(path.encode(errors="replace")) <= MAX_NAME_BYTES
        and all(part and not part.startswith(".") and len(part.encode()) <= MAX_PART_BYTES for part in parts)
    )
    if not is_safe:
        raise ModelUnknown("a model's name is a path below the models' place, like a/b.tar.gz, without hidden parts")
    return path


def is_archive(name: str) -> bool:
    return name.endswith(ARCHIVES)


def version_of(files: Sequence[File]) -> str:
    """One for all of a folder's files."""
    lines = sorted(f"{file.path}\0{file.num_bytes}\0{file.tag}" for file in files)
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:32]


class DirectorySource:
    """A directory on this host, or one that is mounted. Symbolic links in it are its owner's business and followed."""

    def __init__(self, root: Path, max_files: int) -> None:
        self._root = root
        self._max_files = max_files

    def find(self, name: str) -> Found:
        return find_in(self._root / name, name, self._max_files)

    def open(self, found: Found, file: File, progress: Progress) -> BinaryIO:
        return open_file(self._root / found.name, file, progress)


def find_in(path: Path, name: str, max_files: int) -> Found:
    """The model that lies at this path."""
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and is_archive(path.name):
            archive = File(path.name, status.st_size, _tag(status))
            return Found(name, archive.tag, [archive], is_archive=True)
        if stat.S_ISDIR(status.st_mode):
            files = _walk(path, max_files)
            return Found(name, version_of(files), files, is_archive=False, folder=path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as exc:
        raise SourceUnavailable(f"the models' directory cannot be read: {exc.strerror or exc}") from exc
    raise ModelUnknown(f"there is no model {name!r}; models are {', '.join(ARCHIVES)} files and folders")


def open_file(path: Path, file: File, progress: Progress) -> BinaryIO:
    try:
        opened = path.open("rb")
    except OSError as exc:
        raise Replaced(f"its file cannot be read any more: {exc.strerror or exc}") from exc
    if _tag(os.fstat(opened.fileno())) != file.tag:
        opened.close()
        raise Replaced("it was replaced while it was read")
    return opened


def _tag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"


def _walk(folder: Path, max_files: int) -> list[File]:
    """A folder's files. Hidden ones, like what an editor or a copy in progress leaves, do not belong to the model."""
    files: list[File] = []
    for base, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if not each.startswith(".")]
        for name in names:
            if not name.startswith("."):
                path = Path(base, name)
                status = path.stat()
                files.append(File(str(path.relative_to(folder)), status.st_size, _tag(status)))
        if len(files) > max_files:
            raise ModelBroken(f"its folder has more files than handler.many.max_files ({max_files})")
    return files


class NoSource:
    """Has no model of its own: all are given."""

    def find(self, name: str) -> Found:
        raise ModelUnknown(f"no model {name!r} has been loaded, and handler.many.source names no place to find it")

    def open(self, found: Found, file: File, progress: Progress) -> BinaryIO:
        raise Replaced("it has been unloaded")


class GivenSource:
    """Another source, and beside it models that were given by name and url, as SageMaker gives them to a container.

    roots: directories; only what lies below one of them can be given.
    """

    def __init__(self, source: ModelSource, roots: Sequence[str], max_files: int) -> None:
        self._source = source
        self._roots = [Path(root).resolve() for root in roots]
        self._max_files = max_files
        self._given: dict[str, Path] = {}

    def give(self, name: str, url: str) -> None:
        """From now on the name means what lies there. Raises ModelUnknown if that may not be."""
        path = Path(url.removeprefix(FILE_URL)).resolve()
        if not any(path.is_relative_to(root) for root in self._roots):
            raise ModelUnknown("the url must be a path below one of the directories in handler.many.url_roots")
        if not path.exists():
            raise ModelUnknown("there is nothing at the url")
        if len(self._given) >= MAX_GIVEN and name not in self._given:
            raise ModelUnknown(f"{MAX_GIVEN} models have been given by url; unload some")
        self._given[name] = path

    def forget(self, name: str) -> None:
        self._given.pop(name, None)

    def find(self, name: str) -> Found:
        path = self._given.get(name)
        return self._source.find(name) if path is None else find_in(path, name, self._max_files)

    def open(self, found: Found, file: File, progress: Progress) -> BinaryIO:
        path = self._given.get(found.name)
        return self._source.open(found, file, progress) if path is None else open_file(path, file, progress)


def open_source(settings: ManySettings, archive: Path) -> ModelSource:
    """archive: what a relative directory begins at. Raises ConfigError."""
    if not settings.source:
        return NoSource()
    if settings.source.startswith("s3://"):
        from handlers.many.sources.s3 import open_s3

        return open_s3(settings)
    if "://" in settings.source:
        raise ConfigError("handler.many.source must be a directory or s3://bucket/prefix")
    root = (archive / Path(settings.source).expanduser()).resolve()
    if not root.is_dir():
        raise ConfigError(f"handler.many.source: there is no directory {root}")
    return DirectorySource(root, settings.max_files)
