"""What the processes of a fleet have used of the processor."""

import subprocess
import sys
from pathlib import Path

from benchmarks.fleet import Fleet

USED_S = 0.5
BUSY = f"""
import sys, time
while time.process_time() < {USED_S}: pass
print("done", flush=True)
sys.stdin.read()
"""
WAITING = "import subprocess, sys; subprocess.run(sys.argv[1:])"


def test_time_of_what_a_worker_has_started_is_the_workers(tmp_path: Path) -> None:
    """A chat worker renders templates in a process of its own; its time is not the proxy's."""
    java = tmp_path / "java"  # processes are known by this name
    java.symlink_to("/bin/sh")
    template_process = [sys.executable, "-c", BUSY]
    worker = [sys.executable, "-c", WAITING, *template_process]
    jvm = [str(java), "-c", '"$@"; true', "sh", *worker]
    proxy = [sys.executable, "-c", WAITING, *jvm]

    with subprocess.Popen(proxy, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        times = Fleet(process, "", "").cpu_times()

    assert times.proxy_s < USED_S / 2 < times.worker_s
    assert len(times.threads_s) == 1, "the worker's own thread"
