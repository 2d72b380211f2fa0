"""Unpacks untrusted archives: `.tar.gz`, read once from front to end, and `.mar`, which is a zip.

Writes only files and folders below the given folder. Refuses everything else with the reason: links, devices, paths out
of the folder, too many files, too many bytes, a too large compression ratio. Skips SageMaker's `code/`: nothing in an
archive is executed. Bytes are reserved before they are written (Take), and counted by the load's progress.
"""

import gzip
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

from handlers.errors import ModelBroken
from handlers.many.folder import CODE
from handlers.many.model import LoadProgress
from handlers.settings.many import ManySettings
from torchmoor.wire.archives import BoundedTarInfo, BoundedZip

Take = Callable[[int], None]  # reserves this number of bytes; raises OutOfDisk
PIECE_BYTES = 1 << 20
MAX_DIRECTORY_BYTES = 4 << 20  # of a zip: about 30,000 entries
MIN_ALLOWED_BYTES = 1 << 20  # the ratio is not checked below: a tar of small files is mostly zeros
MAX_PATH_BYTES = 1024
MAX_PART_BYTES = 255  # of a path's part, by Linux's file systems
MAX_DEPTH = 16
_ZIP_KINDS = (0, stat.S_IFREG, stat.S_IFDIR)  # 0: written by a system without modes


def unpack_tar(
    archive: BinaryIO, num_bytes: int, into: Path, limits: ManySettings, take: Take, progress: LoadProgress
) -> None:
    """Unpack a .tar.gz of num_bytes. Raises ModelBroken, and the errors of take and progress."""
    progress.begin("unpack", num_bytes)
    allowance = _Allowance(num_bytes, limits)
    stream = _Unzipped(archive, allowance, progress)
    tree = _Tree(into, limits, take)
    try:
        with tarfile.open(
            fileobj=cast(IO[bytes], stream), mode="r|", bufsize=PIECE_BYTES, tarinfo=BoundedTarInfo
        ) as tar:
            for member in tar:
                tree.count(member.name)
                if member.isdir():
                    tree.add_folder(member.name)
                elif not member.isreg() or member.issparse():
                    is_link = member.islnk() or member.issym()
                    raise _refused(member.name, "link" if is_link else "device, pipe or sparse file")
                elif tree.is_wanted(member.name):
                    allowance.check(member.size)  # before other models leave the disk for it
                    content = tar.extractfile(member)
                    assert content is not None
                    tree.add_file(member.name, content, member.size)
        stream.drain()  # so that gzip's checksum at the end is checked
    except (
        tarfile.TarError,
        EOFError,
        zlib.error,
        gzip.BadGzipFile,
        ValueError,
        OverflowError,
        RecursionError,  # of headers that follow headers
    ) as exc:
        raise ModelBroken(f"the archive is damaged, or is not a .tar.gz: {exc}") from exc


def unpack_zip(archive: Path, into: Path, limits: ManySettings, take: Take, progress: LoadProgress) -> None:
    """Unpack a .mar. Raises ModelBroken, and the errors of take and progress."""
    num_bytes = archive.stat().st_size
    progress.begin("unpack", num_bytes)
    allowance = _Allowance(num_bytes, limits)
    tree = _Tree(into, limits, take)
    try:
        with BoundedZip(archive, MAX_DIRECTORY_BYTES) as file, zipfile.ZipFile(file) as bundle:
            for member in bundle.infolist():
                tree.count(member.filename)
                allowance.spend(member.file_size)
                progress.add(member.compress_size)
                if member.is_dir():
                    tree.add_folder(member.filename)
                elif stat.S_IFMT(member.external_attr >> 16) not in _ZIP_KINDS:
                    is_link = stat.S_ISLNK(member.external_attr >> 16)
                    raise _refused(member.filename, "link" if is_link else "device or pipe")
                elif member.flag_bits & 1:
                    raise ModelBroken("the archive is encrypted")
                elif tree.is_wanted(member.filename):
                    with bundle.open(member) as content:
                        tree.add_file(member.filename, content, member.file_size, progress)
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        EOFError,
        zlib.error,
        lzma.LZMAError,
        ValueError,
        RuntimeError,
        OverflowError,
    ) as exc:
        raise ModelBroken(f"the archive is damaged, or is not a .mar: {exc}") from exc


class _Allowance:
    """Limits the unpacked bytes of an archive."""

    def __init__(self, num_bytes: int, limits: ManySettings) -> None:
        self._by_ratio = max(int(num_bytes * limits.max_ratio), MIN_ALLOWED_BYTES)
        self._by_size = limits.max_unpacked_bytes
        self._spent = 0

    def spend(self, amount: int) -> None:
        self._spent += amount
        self.check(0)

    def check(self, num_bytes: int) -> None:
        """Raise ModelBroken if another num_bytes would exceed a limit."""
        if self._spent + num_bytes > self._by_size:
            raise ModelBroken(f"it unpacks to more than handler.many.max_unpacked_bytes ({self._by_size})")
        if self._spent + num_bytes > self._by_ratio:
            raise ModelBroken("its unpacked size is more than handler.many.max_ratio times its own")


class _Tree:
    """The folder being filled. A file is written once, and never through a link, since none is created."""

    def __init__(self, root: Path, limits: ManySettings, take: Take) -> None:
        self._root = root
        self._max_files = limits.max_files
        self._take = take
        self._num_members = 0

    def count(self, name: str) -> None:
        self._num_members += 1
        if self._num_members > self._max_files:
            raise ModelBroken(f"the archive has more files than handler.many.max_files ({self._max_files})")
        path = PurePosixPath(name)
        is_safe = (
            not path.is_absolute()
            and ".." not in path.parts
            and "\\" not in name
            and "\0" not in name
            and len(path.parts) <= MAX_DEPTH
            and len(os.fsencode(name)) <= MAX_PATH_BYTES
            and all(len(os.fsencode(part)) <= MAX_PART_BYTES for part in path.parts)
        )
        if not is_safe:
            raise ModelBroken(f"{_shown(name)} in the archive is not a path below its top")

    def is_wanted(self, name: str) -> bool:
        """Return False for SageMaker's code, at the top or in the model's folder, and for macOS metadata."""
        parts = PurePosixPath(name).parts
        return (
            CODE not in parts[:-1] and "__MACOSX" not in parts and not any(part.startswith("._") for part in parts[-1:])
        )

    def add_folder(self, name: str) -> None:
        if self.is_wanted(f"{name}/x"):
            try:
                (self._root / name).mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as exc:
                raise ModelBroken(f"{_shown(name)} in the archive is both a file and a folder") from exc

    def add_file(self, name: str, content: IO[bytes], num_bytes: int, progress: LoadProgress | None = None) -> None:
        """Write a file. progress: checked meanwhile, unless reading does that."""
        path = self._root / name
        self._take(num_bytes)
        left = num_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            opened = path.open("xb")
        except (FileExistsError, NotADirectoryError) as exc:
            raise ModelBroken(f"{_shown(name)} is in the archive twice, or is both a file and a folder") from exc
        with opened as file:
            while left:
                piece = content.read(min(left, PIECE_BYTES))
                if not piece:
                    raise EOFError(f"it ends in the middle of {_shown(name)}")
                left -= len(piece)
                file.write(piece)
                if progress is not None:
                    progress.check()


class _Unzipped:
    """Decompresses gzip; spends the allowance for every byte, and counts the compressed bytes as progress."""

    def __init__(self, archive: BinaryIO, allowance: _Allowance, progress: LoadProgress) -> None:
        self._gzip = gzip.GzipFile(fileobj=cast(IO[bytes], _CountedReader(archive, progress)), mode="rb")
        self._allowance = allowance

    def read(self, size: int) -> bytes:
        data = self._gzip.read(size)
        self._allowance.spend(len(data))
        return data

    def drain(self) -> None:
        while self.read(PIECE_BYTES):
            pass


class _CountedReader:
    def __init__(self, archive: BinaryIO, progress: LoadProgress) -> None:
        self._archive = archive
        self._progress = progress

    def read(self, size: int) -> bytes:
        data = self._archive.read(size)
        self._progress.add(len(data))
        return data


def _refused(name: str, kind: str) -> ModelBroken:
    return ModelBroken(f"{_shown(name)} in the archive is a {kind}; only files and folders may be")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 100 else f"{name[:100]}...")
