"""The measurement of a directory of journals."""

import os
from contextlib import suppress
from pathlib import Path

from handlers.journal import directory_files as files
from handlers.journal.budget import NEVER, JournalUsage
from handlers.journal.directory_images import PICTURES
from handlers.journal.directory_lists import LISTED
from handlers.journal.journal import ANYONE, expiry, is_image_name, is_owner, is_session_id

FIRST_EVENT = "00000000"
CLOSED = "closed"
KV_MARK = "kv."  # the beginning of the name of a part of a KV cache
OWNER_MARK = "owner."  # the beginning of an empty file's name, whose end is the session's owner


def measure(root: Path, found: JournalUsage) -> None:
    """Count all files and open sessions. Delete temporary files whose writers are gone.

    Touch the root first: its modification time is the present by the file system's clock.
    """
    for folder in root.iterdir():
        if folder.name in (PICTURES, LISTED):
            continue
        owner, num_bytes, kv_bytes, names = ANYONE, 0, 0, set()
        # Another worker sweeps, too; and only root can read lost+found.
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(folder) as entries:
            for file in entries:
                if file.name.startswith(OWNER_MARK):
                    owner = owner_of(file.name) or owner
                    continue
                names.add(file.name)
                info = file.stat(follow_symlinks=False)
                if file.name.startswith(KV_MARK):
                    kv_bytes += files.size(info)
                elif not files.remove_abandoned(root, file, info):
                    num_bytes += _share(file.name, info)
        is_open = FIRST_EVENT in names and CLOSED not in names
        found.add(owner, expiry_of(folder), num_bytes, int(is_open), kv_bytes)


def owner_of(name: str) -> str | None:
    """Return the owner that is part of this name of a file in a session's folder; None for other files."""
    owner = name.removeprefix(OWNER_MARK)
    return owner if name.startswith(OWNER_MARK) and is_owner(owner) else None


def _share(name: str, info: os.stat_result) -> int:
    """Return a file's bytes; for an image, the share of one of the sessions that have it."""
    num_sessions = max(1, info.st_nlink - 1) if is_image_name(name) else 1
    return files.size(info) // num_sessions


def expiry_of(folder: Path) -> int:
    """Return when the session of a folder expires; NEVER for another folder."""
    return expiry(folder.name) if is_session_id(folder.name) else NEVER
