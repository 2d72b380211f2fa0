"""Free TCP ports of this host, below the kernel's range for outgoing connections."""

from __future__ import annotations

import random
import socket

from torchmoor.errors import LaunchError

USUAL = range(12_000, 30_000)


def find_free_ports(number: int, rng: random.Random | None = None, *, among: range = USUAL) -> list[int]:
    """Find loopback ports that are free now. Raises LaunchError if there are not enough.

    The search starts at a random port, so that two launchers seldom choose the same ports. If they do, one of them
    starts its instance again.
    """
    start = (rng or random.Random()).randrange(len(among))
    found: list[int] = []
    for offset in range(len(among)):
        port = among[(start + offset) % len(among)]
        if is_free(port):
            found.append(port)
            if len(found) == number:
                return found
    raise LaunchError(f"there are only {len(found)} free ports from {among[0]} to {among[-1]}, and {number} are needed")


def is_free(port: int) -> bool:
    """Return whether a server could bind the port on loopback now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
