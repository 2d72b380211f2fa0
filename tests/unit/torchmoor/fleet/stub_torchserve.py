"""Stands for `torchserve --foreground`: a wrapper that starts a "JVM", which starts a "worker". Run as a script.

python stub_torchserve.py ignore|heed PID_FILE REPORT

The JVM's pid goes to PID_FILE, as TorchServe does it; REPORT gets the pids of all three when they run. With `ignore`
the JVM takes no notice of SIGTERM.
"""

import os
import signal
import sys
import time
from pathlib import Path


def main(mode: str, pid_file: Path, report: Path) -> int:
    jvm = os.fork()
    if jvm:
        pid_file.write_text(str(jvm))
        return os.waitstatus_to_exitcode(os.waitpid(jvm, 0)[1]) & 0xFF
    if mode == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = os.fork()
    if worker:
        partial = report.with_suffix(".partial")
        partial.write_text(f"{os.getppid()} {os.getpid()} {worker}")
        partial.rename(report)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
