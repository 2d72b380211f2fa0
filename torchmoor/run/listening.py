"""Errors of addresses on which the proxy cannot listen."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from torchmoor.errors import ConfigError


@contextmanager
def listening_on(url: str, plane: str = "") -> Iterator[None]:
    """Raise a listener's OSError as a ConfigError. plane: what begins the names of its options, "" or "admin-"."""
    try:
        yield
    except OSError as error:
        port = f"--{plane}port"
        if error.errno == errno.EADDRINUSE:
            reason = f"the port is in use, perhaps by another fleet (torchmoor status); give another {port}"
        else:
            name = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            reason = f"{name or error}; give another --{plane}host or {port}"
        raise ConfigError(f"cannot listen on {url}: {reason} (in a configuration file: listen)") from error
