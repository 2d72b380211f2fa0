"""The processes that `make bench NAME=proxy` compares."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SHOW = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
from benchmarks.proxy_arms import LOAD_CORE, PROXY_CORE
print(PROXY_CORE, LOAD_CORE)
"""


def test_only_cores_that_the_benchmark_may_use_are_used() -> None:
    """A container may be limited to some of the machine's cores, or to one."""
    last = max(os.sched_getaffinity(0))

    shown = subprocess.run(
        [sys.executable, "-c", SHOW, str(last)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )

    assert shown.stdout.split() == [str(last), str(last)]
