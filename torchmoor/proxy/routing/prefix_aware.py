"""PREFIX_AWARE: requests whose bodies begin alike go to one instance, which has that beginning cached."""

from __future__ import annotations

from hashlib import blake2b
from random import Random
from typing import Any

from torchmoor.proxy.routing.pool import C, Pool, find_preferred
from torchmoor.proxy.routing.reasons import add_reason
from torchmoor.proxy.routing.strategy import Pick, Strategy, StrategyRequest

PREFIX_AWARE = add_reason("prefix-aware", "it has had requests that begin alike")
PREFIX_AWARE_OVERFLOW = add_reason("prefix-aware-overflow", "the one that has seen this beginning is full")


class PrefixAware(Strategy):
    """Chooses the instance that the prefix's hash prefers; above the threshold, the next in the hash's order.

    All proxies compute the same order (torchmoor.proxy.routing.pool).
    """

    name = "PREFIX_AWARE"

    def __init__(self, *, prefix_length: int, concurrency_threshold: int) -> None:
        self.num_prefix_bytes = prefix_length
        self._threshold = concurrency_threshold

    @classmethod
    def make(cls, settings: Any, rng: Random) -> PrefixAware:
        own = settings.prefix_aware
        return cls(prefix_length=own.prefix_length, concurrency_threshold=own.concurrency_threshold)

    def choose(self, request: StrategyRequest, pool: Pool[C]) -> Pick[C] | None:
        """Return the most preferred instance below the threshold, or else the one with the fewest outstanding."""
        least = pool.find_least_loaded(request.excluded)
        if least is None:
            return None
        if least.outstanding < self._threshold:
            found = find_preferred(pool, self._key(request), self._threshold, request.excluded)
            if found is not None:
                return Pick(found[0], PREFIX_AWARE if found[1] else PREFIX_AWARE_OVERFLOW)
        return Pick(least, PREFIX_AWARE_OVERFLOW)

    def _key(self, request: StrategyRequest) -> int:
        """Return a 64-bit hash of the prefix and the client's prefix id; the id's length separates the two."""
        digest = blake2b(b"%d\n%b" % (len(request.prefix_id), request.prefix_id), digest_size=8)
        digest.update(request.prefix[: self.num_prefix_bytes])
        return int.from_bytes(digest.digest(), "big")
