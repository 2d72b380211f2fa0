"""The memory that control groups allow: a container's, or a service's. The lowest limit applies."""

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
