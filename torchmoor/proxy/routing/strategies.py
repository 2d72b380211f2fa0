"""The table of routing strategies. To add one, write its module and add a row."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from torchmoor.proxy.routing.kv_aware import KvAware
from torchmoor.proxy.routing.least_outstanding import LeastOutstanding
from torchmoor.proxy.routing.prefix_aware import PrefixAware
from torchmoor.proxy.routing.random import RandomChoice
from torchmoor.proxy.routing.strategy import Strategy

MakeStrategy = Callable[[Any, Random], Strategy]
"""Builds a strategy from a variant's settings."""

STRATEGIES: dict[str, MakeStrategy] = {
    "LEAST_OUTSTANDING_REQUESTS": lambda settings, rng: LeastOutstanding(),
    "RANDOM": lambda settings, rng: RandomChoice(rng),
    "PREFIX_AWARE": lambda settings, rng: PrefixAware(
        prefix_length=settings.prefix_aware.prefix_length,
        concurrency_threshold=settings.prefix_aware.concurrency_threshold,
    ),
    "KV_AWARE": lambda settings, rng: KvAware(
        max_prompt_bytes=settings.kv_aware.max_prompt_bytes,
        block_bytes=settings.kv_aware.block_bytes,
        bytes_per_request=settings.kv_aware.bytes_per_request,
        max_blocks_per_instance=settings.kv_aware.max_blocks_per_instance,
    ),
}
