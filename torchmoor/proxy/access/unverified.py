"""Bodies that wait for the check of their signature: their bytes as received, by source.

Anyone who knows a key's id can send a body whose signature turns out to be forged. So a full account refuses no new
body. It drops those that arrive slowly, from sources with many bytes: a body that stalls makes room for one that
arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address

MANY = 256  # with more bodies than this, one search for room frees a 16th of the limit


class UnverifiedBody:
    """A body, its counted bytes, and when the first of them were counted, in seconds of the clock.

    drop: answers the request and closes its connection; called at most once.
    """

    __slots__ = ("source", "began_at", "num_bytes", "drop")

    def __init__(self, source: str, drop: Callable[[], None]) -> None:
        self.source = source
        self.began_at = 0.0
        self.num_bytes = 0
        self.drop = drop


class UnverifiedBodies:
    """The account of all of them. num_bytes: their total; above max_bytes only within `add`."""

    def __init__(self, max_bytes: int, *, clock: Callable[[], float], on_dropped: Callable[[], None]) -> None:
        """clock: monotonic seconds. on_dropped: called for each body that is dropped."""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._clock = clock
        self._on_dropped = on_dropped
        self._bodies: dict[UnverifiedBody, None] = {}  # in order of arrival
        self._by_source: Counter[str] = Counter()

    def add(self, body: UnverifiedBody, num_bytes: int) -> None:
        """Count num_bytes more of a body. May drop bodies, this one as well."""
        if body not in self._bodies:
            self._bodies[body] = None
            body.began_at = self._clock()
        body.num_bytes += num_bytes
        self._by_source[body.source] += num_bytes
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes:
            self._make_room()

    def remove(self, body: UnverifiedBody) -> None:
        """Stop counting a body; further calls do nothing."""
        if body in self._bodies:
            del self._bodies[body]
            self.num_bytes -= body.num_bytes
            self._by_source[body.source] -= body.num_bytes
            if not self._by_source[body.source]:
                del self._by_source[body.source]

    def _make_room(self) -> None:
        """Drop first what has the most bytes at its source and the lowest rate since its beginning."""
        now, by_source = self._clock(), self._by_source.copy()
        goal = self._max_bytes - (self._max_bytes // 16 if len(self._bodies) > MANY else 0)

        def cost(body: UnverifiedBody) -> float:
            return by_source[body.source] * (now - body.began_at) / body.num_bytes

        for body in sorted(self._bodies, key=cost, reverse=True):
            if self.num_bytes <= goal:
                break
            self.remove(body)
            self._on_dropped()
            body.drop()


def source_of(host: str) -> str:
    """Return what a client's address counts as: the network of 64 bits that an IPv6 client has, else the address."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    mapped = address.ipv4_mapped
    return str(IPv6Address(int(address) >> 64 << 64)) if mapped is None else str(mapped)
