"""Limits of memory and processor time that control groups set: a container's, or a service's. The lowest applies."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from torchmoor.wire.cgroups import MEMBERSHIP, ROOT, groups

_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
)


def memory_left(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return how many bytes the groups still allow; None if they have no limit.

    The kernel counts cached files as the group's, too, and drops those that are not in use when memory is needed.
    """
    found = []
    for folder in groups("memory", root, membership):
        for limit, usage, unused in _MEMORY_FILES:
            with suppress(OSError, ValueError):  # not this version, or no limit
                left = int((folder / limit).read_text()) - int((folder / usage).read_text())
                with suppress(OSError, ValueError, KeyError):
                    counts = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
                    left += int(counts[unused])
                found.append(left)
    return min(found, default=None)


def processors(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Return how many processors the groups allow; None if they have no limit."""
    found = []
    for folder in groups("cpu", root, membership):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            found.append(int(quota) / int(period))
        with suppress(OSError, ValueError):
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # -1: no limit
                found.append(int(quota) / int(period))
    return min(found, default=None)
