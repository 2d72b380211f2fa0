"""Check that the folder where tests write has enough space."""

import shutil
from pathlib import Path

import pytest

GIB = 1 << 30
NEED_GIB = 2.0  # what a whole `make test` may use at a time


def check_space(folder: Path, need_gib: float = NEED_GIB) -> None:
    """End the run with the numbers if the folder's file system has too little free space."""
    free = shutil.disk_usage(folder).free / GIB
    if free < need_gib:
        raise pytest.UsageError(
            f"{folder} has {free:.1f} GiB free and the tests need {need_gib:g} GiB there: "
            "make room, or set TMPDIR to a folder on a larger disk"
        )
