"""Check that the file systems where tests write have enough space."""

import shutil
import tempfile
from pathlib import Path

import pytest

MIB, GIB = 1 << 20, 1 << 30
NEED_BYTES = 2 * GIB  # what a whole `make test` may use at a time
SHARED_MEMORY = Path("/dev/shm")  # some containers have 64 MiB there
SHARED_BYTES = 32 * MIB


def check_machine() -> None:
    """End the run before the first test if TMPDIR or the shared memory is too small."""
    check_space(Path(tempfile.gettempdir()), NEED_BYTES, "set TMPDIR to a folder on a larger disk")
    if SHARED_MEMORY.is_dir():
        check_space(SHARED_MEMORY, SHARED_BYTES, f"enlarge it: mount -o remount,size=64m {SHARED_MEMORY}")


def check_space(folder: Path, need: int, remedy: str) -> None:
    """End the run with the numbers if the folder's file system has fewer than `need` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise pytest.UsageError(
            f"{folder} has {_size(free)} free and the tests need {_size(need)} there: make room, or {remedy}"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes // MIB} MiB"
