"""Limits of memory and processor time that control groups set: a container's, or a service's.

Each group from this process's own up to the root has a limit, and the lowest applies. Version 1 has a hierarchy for
each controller. A container usually sees its own group as the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
)


def memory_left(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Return how many bytes the groups still allow; None if they have no limit.

    The kernel counts cached files as the group's, too, and drops those that are not in use when memory is needed.
    """
    found = []
    for folder in _groups("memory", root, membership):
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
    for folder in _groups("cpu", root, membership):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            found.append(int(quota) / int(period))
        with suppress(OSError, ValueError):
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # -1: no limit
                found.append(int(quota) / int(period))
    return min(found, default=None)


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of the groups that this process may be in, of either version."""
    places = {root: Path(), root / controller: Path()}
    with suppress(OSError, ValueError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                places[root / controller if controllers else root] = Path(path.lstrip("/"))
    for top, own in places.items():
        for group in (own, *own.parents):
            yield top / group
