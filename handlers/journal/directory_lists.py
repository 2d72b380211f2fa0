"""Lists of a directory of journals: an empty file for each listed session.

{root}/listed/{owner}/{session id}.{label}
"""

import os
from contextlib import suppress
from pathlib import Path

from handlers.journal import directory_files as files
from handlers.journal.journal import MAX_LISTED, Listed, check_owner, read_listed
from torchmoor.wire.disk_sync import sync_to_disk

LISTED = "listed"


class DirectoryLists:
    """Safe for all threads, and for all processes that share the directory. root: the journals' directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = root / LISTED

    def add(self, owner: str, listed: Listed) -> None:
        folder = self._folder / check_owner(owner)
        files.make_folder(self._folder)  # without the root, which may not be mounted
        for _ in range(2):  # a sweep deletes empty folders
            files.make_folder(folder)
            with suppress(FileNotFoundError):
                (folder / listed.name).touch(mode=files.FILE_MODE)
                sync_to_disk(folder)
                return
        raise OSError("a list of the journal cannot be written: other workers delete it each time")

    def remove(self, owner: str, listed: Listed) -> None:
        (self._folder / check_owner(owner) / listed.name).unlink(missing_ok=True)

    def read(self, owner: str) -> list[Listed]:
        """Return the sessions of a list, the last to expire first. Raises FileNotFoundError without the root."""
        try:
            names = os.listdir(self._folder / check_owner(owner))
        except FileNotFoundError:
            if not self._root.is_dir():
                raise
            return []
        found = sorted((listed for name in names if (listed := read_listed(name)) is not None), reverse=True)
        return found[:MAX_LISTED]

    def sweep(self, expired_before: int) -> None:
        """Remove the sessions that expired before this time, and empty lists."""
        owners: list[str] = []
        with suppress(FileNotFoundError):
            owners = os.listdir(self._folder)
        for folder in (self._folder / owner for owner in owners):
            with suppress(OSError):  # not empty, not a list, or another worker has removed it
                for name in os.listdir(folder):
                    listed = read_listed(name)
                    if listed is None or listed.expires_at < expired_before:
                        with suppress(FileNotFoundError, IsADirectoryError):
                            (folder / name).unlink()
                folder.rmdir()
