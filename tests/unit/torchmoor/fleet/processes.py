"""Processes as these tests look at them, and the stub that stands for TorchServe."""

from pathlib import Path

STUB = Path(__file__).with_name("stub_torchserve.py")


def is_running(pid: int) -> bool:
    """True unless there is no such process, or only what its parent has not collected."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
