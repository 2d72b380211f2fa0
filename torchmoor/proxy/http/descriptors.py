"""The process's file descriptors: their limit, and the parts of connections and of long bodies."""

from __future__ import annotations

import resource
from contextlib import suppress

BODY_FILES = 1024  # kept for long bodies, or a quarter of what remains after the reserve; the rest is for connections


def raise_limit() -> None:
    """Raise the limit of open files from soft to hard, for this process and those that it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS refuses its own hard limit; the soft one stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def find_limit(*, is_hard: bool = False) -> float:
    """Return how many descriptors a process may open; infinity without a limit. is_hard: after `raise_limit`."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[is_hard]
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def limit_connections(most: int, *, descriptors: float, reserved: int) -> int:
    """Return how many client connections fit into the descriptors beside the reserve and the files; 0 if none does.

    Each counts twice: there are as many connections to instances.
    """
    left = descriptors - reserved
    files = min(left, 4 * BODY_FILES) // 4
    return int(max(0, min(most, (left - files) / 2)))


def limit_files(num_connections: int, *, descriptors: float, reserved: int) -> float:
    """Return how many files of long bodies fit beside the reserve and the client connections; perhaps infinity."""
    return max(0, descriptors - reserved - 2 * num_connections)
