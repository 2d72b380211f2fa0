"""Packaging of a Hugging Face directory: a model.tar.gz or .mar for SageMaker and many.mar, or an archive to chat with.

A .mar of a model that chats has the chat handler, so that `torchmoor up` serves it as an endpoint of its own.
The same files give the same bytes: sorted by name, without times, owners or permissions. Pickled weights, which can run
code when they are loaded, need --allow-pickle.
"""

from __future__ import annotations

import gzip
import os
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from torchmoor.cli.model_files import PICKLED, WEIGHTS, can_chat, choose_files, find_problems
from torchmoor.errors import TorchmoorError
from torchmoor.fleet.archives import Count, add_file, whole_file, with_model, write_archive
from torchmoor.run.endpoint_names import NAME_FORM, is_endpoint_name, suggest_name
from torchmoor.wire.archives import PACKED_SUFFIXES

COMPRESSION = 6
STORED = 0  # compressed weights are 7 % smaller, and take three times as long at each cold start
Report = Callable[[int, int], None]  # bytes done, total bytes


@dataclass(frozen=True, slots=True)
class Packaged:
    """A packaged model. endpoint: the name under which `torchmoor up` serves it; empty if only many models do."""

    path: Path
    files: Sequence[str]
    left_out: Sequence[str]
    num_bytes: int
    endpoint: str


def package(
    folder: Path, output: Path, *, allow_pickle: bool = False, report: Report = lambda done, total: None
) -> Packaged:
    """Write the archive, completely or not at all. Raises TorchmoorError, which lists everything that is missing."""
    if not output.name.endswith(PACKED_SUFFIXES):
        raise TorchmoorError(f"{output.name} must end in .tar.gz or .mar")
    if not os.path.isdir(folder):  # Path.is_dir raises for a name that is too long
        raise TorchmoorError(f"there is no directory {folder}")
    files, left_out = choose_files(folder, allow_pickle=allow_pickle)
    problems = find_problems(folder, files, left_out, allow_pickle=allow_pickle)
    if problems:
        raise TorchmoorError(f"{folder} cannot be packaged: {'; '.join(problems)}")
    total, done = sum((folder / name).stat().st_size for name in files), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done = min(total, done + num_bytes)
        report(done, total)

    endpoint = output.name.removesuffix(".mar") if output.name.endswith(".mar") and can_chat(folder, files) else ""
    if endpoint and not is_endpoint_name(endpoint):
        raise TorchmoorError(
            f"{output.name} would be served as the endpoint {endpoint!r}, and such a name has only {NAME_FORM}: choose "
            f"another file name, such as -o {suggest_name(endpoint)}.mar"
        )
    try:
        if endpoint:
            contents = with_model("chat_entry.py", "chat.yaml", {name: folder / name for name in files})
            write_archive(contents, endpoint, output, count)
        else:
            _write(folder, output, files, count)
    except OSError as exc:
        raise TorchmoorError(f"{output} cannot be written: {exc.strerror or exc}") from exc
    return Packaged(output, files, left_out, output.stat().st_size, endpoint)


def _write(folder: Path, output: Path, files: Sequence[str], count: Count) -> None:
    """Write the checkpoint's files alone, completely or not at all. Raises OSError."""
    write = _write_zip if output.name.endswith(".mar") else _write_tar
    with whole_file(output) as file:
        write(file, folder, files, count)


class _CountedFile:
    """A file that passes the length of each read to `count`."""

    def __init__(self, file: IO[bytes], count: Count) -> None:
        self._file = file
        self._count = count

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._count(len(data))
        return data


class _Gzip:
    """Writes one stream of gzip members, each with its own compression level."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._level = COMPRESSION
        self._member = self._open()
        self._written = 0

    def begin(self, level: int) -> None:
        """Set the compression of the following writes."""
        if level != self._level:
            self._member.close()
            self._level = level
            self._member = self._open()

    def _open(self) -> gzip.GzipFile:
        return gzip.GzipFile(filename="", mode="wb", fileobj=self._output, compresslevel=self._level, mtime=0)

    def write(self, data: bytes) -> int:
        self._written += len(data)
        return self._member.write(data)

    def tell(self) -> int:
        return self._written

    def close(self) -> None:
        self._member.close()


def _write_tar(output: IO[bytes], folder: Path, files: Sequence[str], count: Count) -> None:
    with (
        closing(_Gzip(output)) as packed,
        tarfile.open(fileobj=cast(IO[bytes], packed), mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in files:
            packed.begin(STORED if name.endswith((*WEIGHTS, *PICKLED)) else COMPRESSION)
            with (folder / name).open("rb") as file:
                member = tarfile.TarInfo(name)
                member.size = os.fstat(file.fileno()).st_size
                member.mode = 0o644
                tar.addfile(member, cast(IO[bytes], _CountedFile(file, count)))


def _write_zip(output: IO[bytes], folder: Path, files: Sequence[str], count: Count) -> None:
    with zipfile.ZipFile(output, "w", compresslevel=COMPRESSION) as bundle:
        for name in files:
            compression = zipfile.ZIP_STORED if name.endswith((*WEIGHTS, *PICKLED)) else zipfile.ZIP_DEFLATED
            add_file(bundle, name, folder / name, count, compression=compression)
