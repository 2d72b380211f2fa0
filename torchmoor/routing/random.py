"""RANDOM, SageMaker's default."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from torchmoor.routing.strategy import C, RouteRequest, can_take


class RandomChoice:
    """Any instance that can take the request, each as likely as the others."""

    reason = "random"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: RouteRequest, instances: Sequence[C]) -> C | None:
        """A ready instance with room, or None if all are full."""
        free = [instance for instance in instances if can_take(request, instance)]
        return self._rng.choice(free) if free else None
