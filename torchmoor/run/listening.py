"""Errors of addresses on which the proxy cannot listen."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from torchmoor.errors import ConfigError

DATA_PORT = "--port (listen.port)"


@contextmanager
def listening_on(url: str, options: str) -> Iterator[None]:
    """Raise a listener's OSError as a ConfigError. options: those of the address, as the message names them."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = "the port is in use, perhaps by another fleet (torchmoor status)"
        else:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise ConfigError(f"cannot listen on {url}: {reason}; give another {options}") from error
