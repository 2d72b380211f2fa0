"""Finds out whether the system still has bytes for a client."""

from __future__ import annotations

import asyncio
import fcntl
import termios

_NONE = bytes(4)


def has_unsent(transport: asyncio.Transport) -> bool:
    """Return True if the peer has not confirmed all bytes; False also on a system that does not report it.

    A transport with TLS does not count encrypted bytes. They wait in the process only while the system's own buffer is
    full.
    """
    try:
        return fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, _NONE) != _NONE
    except (AttributeError, OSError, ValueError):  # the socket is closed, or does not report it
        return False
