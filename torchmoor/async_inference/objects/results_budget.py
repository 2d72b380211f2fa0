"""The space that results in directories may take: a budget of bytes, and the free space that they must leave.

Each sweep measures the directories. Until the next one, a process adds what it writes itself; what clients delete and
other processes write counts from then on.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from torchmoor.async_inference.objects.locations import STAGING
from torchmoor.config.objects import ObjectSettings

STAGED_TTL_S = 2 * 86_400.0  # no request is published later: six hours to live at most, and MAX_LATE_S
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.part")


def unfinished_name() -> str:
    """Return a new name for a file that is being written; results may have any other."""
    return f".{uuid4().hex}.part"


class ResultsBudget:
    """Counts the bytes of each output directory. Any thread."""

    def __init__(self, settings: ObjectSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._is_stopped = False
        self._used_bytes = dict.fromkeys(map(Path, settings.output_directories), 0)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all directories."""
        return sum(self._used_bytes.values())

    def add(self, root: Path, num_bytes: int) -> None:
        """Count a file that was written."""
        with self._lock:
            self._used_bytes[root] += num_bytes

    def find_shortage(self, root: Path) -> str | None:
        """Return the setting that allows no more results in a directory; None if there is room."""
        if self._used_bytes[root] >= self._settings.max_bytes:
            return "objects.max_bytes"
        folder = next(each for each in (root, *root.parents) if each.exists())
        if shutil.disk_usage(folder).free < self._settings.min_free_bytes:
            return "objects.min_free_bytes"
        return None

    def sweep(self) -> None:
        """Measure the directories, and delete the unfinished files and staged answers of processes that were killed.

        `stop` ends it; the earlier sizes then stay.
        """
        now = time.time()
        unfinished_before, staged_before = now - self._settings.unfinished_ttl_s, now - STAGED_TTL_S
        for root in self._used_bytes:
            files = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
            num_bytes = 0
            for file in files:
                if self._is_stopped:
                    return
                num_bytes += _size(file, unfinished_before, staged_before)
            with self._lock:
                self._used_bytes[root] = num_bytes

    def stop(self) -> None:
        """End a running sweep, which may take minutes on a slow disk."""
        self._is_stopped = True


def _size(path: Path, unfinished_before: float, staged_before: float) -> int:
    """Return what a file takes on the disk; delete it first if it is abandoned and may be deleted.

    A staged answer that is published counts under its other name.
    """
    abandoned_before, is_staged = -math.inf, path.parent.name == STAGING
    if _UNFINISHED.fullmatch(path.name):
        abandoned_before = unfinished_before
    elif is_staged:
        abandoned_before = staged_before
    with suppress(FileNotFoundError):
        found = path.lstat()
        if found.st_mtime < abandoned_before:
            with suppress(PermissionError):  # another user's
                path.unlink()
                return 0
        return 0 if is_staged and found.st_nlink > 1 else found.st_blocks * 512
    return 0
