"""LEAST_OUTSTANDING_REQUESTS."""

from __future__ import annotations

from collections.abc import Sequence

from torchmoor.routing.strategy import C, RouteRequest, can_take


class LeastOutstanding:
    """The instance with the fewest outstanding invocations."""

    reason = "least-outstanding-requests"

    def choose(self, request: RouteRequest, instances: Sequence[C]) -> C | None:
        """The ready instance with the fewest outstanding invocations, or None if all are full.

        Ties go to the one chosen longest ago, so that equal load spreads.
        """
        best: C | None = None
        for instance in instances:
            if not can_take(request, instance):
                continue
            if (
                best is None
                or instance.outstanding < best.outstanding
                or (instance.outstanding == best.outstanding and instance.last_chosen < best.last_chosen)
            ):
                best = instance
        return best
