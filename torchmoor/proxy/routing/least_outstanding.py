"""LEAST_OUTSTANDING_REQUESTS: the instance with the fewest outstanding invocations."""

from __future__ import annotations

from torchmoor.proxy.routing.pool import C, Pool
from torchmoor.proxy.routing.reasons import add_reason
from torchmoor.proxy.routing.strategy import Pick, Strategy, StrategyRequest

LEAST_OUTSTANDING = add_reason("least-outstanding-requests", "it has the fewest requests running")


class LeastOutstanding(Strategy):
    """Chooses the instance with the fewest outstanding invocations."""

    name = "LEAST_OUTSTANDING_REQUESTS"

    def choose(self, request: StrategyRequest, pool: Pool[C]) -> Pick[C] | None:
        instance = pool.find_least_loaded(request.excluded)
        return None if instance is None else Pick(instance, LEAST_OUTSTANDING)
