"""The types of a source: a model, its files and its version, and the function that finds a model.

A model is a `.tar.gz`, a `.mar`, or a folder. Its version changes with its content, so that the next look-up notices a
new or replaced model. Sources have no state; handlers/many/residency/disk_cache.py stores models.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from handlers.errors import ModelBroken, ModelUnknown
from handlers.many.model import LoadProgress
from torchmoor.wire.archives import PACKED_SUFFIXES

SOURCE = "handler.many.source"  # the setting that names the source
MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255
MAX_SHOWN_CHARS = 64  # of a name's part in an error


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a model: the archive itself, or a file of its folder."""

    path: str  # below the model's folder; an archive's name
    num_bytes: int
    tag: str  # changes with the content


# Opens one of the model's files for one reading from its beginning, and checks the progress while it is read. Opening
# and reading raise Replaced if the file has changed since it was found, and SourceUnavailable.
OpenFile = Callable[[SourceFile, LoadProgress], BinaryIO]


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A model as its source has it now."""

    name: str
    version: str
    files: Sequence[SourceFile]
    is_archive: bool
    open: OpenFile
    folder: Path | None = None  # set if the files can be used in place

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class Replaced(ModelBroken):
    """A file has changed since the model was found."""


# Looks a model up by its name. Any thread; a call may take as long as the source's time-outs. Raises ModelUnknown,
# SourceUnavailable, and ModelBroken if the model cannot be used.
Find = Callable[[str], SourceModel]


class OpenedSource(NamedTuple):
    """A source of models.

    identity: tells it from others: a directory's path, or the URL and the endpoint of its store.
    """

    find: Find
    identity: str


def check_name(name: str) -> str:
    """Return a model's name as a relative path that is safe to look up. Raises ModelUnknown."""
    path = name.removeprefix("/")  # as some of SageMaker's examples write it
    wrong = next((part for part in path.split("/") if not _is_safe(part)), None)
    if wrong is None and len(path.encode()) > MAX_NAME_BYTES:
        wrong = path
    if wrong is not None:
        shown = ascii(wrong if len(wrong) <= MAX_SHOWN_CHARS else wrong[:MAX_SHOWN_CHARS] + "...")
        raise ModelUnknown(
            f"a model's name is a path below the source, like a/b.tar.gz, without hidden parts, not {shown}"
        )
    return path


def _is_safe(part: str) -> bool:
    """Return False for a part of a name that must not reach a file system or a store."""
    is_visible = part.isprintable() and "\\" not in part and not part.startswith(".")
    return bool(part) and is_visible and len(part.encode()) <= MAX_PART_BYTES


def is_archive(name: str) -> bool:
    return name.endswith(PACKED_SUFFIXES)


def version_of(files: Sequence[SourceFile]) -> str:
    """Return one version for all files of a folder."""
    lines = sorted(f"{file.path}\0{file.num_bytes}\0{file.tag}" for file in files)
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:32]


def unknown_model(name: str) -> ModelUnknown:
    """Return the error for a model or an adapter that its source does not have."""
    return ModelUnknown(
        f"there is no model or adapter {name!r}; each is a folder or a {', '.join(PACKED_SUFFIXES)} file in the source"
    )


def check_number_of_files(number: int, max_files: int) -> None:
    """Raise ModelBroken if a folder has too many files."""
    if number > max_files:
        raise ModelBroken(f"its folder has more files than handler.many.max_files ({max_files})")
