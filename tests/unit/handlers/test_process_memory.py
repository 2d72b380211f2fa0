"""The memory that models may take, and the return of freed memory to the system."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from handlers.worker import process_memory
from handlers.worker.process_memory import FREED_BYTES, HeapTrimmer, choose_device_bytes, group_limits
from tests.waiting import PROGRAM_S

MB = 1 << 20


def test_models_take_half_of_what_the_groups_of_this_process_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service of systemd is in a group below others, each of which may have a limit."""
    membership, own = tmp_path / "self", tmp_path / "a.slice" / "b.service"
    membership.write_text("0::/a.slice/b.service\n")
    own.mkdir(parents=True)
    for group, limit in ((own, "max"), (own.parent, str(4 * MB))):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.stat").write_text("anon 1000\nfile 1000\n")
    monkeypatch.setattr(process_memory, "group_limits", partial(group_limits, tmp_path, membership))

    assert choose_device_bytes(torch.device("cpu")) == 2 * MB


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
    run = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=PROGRAM_S)

    most, rest = json.loads(run.stdout)
    assert most > 250 * MB
    assert rest < 25 * MB
