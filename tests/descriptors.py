"""A process without a free file descriptor."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def without_free_descriptors() -> Iterator[Callable[[], None]]:
    """Lower this process's limit to its highest descriptor, and use those below it.

    Yields a function that uses those that other threads have freed since then.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def fill() -> None:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    try:
        fill()
        yield fill
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)
