"""Look at the processes that tests have started."""

import psutil


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def children_of(pid: int) -> list[int]:
    """Return the running children of a process; none if it has ended."""
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children if is_running(child.pid)]
