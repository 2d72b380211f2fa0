"""Deletes the folders of instances and models."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

NUM_REMOVERS = 8  # threads


def remove_folder(folder: Path) -> None:
    """Remove a folder as far as possible.

    Several threads remove its contents, because deleting a synced file waits for the disk: one thread took ten seconds
    for the journals of a thousand sessions.
    """
    with suppress(OSError, RuntimeError), ThreadPoolExecutor(NUM_REMOVERS) as removers:
        for path in folder.iterdir():
            removers.submit(shutil.rmtree, path, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
