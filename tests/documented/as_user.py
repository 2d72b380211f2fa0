"""Start commands as a user does who has only cloned the repository and run `make setup`."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import PROGRAM_S

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SETTINGS = ("AWS_", "PYTHON", "TORCHMOOR_", "MAKE")  # variables that change what a command does


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without settings, with the set-up's programs on the PATH."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(SETTINGS)}
    return {**inherited, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **variables}


def run(*command: str | Path, timeout_s: float = PROGRAM_S) -> str:
    """Run a command in the checkout and return its standard output. Fails with its errors unless it exits with 0."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, (
        f"{done.args} exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    )
    return done.stdout


def make(*goals: str) -> str:
    """Run make with this Python's set-up and the archives as they are, without downloads."""
    return run("make", "-s", "-o", "setup", "-o", "archives", f"VENV={BIN.parent}", *goals, timeout_s=840)


def run_shell(script: str, folder: Path, variables: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run shell commands with loopback as the only network; ports are free there. Fails with their output."""
    done = subprocess.run(
        ["unshare", "--net", "bash", "-c", f"set -euo pipefail\nip link set lo up\n{script}"],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done
