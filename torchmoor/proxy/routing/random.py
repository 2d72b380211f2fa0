"""RANDOM: any open instance. SageMaker's default."""

from __future__ import annotations

from random import Random
from typing import Any

from torchmoor.proxy.routing.pool import C, Pool
from torchmoor.proxy.routing.reasons import add_reason
from torchmoor.proxy.routing.strategy import Pick, Strategy, StrategyRequest

RANDOM = add_reason("random", "by chance, as configured")


class RandomChoice(Strategy):
    """Chooses among the open instances, all equally likely."""

    name = "RANDOM"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    @classmethod
    def make(cls, settings: Any, rng: Random) -> RandomChoice:
        return cls(rng)

    def choose(self, request: StrategyRequest, pool: Pool[C]) -> Pick[C] | None:
        instance = pool.find_random(self._rng, request.excluded)
        return None if instance is None else Pick(instance, RANDOM)
