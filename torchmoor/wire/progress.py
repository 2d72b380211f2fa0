"""Lines of progress of a download or a load, at intervals.

A worker logs them after MARK, so that the launcher of `torchmoor up` finds them in the instance's log. Scripts print
them.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

INTERVAL_S = 5.0
WORKER_INTERVAL_S = 2.0  # between a worker's lines, so that the launcher finds a recent one
MARK = "progress: "
_BLOCK_BYTES = 512  # the unit of st_blocks


@contextmanager
def reporting(line: Callable[[], str], report: Callable[[str], None], interval_s: float) -> Iterator[None]:
    """Report the current line at each interval, from a thread, until the block ends. interval_s: 0 for no lines."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(interval_s):
            report(line())

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    if interval_s > 0:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if interval_s > 0:
            thread.join()


def download_line(folder: Path, total: int) -> Callable[[], str]:
    """Return a function that makes a line: how many of the total bytes were written to the folder since this call."""
    before = _folder_bytes(folder)

    def line() -> str:
        done = min(total, max(0, _folder_bytes(folder) - before))
        return f"downloading {done / 1e6:.1f} of {total / 1e6:.1f} MB"

    return line


def _folder_bytes(folder: Path) -> int:
    """Return the bytes on the disk. A file that is written in any order has its final length from the beginning.

    Files and folders that are renamed or deleted meanwhile are left out.
    """
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found = os.lstat(os.path.join(parent, name))
                num_bytes += min(found.st_size, found.st_blocks * _BLOCK_BYTES)
    return num_bytes
