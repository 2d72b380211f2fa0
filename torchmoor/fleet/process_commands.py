"""What each process of the data plane does at an operator's command: a function for each command.

`DataPlaneView.carry_out` calls it in every process, and again in those that start later. A command's values are
pickled on their way to other processes.
"""

from __future__ import annotations

from typing import Protocol

from torchmoor.config.credentials import Credentials
from torchmoor.proxy.access.gate import Gate
from torchmoor.proxy.access.tls import Tls, reload_tls
from torchmoor.proxy.dispatch.dispatchers import Dispatchers


class ProcessParts(Protocol):
    """The parts of one process that commands change."""

    dispatchers: Dispatchers
    gate: Gate | None  # None if no request needs credentials
    tls: Tls | None


def take_credentials(parts: ProcessParts, credentials: Credentials) -> None:
    """Check new requests with these credentials."""
    if parts.gate is not None:
        parts.gate.take(credentials)


def reload_certificate(parts: ProcessParts) -> None:
    """Use the renewed certificate for new connections."""
    if parts.tls is not None:
        reload_tls(parts.tls)


def reopen_log(parts: ProcessParts) -> None:
    """Open the access log again by its name: the old file was moved away."""
    if parts.dispatchers.observer is not None:
        parts.dispatchers.observer.reopen_log()
