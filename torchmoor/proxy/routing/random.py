"""RANDOM: any open instance. SageMaker's default."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

from torchmoor.proxy.routing.pool import C, Pool
from torchmoor.proxy.routing.reasons import add_reason
from torchmoor.proxy.routing.strategy import Pick, Strategy, StrategyRequest

RANDOM = add_reason("random", "by chance, as configured")
T = TypeVar("T")


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


def choose_weighted(rng: Random, things: Sequence[T], weights: Sequence[float]) -> T | None:
    """Return one of the things with a probability in proportion to its weight; None if no weight is above zero.

    Random instead of round-robin: a client that alternates between two kinds of request must not always meet the same
    variant with each kind.
    """
    total = sum(weights)
    if total <= 0:
        return None
    point = rng.random() * total
    for thing, weight in zip(things, weights, strict=True):
        point -= weight
        if point < 0 < weight:
            return thing
    return max(zip(things, weights, strict=True), key=lambda pair: pair[1])[0]  # the sum was rounded
