"""Free TCP ports on this host, below the range from which the kernel gives ports to outgoing connections."""

from __future__ import annotations

import random
import socket

from torchmoor.errors import LaunchError

USUAL = range(12_000, 30_000)


def find_free_ports(number: int, rng: random.Random | None = None, *, among: range = USUAL) -> list[int]:
    """Ports of loopback that nobody listens on now. Raises LaunchError if there are not enough.

    The start is random, so that two launchers at the same time seldom look at the same ports; one that loses the
    race sees its instance fail to bind.
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
    """True if a server could bind the port on loopback now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
