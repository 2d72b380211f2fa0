"""Guards one TorchServe instance: runs it, and makes sure that it never outlives its launcher.

    python -I instance_guard.py FOLDER PID_FILE KILL_AFTER_S COMMAND...

Standard input is a pipe that the launcher holds open. When it closes, the guard sends SIGTERM to the JVM and,
after KILL_AFTER_S (a field of InstanceProcessSettings), SIGKILL to every process in the group, which the guard leads.
Before a regular stop the launcher writes one byte, and then cleans up itself. Without that byte the launcher has died:
each guard then removes its instance's folder, and the last one removes all that the fleet shared.
This file runs on its own and imports only the standard library.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 0.1
ASYNC_FOLDER = "async"  # asynchronous requests and results; only the user removes it
CONTROL_FOLDER = "control"  # the control plane's resources; only the user removes it
MODELS_FOLDER = f"{CONTROL_FOLDER}/models"  # downloaded for created endpoints
SESSION_KEYS_FILE = "session-keys"  # of fleets with a journal that outlives them
LOCK_FILE = ".lock"  # locked by the one launcher, and its guards, that use the directory
JOURNAL_FOLDER = "fleet-journal"  # beside the instances' folders
REMOVED_WITH_FLEET = (JOURNAL_FOLDER, MODELS_FOLDER)
SHARED = {ASYNC_FOLDER, CONTROL_FOLDER, SESSION_KEYS_FILE, LOCK_FILE, JOURNAL_FOLDER}


def main(arguments: list[str]) -> int:
    """Run the command until it ends or the pipe closes. Returns its exit status, or 0 after a stop."""
    folder, pid_file, kill_after_s, command = Path(arguments[0]), Path(arguments[1]), float(arguments[2]), arguments[3:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the pipe stops the guard
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_restore_signals)
    is_stopped = is_launcher_alive = False
    while child.poll() is None and not is_stopped:
        if select.select([0], [], [], POLL_S)[0]:
            received = os.read(0, 4096)
            is_launcher_alive = is_launcher_alive or bool(received)
            is_stopped = not received
    if is_stopped:
        _stop(child, pid_file, kill_after_s)
    _kill_group()
    status = child.wait()
    if not is_stopped:
        return status
    if not is_launcher_alive:
        _clean_up(folder)
    return 0


def _clean_up(folder: Path) -> None:
    """Remove the instance's folder; after the fleet's last instance, also what the fleet shared."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        if {path.name for path in folder.parent.iterdir()} <= SHARED:
            for name in REMOVED_WITH_FLEET:
                shutil.rmtree(folder.parent / name, ignore_errors=True)
            (folder.parent / LOCK_FILE).unlink(missing_ok=True)
            folder.parent.rmdir()


def _restore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _stop(child: subprocess.Popen[bytes], pid_file: Path, kill_after_s: float) -> None:
    """Send SIGTERM to the JVM, whose pid TorchServe writes to a file, and wait."""
    deadline = time.monotonic() + kill_after_s
    try:
        os.kill(int(pid_file.read_text()), signal.SIGTERM)
    except (OSError, ValueError):
        child.terminate()  # the JVM has not started
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _kill_group() -> None:
    """Kill all other processes of the group, repeatedly, because they may fork."""
    while others := _others_in_group():
        for pid in others:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S / 10)


def _others_in_group() -> list[int]:
    """Return the group's other processes, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError, IndexError, ValueError):
            state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == os.getpgrp() and state not in "ZX":
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
