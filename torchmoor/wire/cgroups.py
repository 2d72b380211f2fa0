"""The control groups of this process: a container's, or a service's.

Each group from the process's own up to the root may have a limit, and the lowest applies. Version 1 has a hierarchy for
each controller. A container usually sees its own group as the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[Path]:
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
