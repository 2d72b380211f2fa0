"""LEAST_OUTSTANDING_REQUESTS: the instance with the fewest outstanding invocations."""

from __future__ import annotations

from torchmoor.proxy.routing.pool import C, Pool
from torchmoor.proxy.routing.reasons import LEAST_OUTSTANDING
from torchmoor.proxy.routing.strategy import Pick, StrategyRequest


class LeastOutstanding:
    """Chooses the instance with the fewest outstanding invocations."""

    num_prefix_bytes = 0

    def choose(self, request: StrategyRequest, pool: Pool[C]) -> Pick[C] | None:
        instance = pool.find_least_outstanding(request.excluded)
        return None if instance is None else Pick(instance, LEAST_OUTSTANDING)
