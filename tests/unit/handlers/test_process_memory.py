"""Freed memory returns to the system."""

import json
import subprocess
import sys

import pytest

from handlers.worker.process_memory import FREED_BYTES, HeapTrimmer

MB = 1 << 20


class Heap:
    """A heap whose freed bytes the test sets; a trim does not lower them."""

    def __init__(self) -> None:
        self.freed = 5 * FREED_BYTES
        self.num_trims = 0

    def trim(self) -> None:
        self.num_trims += 1


def test_the_heap_is_trimmed_when_it_has_kept_much_since_the_last_trim() -> None:
    """The heap is trimmed for memory freed since the last trim, because the count includes what was returned then."""
    heap = Heap()
    trimmer = HeapTrimmer(lambda: heap.freed, heap.trim)
    expected = 0
    for change, is_due in (
        (0, 0),
        (FREED_BYTES - 1, 0),
        (1, 1),
        (0, 0),
        (1000, 0),
        (-FREED_BYTES, 0),
        (FREED_BYTES, 1),
    ):
        heap.freed += change
        expected += is_due

        trimmer.check()

        assert heap.num_trims == expected


MEASURE = """
import json, time
from pathlib import Path
from handlers.worker.process_memory import bound_freed_memory

def memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

bound_freed_memory()
before = memory() + 50 * 100_000
bodies, small = [], []
for _ in range(50):
    bodies.append(b"x" * 5_900_000)
    small.append(b"y" * 100_000)
most = memory() - before
bodies.clear()
deadline = time.monotonic() + 60
while memory() - before > 25 << 20 and time.monotonic() < deadline:
    time.sleep(0.1)
print(json.dumps([most, memory() - before]))
"""


@pytest.mark.slow
def test_freed_blocks_between_others_return_to_the_system() -> None:
    """Freed blocks below the automatic return size, each under a small block in use, return to the system."""
    run = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=280)

    most, rest = json.loads(run.stdout)
    assert most > 250 * MB
    assert rest < 25 * MB
