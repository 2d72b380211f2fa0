"""Files and folders of a journal in a directory: who may read them; written completely or not at all, and checked."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from handlers.journal.event import DamagedRecord, check_size

ABANDONED_S = 600.0  # age of an abandoned temporary file; much longer than any operation takes
BLOCK_BYTES = 4096  # of the usual file systems; a file takes whole blocks
FOLDER_MODE = 0o700  # other users cannot reach the files
FILE_MODE = 0o600


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder of the journal, if it is not there. parents: make the missing ones above it, too."""
    path.mkdir(FOLDER_MODE, parents, exist_ok=True)


def read(path: Path, max_bytes: int) -> bytes:
    """Read a whole file. Raises DamagedRecord if it is larger than max_bytes, or not a file."""
    data = read_beginning(path, max_bytes + 1)
    check_size(len(data), max_bytes)
    return data


def read_beginning(path: Path, num_bytes: int) -> bytes:
    """Read up to num_bytes of a file. Raises DamagedRecord if it is not a file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise DamagedRecord("a record is not a file") from exc
        raise
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise DamagedRecord("a record is not a file")
        with open(handle, "rb", closefd=False) as file:
            return file.read(min(num_bytes, info.st_size))
    finally:
        os.close(handle)


def create(path: Path, data: bytes) -> bool:
    """Create a file and its content atomically. Raises FileExistsError if it exists with other content.

    Return False if it exists with this content, as after a link(2) that NFS repeated.
    """
    partial = _write_partial(path.parent, data)
    try:
        os.link(partial, path)
        return True
    except FileExistsError:
        with suppress(FileNotFoundError):  # closed meanwhile
            if read_beginning(path, len(data) + 1) != data:
                raise
        return False
    finally:
        partial.unlink(missing_ok=True)


def replace(path: Path, data: bytes) -> bool:
    """Replace a file by one with this content, atomically. Return True."""
    partial = _write_partial(path.parent, data)
    try:
        partial.replace(path)
        return True
    finally:
        partial.unlink(missing_ok=True)


def _write_partial(folder: Path, data: bytes) -> Path:
    partial = folder / f".{secrets.token_hex(8)}"
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return partial


def remove(path: Path) -> int:
    """Delete a file, if it exists. Return the freed bytes: 0 if the file has other hard links."""
    with suppress(FileNotFoundError):
        info = path.lstat()
        path.unlink()
        return size(info) if info.st_nlink == 1 else 0
    return 0


def remove_abandoned(root: Path, file: "os.DirEntry[str]", info: os.stat_result) -> bool:
    """Delete a temporary file if its writer is gone, and return whether it was.

    root: touched just before, so that its modification time is now by the file system's clock.
    """
    is_temporary = file.name.startswith(".") and file.is_file(follow_symlinks=False)
    if not is_temporary or info.st_mtime >= root.stat().st_mtime - ABANDONED_S:
        return False
    os.unlink(file)
    return True


def find_size(path: Path) -> int:
    """Return a file's bytes on disk; 0 if it is missing."""
    try:
        return size(path.lstat())
    except FileNotFoundError:
        return 0


def size(info: os.stat_result) -> int:
    """Return a file's bytes on disk."""
    return info.st_blocks * 512


def size_of_new(num_bytes: int) -> int:
    """Return the bytes on disk of a file of this length."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
