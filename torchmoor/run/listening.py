"""Errors of addresses on which the proxy cannot listen."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from torchmoor.errors import ConfigError


class AddressUnusable(ConfigError):
    """Raised when the proxy cannot listen on an address. problem: the message without what to change."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem + remedy)
        self.problem = problem


@contextmanager
def listening_on(url: str, plane: str = "") -> Iterator[None]:
    """Raise a listener's OSError as AddressUnusable. plane: what begins the names of its options, "" or "admin-"."""
    try:
        yield
    except OSError as error:
        port = f"--{plane}port"
        if error.errno == errno.EADDRINUSE:
            reason, remedy = "the port is in use", f", perhaps by another fleet (torchmoor status); give another {port}"
        else:
            name = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            reason, remedy = name or str(error), f"; give another --{plane}host or {port}"
        remedy += " (in a configuration file: listen)"
        raise AddressUnusable(f"cannot listen on {url}: {reason}", remedy) from error
