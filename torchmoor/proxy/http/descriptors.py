"""The process's file descriptors: their limit, the part of it for client connections, and the errors of a shortage."""

from __future__ import annotations

import errno
import resource
from contextlib import suppress

_SHORTAGE = (errno.EMFILE, errno.ENFILE)


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
    """Return how many client connections fit into the descriptors beside the reserve; 0 if none does.

    Each counts twice: there are as many connections to instances.
    """
    return int(max(0, min(most, (descriptors - reserved) // 2)))


def is_shortage(error: OSError) -> bool:
    """Return True if the process or the machine has no free descriptor."""
    return error.errno in _SHORTAGE
