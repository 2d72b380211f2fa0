"""KV_AWARE: the instance that has cached the longest start of the prompt, weighed against its load.

The proxy does not tokenize. It cuts each request's body into blocks and chains their hashes; the instance that serves
the request is taken to have these blocks until its answers show otherwise (docs/decisions/0012).
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from random import Random
from typing import Any, NamedTuple

from torchmoor.proxy.routing.least_outstanding import LEAST_OUTSTANDING
from torchmoor.proxy.routing.pool import C, Pool
from torchmoor.proxy.routing.reasons import add_reason
from torchmoor.proxy.routing.strategy import Pick, Strategy, StrategyRequest

KV_AWARE = add_reason("kv-aware", "it has most of the prompt's beginning in its cache")
MIN_KEPT = 0.5  # of the expected share; bytes are not tokens, and a template's first tokens are always cached
MAX_HOLDERS = 16  # instances that are compared, those with the longest match


def chain(body: bytes, block_bytes: int) -> list[int]:
    """Return a hash for each whole block of a body, over all bytes up to the block's end.

    Uses Python's hash of bytes, which is fast and has a random key in each process; the hashes never leave it.
    """
    value = 0
    hashes: list[int] = []
    for end in range(block_bytes, len(body) + 1, block_bytes):
        value = hash((value, body[end - block_bytes : end]))
        hashes.append(value)
    return hashes


class HeldBlocks(NamedTuple):
    """The blocks of a chain that an instance was taken to have. used_at: the count of requests at their last use."""

    num_blocks: int
    used_at: int


class PrefixIndex:
    """The blocks that each instance is taken to have, limited per instance; the least recently used are dropped.

    The last blocks of a chain count as the least recent, so that its beginning stays.
    """

    def __init__(self, *, max_blocks_per_instance: int) -> None:
        self.max_blocks = max_blocks_per_instance
        self._holders: dict[int, dict[str, None]] = {}
        self._blocks: dict[str, OrderedDict[int, int]] = {}  # by instance: block -> when it was used last
        self._now = 0

    def matches(self, hashes: list[int]) -> dict[str, int]:
        """Return, by instance, how many of the chain's first blocks it has: the MAX_HOLDERS longest matches."""
        found: dict[str, int] = {}
        for num_blocks in range(len(hashes), 0, -1):
            holders = self._holders.get(hashes[num_blocks - 1])
            if holders is not None:
                for name in islice(holders, MAX_HOLDERS):
                    found.setdefault(name, num_blocks)
                if len(found) >= MAX_HOLDERS:
                    break
        return found

    def record(self, name: str, hashes: list[int]) -> HeldBlocks | None:
        """Record a chain that is sent to an instance. Returns the part that it had before, or None."""
        blocks = self._blocks.setdefault(name, OrderedDict())
        self._now += 1
        held: HeldBlocks | None = None
        for number in range(len(hashes), 0, -1):
            value = hashes[number - 1]
            if value in blocks:
                held = held or HeldBlocks(number, blocks[value])
            else:
                self._holders.setdefault(value, {})[name] = None
            blocks[value] = self._now
            blocks.move_to_end(value)
        while len(blocks) > self.max_blocks:
            self._drop(name, blocks.popitem(last=False)[0])
        return held

    def forget_unused_since(self, name: str, when: int) -> None:
        """Drop the blocks of an instance that were last used at `when` or before: it has most likely evicted them."""
        blocks = self._blocks.get(name)
        while blocks and next(iter(blocks.values())) <= when:
            self._drop(name, blocks.popitem(last=False)[0])

    def forget(self, name: str) -> None:
        """Drop all blocks of an instance."""
        for value in self._blocks.pop(name, ()):
            self._drop(name, value)

    def _drop(self, name: str, value: int) -> None:
        holders = self._holders[value]
        del holders[name]
        if not holders:
            del self._holders[value]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless both directions agree and the limit holds."""
        pairs = {(value, name) for name, blocks in self._blocks.items() for value in blocks}
        if pairs != {(value, name) for value, holders in self._holders.items() for name in holders}:
            raise RuntimeError("holders and blocks differ")
        if any(len(blocks) > self.max_blocks for blocks in self._blocks.values()):
            raise RuntimeError(f"an instance has more than {self.max_blocks} blocks")


class Expectation(NamedTuple):
    """The share of a prompt that an instance should have cached, and when it was last used there."""

    share: float
    used_at: int


class KvAware(Strategy):
    """Weighs the cached part of a prompt against an instance's load.

    An instance's cost is its outstanding invocations, less one for each bytes_per_request of the prompt that it has
    cached: prefilling that part is taken to cost as much as one more request in its batch.
    """

    name = "KV_AWARE"

    def __init__(
        self, *, max_prompt_bytes: int, block_bytes: int, bytes_per_request: int, max_blocks_per_instance: int
    ) -> None:
        self.num_prefix_bytes = max_prompt_bytes
        self.index = PrefixIndex(max_blocks_per_instance=max_blocks_per_instance)
        self._block_bytes = block_bytes
        self._bytes_per_request = bytes_per_request

    @classmethod
    def make(cls, settings: Any, rng: Random) -> KvAware:
        own = settings.kv_aware
        return cls(
            max_prompt_bytes=own.max_prompt_bytes,
            block_bytes=own.block_bytes,
            bytes_per_request=own.bytes_per_request,
            max_blocks_per_instance=own.max_blocks_per_instance,
        )

    def choose(self, request: StrategyRequest, pool: Pool[C]) -> Pick[C] | None:
        """Return the open instance with the least cost; without a match, the one with the fewest outstanding."""
        best = pool.find_least_loaded(request.excluded)
        if best is None:
            return None
        cost, reason = float(best.load), LEAST_OUTSTANDING
        for name, num_blocks in self.index.matches(self._chain_of(request)).items():
            instance = pool.find(name)
            if (
                instance is None
                or not instance.is_ready
                or instance.outstanding >= instance.capacity
                or name in request.excluded
            ):
                continue
            cost_here = instance.load - num_blocks * self._block_bytes / self._bytes_per_request
            if cost_here < cost:
                best, cost, reason = instance, cost_here, KV_AWARE
        return Pick(best, reason)

    def note_sent(self, request: StrategyRequest, name: str, *, body_bytes: int) -> Expectation | None:
        """Note a request that goes to an instance. Returns what the instance should have cached of it."""
        held = self.index.record(name, self._chain_of(request))
        if held is None:
            return None
        return Expectation(held.num_blocks * self._block_bytes / max(body_bytes, len(request.prefix)), held.used_at)

    def check(self, name: str, expected: Expectation, *, num_kept: int, num_tokens: int) -> None:
        """Compare the expectation with the tokens that an instance's answer reports as cached.

        If they are far fewer, the instance has evicted this beginning, and most likely everything older too.
        """
        if num_kept < num_tokens * expected.share * MIN_KEPT:
            self.index.forget_unused_since(name, expected.used_at)

    def forget(self, name: str) -> None:
        self.index.forget(name)

    def _chain_of(self, request: StrategyRequest) -> list[int]:
        return chain(request.prefix[: self.num_prefix_bytes], self._block_bytes)
