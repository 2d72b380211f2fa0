"""The instances that a key prefers, in an order that all proxies compute alike from the names of the instances."""

from __future__ import annotations

from itertools import islice

from torchmoor.proxy.routing.pool import C, Pool

MAX_WALKED = 16  # preferred instances that are tried


def find_preferred(pool: Pool[C], key: int, limit: int, excluded: frozenset[str]) -> tuple[C, bool] | None:
    """Return the first instance in a key's order with fewer outstanding requests than the limit. key: 64 bits.

    The flag is True for the first in the key's order. None if the first MAX_WALKED all reach the limit. An instance in
    slow start has empty caches and gets its keys back gradually: first those whose place is below its share.
    """
    for number, instance in enumerate(islice(pool.walk(key), MAX_WALKED)):
        if (
            instance.outstanding < min(limit, instance.capacity)
            and instance.is_ready
            and (instance.share == 1.0 or _place_of(key) < instance.share)
            and instance.name not in excluded
        ):
            return instance, number == 0
    return None


def _place_of(key: int) -> float:
    """Return a number from 0 to 1 for the key, independent of its position on the ring.

    The golden ratio spreads neighbouring keys (Knuth, "The Art of Computer Programming" 3, 6.4).
    """
    return (key * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) / (1 << 64)
