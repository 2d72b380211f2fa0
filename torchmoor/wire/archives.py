"""Archives of models: the ends of their names, and limits of what Python's tarfile and zipfile read whole into memory.

A tar.gz of 700 KB can have a header of 700 MB.
"""

import io
import os
import tarfile
import zipfile
from typing import Any, NoReturn

ARCHIVE_SUFFIX = ".mar"  # TorchServe's, which is a zip
PACKED_SUFFIXES = (".tar.gz", ".tgz", ARCHIVE_SUFFIX)
MAX_HEADER_BYTES = 1 << 16  # of a tar's long names and extra fields


class BoundedTarInfo(tarfile.TarInfo):
    """Refuses long headers, and sparse files, whose maps have no limit. Raises tarfile.ReadError."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if not self.isreg() and self.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError("the archive has a header of more than a file's name needs")
        if self.type == tarfile.GNUTYPE_SPARSE:
            self._refuse_sparse()
        return super()._proc_member(tar)  # type: ignore[misc,no-any-return]

    def _refuse_sparse(self, *_: Any) -> NoReturn:
        raise tarfile.ReadError("the archive has a sparse file; only files and folders may be in it")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


class BoundedZip(io.FileIO):
    """A zip whose directory, which is read at once, has at most max_read_bytes. Raises zipfile.BadZipFile."""

    def __init__(self, path: os.PathLike[str], max_read_bytes: int) -> None:
        super().__init__(path)
        self._max_read_bytes = max_read_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > self._max_read_bytes:
            raise zipfile.BadZipFile("the archive's directory is larger than any model's")
        return super().read(size)
