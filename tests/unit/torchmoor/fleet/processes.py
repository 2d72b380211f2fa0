"""Processes as these tests look at them, and the stub that stands for TorchServe."""

import time
from collections.abc import Callable
from pathlib import Path

STUB = Path(__file__).with_name("stub_torchserve.py")
DEADLINE_S = 15.0


def is_running(pid: int) -> bool:
    """True unless there is no such process, or only what its parent has not collected."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s until {what}"
        time.sleep(0.02)
