"""The data plane's port, reserved by the parent while child processes come and go."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def reserve(host: str, port: int) -> tuple[list[socket.socket], int]:
    """Bind sockets that do not listen, to reserve a port (0 for any); return them and the port.

    Raises OSError if another program uses the port, even one that would share it.
    """
    with ExitStack() as stack:
        bound = []
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            if port:
                with _make(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((address[0], port, *address[2:]))
            own = stack.enter_context(_make(family, kind, protocol))
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            own.bind((address[0], port, *address[2:]))
            port = own.getsockname()[1]
            bound.append(own)
        stack.pop_all()
        return bound, port


def _make(family: int, kind: int, protocol: int) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as asyncio's servers do
    return made
