"""The failover instance of a session, and the order in which sessions return to an instance that is ready again.

All proxies compute both alike, from the session's id and the names of the instances.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from torchmoor.proxy.routing.pool import C


def rendezvous(session_id: str, instances: Iterable[C]) -> C | None:
    """Return the ready instance with the highest hash of session id and name.

    Every proxy finds the same one without shared state. When an instance leaves, only its own sessions move.
    """

    def weight(instance: C) -> bytes:
        return blake2b(f"{session_id}\n{instance.name}".encode(), digest_size=16).digest()

    return max((instance for instance in instances if instance.is_ready), key=weight, default=None)


def place_of(session_id: str) -> float:
    """Return a session's number from 0 to 1, which all proxies compute alike.

    Sessions with lower numbers return to an instance first.
    """
    return int.from_bytes(blake2b(session_id.encode(), digest_size=7).digest(), "big") / (1 << 56)
