"""Lock that lets one fleet at a time use a run directory."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchmoor.errors import LaunchError
from torchmoor.fleet.instance_guard import LOCK_FILE

POLL_S = 0.05


class RunLock:
    """Locks a run directory for a launcher and its guards, which inherit the descriptor and clean up after it.

    Meanwhile systemd-tmpfiles, which deletes old files in /tmp, leaves the directory out.
    """

    def __init__(self, folder: Path, *, timeout_s: float) -> None:
        """timeout_s: how long to wait for an earlier fleet to end."""
        self._path = folder / LOCK_FILE
        self._timeout_s = timeout_s
        self._taking = asyncio.Lock()
        self._descriptor: int | None = None
        self._folder_descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    async def take(self, report: Callable[[str], None]) -> int:
        """Lock the directory, and return the descriptor. Later calls return the same one. Raises LaunchError."""
        async with self._taking:
            if self._descriptor is None:
                self._descriptor = await self._wait(report)
                self._folder_descriptor = _keep_from_cleaners(self._path.parent)
            return self._descriptor

    async def _wait(self, report: Callable[[str], None]) -> int:
        loop = asyncio.get_running_loop()
        deadline, has_reported = loop.time() + self._timeout_s, False
        while True:
            try:
                descriptor = self._try()
            except OSError as error:
                reason = error.strerror or error
                raise LaunchError(f"cannot write to the directory {self._path.parent}: {reason}") from error
            if descriptor is not None:
                return descriptor
            if loop.time() > deadline:
                raise LaunchError(f"another fleet runs in {self._path.parent}; give this one a --run-dir of its own")
            if not has_reported:
                report(f"waiting for the earlier fleet to end in {self._path.parent}")
                has_reported = True
            await asyncio.sleep(POLL_S)

    def _try(self) -> int | None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the previous holder has just removed the directory
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == os.stat(self._path).st_ino:  # otherwise the previous holder removed it
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Remove the lock file and release the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(descriptor)
        folder_descriptor, self._folder_descriptor = self._folder_descriptor, None
        if folder_descriptor is not None:
            os.close(folder_descriptor)


def _keep_from_cleaners(folder: Path) -> int | None:
    """Lock a directory as systemd's tmpfiles.d(5) describes, and return its descriptor; None if that is impossible."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):  # not every network file system has such locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor
