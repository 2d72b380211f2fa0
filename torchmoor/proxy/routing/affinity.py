"""Affinity: requests with the same key go to the same instance, which has cached the start of their conversation.

Applies to requests without a session, before the variant's strategy. Keys come from clients and gateways
(torchmoor.proxy.api.affinity_keys). See docs/decisions/0043-affinity-by-bounded-hashing.md.
"""

from __future__ import annotations

from math import ceil

from torchmoor.proxy.routing.pool import C, Pool, find_preferred
from torchmoor.proxy.routing.reasons import AFFINITY, AFFINITY_OVERFLOW
from torchmoor.proxy.routing.strategy import Pick, StrategyRequest


class Affinity:
    """Chooses the first instance in a key's order whose load is bounded.

    The bound is the larger of `free_requests` and `load_factor` times the mean load of the open instances.
    """

    def __init__(self, *, free_requests: int, load_factor: float) -> None:
        self._free_requests = free_requests
        self._load_factor = load_factor

    def choose(self, request: StrategyRequest, pool: Pool[C]) -> Pick[C] | None:
        """Return the key's instance; None if the request has no key, or if its preferred instances are busy."""
        if request.affinity is None:
            return None
        limit = max(self._free_requests, ceil(self._load_factor * pool.mean_load))
        found = find_preferred(pool, request.affinity, limit, request.excluded)
        return None if found is None else Pick(found[0], AFFINITY if found[1] else AFFINITY_OVERFLOW)
