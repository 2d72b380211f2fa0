"""A process that can open no further file descriptor."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

STANDARD_STREAMS = 3


@contextmanager
def without_free_descriptors() -> Iterator[None]:
    """Lower this process's limit so far that each new descriptor exceeds it; open ones can still be used.

    A descriptor that another thread closes makes no room: the standard streams have all numbers below the limit.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD_STREAMS, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
