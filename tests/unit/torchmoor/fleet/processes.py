"""Inspect processes, and run the stub that replaces TorchServe."""

from pathlib import Path

STUB = Path(__file__).with_name("stub_torchserve.py")


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
