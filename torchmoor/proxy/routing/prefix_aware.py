"""PREFIX_AWARE: requests whose bodies begin alike go to one instance, which has that beginning cached."""

from __future__ import annotations

from hashlib import blake2b
from itertools import islice

from torchmoor.proxy.routing.pool import C, Pool
from torchmoor.proxy.routing.reasons import PREFIX_AWARE, PREFIX_AWARE_OVERFLOW
from torchmoor.proxy.routing.strategy import Pick, StrategyRequest

MAX_WALKED = 16  # preferred instances that are tried before the least loaded one


class PrefixAware:
    """Chooses the instance that the prefix's hash prefers; above the threshold, the next in the hash's order.

    All proxies agree without shared state, because the order comes from the instances' names. An instance that comes
    back has empty caches; its prefixes return step by step, those whose place is below its share.
    """

    def __init__(self, *, prefix_length: int, concurrency_threshold: int) -> None:
        self.num_prefix_bytes = prefix_length
        self._threshold = concurrency_threshold

    def choose(self, request: StrategyRequest, pool: Pool[C]) -> Pick[C] | None:
        """Return the most preferred instance below the threshold, or else the one with the fewest outstanding."""
        least = pool.find_least_outstanding(request.excluded)
        if least is None:
            return None
        if least.outstanding < self._threshold:
            key = self._key(request)
            for number, instance in enumerate(islice(pool.walk(key), MAX_WALKED)):
                if (
                    instance.outstanding < min(self._threshold, instance.capacity)
                    and instance.is_ready
                    and (instance.share == 1.0 or _place_of(key) < instance.share)
                    and instance.name not in request.excluded
                ):
                    return Pick(instance, PREFIX_AWARE if number == 0 else PREFIX_AWARE_OVERFLOW)
        return Pick(least, PREFIX_AWARE_OVERFLOW)

    def _key(self, request: StrategyRequest) -> int:
        """Return a 64-bit hash of the prefix and the client's prefix id; the id's length separates the two."""
        digest = blake2b(b"%d\n%b" % (len(request.prefix_id), request.prefix_id), digest_size=8)
        digest.update(request.prefix[: self.num_prefix_bytes])
        return int.from_bytes(digest.digest(), "big")


def _place_of(key: int) -> float:
    """Return a number from 0 to 1 for the prefix, independent of its position on the ring.

    The golden ratio spreads neighbouring keys (Knuth, "The Art of Computer Programming" 3, 6.4).
    """
    return (key * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) / (1 << 64)
