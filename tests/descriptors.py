"""Prevent the test's process from opening further file descriptors."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

STANDARD_STREAMS = 3


@contextmanager
def without_free_descriptors() -> Iterator[None]:
    """Lower this process's limit so that each new descriptor exceeds it; open descriptors remain usable.

    A descriptor that another thread closes makes no room: the standard streams have all numbers below the limit.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD_STREAMS, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
