"""The space that journals in a directory may take: a budget of bytes, and the free space that they must leave.

Each sweep measures the directory. Until the next one, a worker adds what it writes itself; what other workers write
counts from then on.
"""

import os
import shutil
import threading
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from handlers.journal.journal import JournalFull

ABANDONED_S = 600.0  # since a temporary file was written; much longer than any operation takes
BLOCK_BYTES = 4096  # of the usual file systems; a file takes whole blocks


class DiskBudget:
    """Counts the bytes of a directory of journals. Any thread.

    max_bytes: of the directory. min_free_bytes: that its file system must have.
    """

    def __init__(self, root: Path, max_bytes: int, min_free_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._lock = threading.Lock()
        self.used_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count a file of this size that was written."""
        with self._lock:
            self.used_bytes += -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def remove(self, path: Path) -> None:
        """Delete a file, if it is there, and count its bytes no longer."""
        with suppress(FileNotFoundError):
            num_bytes = _size(path.lstat())
            path.unlink()
            with self._lock:
                self.used_bytes -= min(num_bytes, self.used_bytes)

    def remove_folder(self, folder: Path, num_measured: int) -> None:
        """Delete a folder of files and count their bytes no longer.

        num_measured: its bytes when it was measured, which count no longer if another worker has deleted it.
        """
        with suppress(OSError):  # the next full sweep finds what is left
            for path in folder.iterdir():
                self.remove(path)
                num_measured = 0
            folder.rmdir()
        with self._lock:
            self.used_bytes -= min(num_measured, self.used_bytes)

    def check_room(self) -> None:
        """Raise JournalFull if the directory has no room for another session."""
        if self.used_bytes >= self._max_bytes:
            raise JournalFull(f"the journal holds {self.used_bytes} bytes, the most it may hold (journal.max_bytes)")
        free = shutil.disk_usage(self._root).free
        if free < self._min_free_bytes:
            raise JournalFull(f"the journal's disk has {free} bytes left, too few (journal.min_free_bytes)")

    def measure(self, folders: Set[str] = frozenset()) -> dict[str, int]:
        """Count the bytes of all files, and delete temporary files whose writers are gone.

        Return the bytes of those of the folders that exist.
        """
        os.utime(self._root)  # by the clock of the file system, which may differ from this machine's
        abandoned_before = self._root.stat().st_mtime - ABANDONED_S
        used_bytes = 0
        sizes: dict[str, int] = {}
        for folder in self._root.iterdir():
            before = used_bytes
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:  # another worker sweeps
                for file in files:
                    info = file.stat(follow_symlinks=False)
                    is_temporary = file.name.startswith(".") and file.is_file(follow_symlinks=False)
                    if is_temporary and info.st_mtime < abandoned_before:
                        os.unlink(file)
                    else:
                        used_bytes += _size(info)
            if folder.name in folders:
                sizes[folder.name] = used_bytes - before
        with self._lock:
            self.used_bytes = used_bytes
        return sizes


def _size(info: os.stat_result) -> int:
    """Return what a file takes on the disk."""
    return info.st_blocks * 512
