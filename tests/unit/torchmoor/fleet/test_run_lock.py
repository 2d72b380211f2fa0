"""One fleet at a time in a run directory."""

import asyncio
import fcntl
import os
import sys
from pathlib import Path

import pytest

from torchmoor.errors import LaunchError
from torchmoor.fleet.instance_guard import LOCK_FILE
from torchmoor.fleet.run_lock import RunLock


async def test_second_fleet_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """While a fleet runs, a second one is refused with advice; after its end the lock file is gone."""
    first, second, said = RunLock(tmp_path, timeout_s=5), RunLock(tmp_path, timeout_s=0.2), []
    descriptor = await first.take(said.append)
    assert await first.take(said.append) == descriptor

    with pytest.raises(LaunchError, match="--run-dir of its own"):
        await second.take(said.append)
    assert said == [f"waiting for the earlier fleet to end in {tmp_path}"]

    first.release()
    await second.take(said.append)
    second.release()
    assert not (tmp_path / LOCK_FILE).exists()


async def test_the_directory_is_locked_against_cleaners(tmp_path: Path) -> None:
    """systemd-tmpfiles deletes files of /tmp that are ten days old, but locks each directory first."""
    lock = RunLock(tmp_path, timeout_s=5)
    await lock.take(print)
    cleaner = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)

        lock.release()

        fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(cleaner)


async def test_guards_of_a_killed_launcher_hold_it(tmp_path: Path) -> None:
    """Guards of a killed launcher have inherited the lock, and hold it until they end."""
    first, second, waiting = RunLock(tmp_path, timeout_s=5), RunLock(tmp_path, timeout_s=60), asyncio.Event()
    descriptor = await first.take(print)
    guard = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE, pass_fds=(descriptor,)
    )
    os.close(descriptor)  # as the launcher's death does
    taking = asyncio.create_task(second.take(lambda line: waiting.set()))
    await waiting.wait()
    assert not taking.done()

    await guard.communicate(b"\n")

    await taking
    second.release()
