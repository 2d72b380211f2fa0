"""The table of routing strategies. To add one, write its module and add a row."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from torchmoor.proxy.routing.kv_aware import KvAware
from torchmoor.proxy.routing.least_outstanding import LeastOutstanding
from torchmoor.proxy.routing.prefix_aware import PrefixAware
from torchmoor.proxy.routing.random import RandomChoice
from torchmoor.proxy.routing.strategy import Strategy


class StrategyRow(NamedTuple):
    """One strategy. make: builds it from a variant's settings."""

    name: str
    make: Callable[[Any, Random], Strategy]


_ROWS = (
    StrategyRow("LEAST_OUTSTANDING_REQUESTS", lambda settings, rng: LeastOutstanding()),
    StrategyRow("RANDOM", lambda settings, rng: RandomChoice(rng)),
    StrategyRow(
        "PREFIX_AWARE",
        lambda settings, rng: PrefixAware(
            prefix_length=settings.prefix_aware.prefix_length,
            concurrency_threshold=settings.prefix_aware.concurrency_threshold,
        ),
    ),
    StrategyRow(
        "KV_AWARE",
        lambda settings, rng: KvAware(
            max_prompt_bytes=settings.kv_aware.max_prompt_bytes,
            block_bytes=settings.kv_aware.block_bytes,
            bytes_per_request=settings.kv_aware.bytes_per_request,
            max_blocks_per_instance=settings.kv_aware.max_blocks_per_instance,
        ),
    ),
)
STRATEGIES = {row.name: row for row in _ROWS}
DEFAULT_STRATEGY = _ROWS[0].name


def get_strategy(name: str) -> StrategyRow:
    """Return a strategy's row. Raises ValueError."""
    row = STRATEGIES.get(name)
    if row is None:
        raise ValueError(f"RoutingStrategy must be one of {', '.join(STRATEGIES)}, not {name!r}")
    return row
