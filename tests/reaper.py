"""Kill the processes that a test process has started when it ends, however it ends.

Fixtures stop their servers. They do not run if the process crashes, hangs or is killed. Each process that runs tests
therefore starts this program and sets a variable that all its descendants inherit. When the process has ended, this
program kills every process with that variable.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

VARIABLE = "TESTS_STARTED_BY"


def start() -> None:
    """Start the reaper of this process, in a session of its own, which Ctrl-C does not reach."""
    os.environ[VARIABLE] = f"{os.getpid()}-{os.urandom(8).hex()}"
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), os.environ[VARIABLE]]
    # Its standard error is closed, so that the reader of a test run's output does not wait for it.
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    reaper = subprocess.Popen(command, start_new_session=True, cwd="/", **quiet)
    reaper.returncode = 0  # it outlives this process, so Popen must not warn that it is still running


def descendants(value: str) -> list[int]:
    """Return the processes, besides this one, that inherited the value."""
    wanted = f"{VARIABLE}={value}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def main(pid: int, value: str) -> None:
    """Wait for the process to end, then kill its descendants and what they start meanwhile."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    while pids := descendants(value):
        for each in pids:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
