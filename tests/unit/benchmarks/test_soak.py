"""The benchmark that runs for an hour."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FAILING = """
import os
from pathlib import Path
from benchmarks import soak

class Fleet:
    runtime = admin = "http://127.0.0.1:1"  # refuses connections
    pid = os.getpid()

    def processes(self, name):
        return self.pid, self.pid

    def cpu_times(self):
        raise KeyboardInterrupt

soak.soak(Fleet(), Path("/nowhere"), rounds=1, part_s=0.1)
"""


def test_interrupted_benchmark_ends() -> None:
    """Its clients, which try again and again, do not keep it running."""
    done = subprocess.run([sys.executable, "-c", FAILING], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)

    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
