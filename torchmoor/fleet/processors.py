"""The number of processors that this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from torchmoor.wire.cgroups import MEMBERSHIP, ROOT, groups


def available_processors(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float:
    """Return the number of processors, or fewer if the process's affinity or a control group's quota allows fewer."""
    found: list[float] = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for folder in groups("cpu", root, membership):
        with suppress(OSError, ValueError):  # not this version, or no limit
            quota, period = (folder / "cpu.max").read_text().split()
            found.append(int(quota) / int(period))
        with suppress(OSError, ValueError):
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # -1: no limit
                found.append(int(quota) / int(period))
    return min(found)
