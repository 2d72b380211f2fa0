"""KV_AWARE: the instance that holds the longest start of the prompt, weighed against its load.

The proxy does not tokenize. What instances hold is told from what they were sent: each request's body, cut into
blocks, each block's hash chained to the one before it, is held by the instance that served it, until the instance's
answers show that it is no longer (docs/decisions/0012).
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from torchmoor.proxy.routing.least_outstanding import REASON as LEAST_OUTSTANDING
from torchmoor.proxy.routing.pool import C, Pool
from torchmoor.proxy.routing.strategy import Pick, RouteRequest

REASON = "kv-aware"
MIN_KEPT = 0.5  # of what was expected; bytes are not tokens, and a template's first tokens are always held
MAX_HOLDERS = 16  # instances compared, those with the longest match first


def chain(body: bytes, block_bytes: int) -> list[int]:
    """The hashes of a body's whole blocks, each of all bytes up to its end.

    Python's own hash of bytes: quick, and keyed at random in each process, which is where the hashes stay.
    """
    value = 0
    hashes: list[int] = []
    for end in range(block_bytes, len(body) + 1, block_bytes):
        value = hash((value, body[end - block_bytes : end]))
        hashes.append(value)
    return hashes


class Held(NamedTuple):
    """What an instance was believed to hold of a chain: so many blocks, last used at a count of requests."""

    num_blocks: int
    used_at: int


class PrefixIndex:
    """Which instance is believed to hold which blocks; bounded for each instance, the least recently used go first.

    Of a chain the last blocks are always the least recent, so that what is left of it is its beginning.
    """

    def __init__(self, *, max_blocks_per_instance: int) -> None:
        self._max_blocks = max_blocks_per_instance
        self._holders: dict[int, dict[str, None]] = {}
        self._blocks: dict[str, OrderedDict[int, int]] = {}  # by instance: block -> when it was used last
        self._now = 0

    def matches(self, hashes: list[int]) -> dict[str, int]:
        """How many of the chain's first blocks instances hold; the longest matches first, MAX_HOLDERS at most."""
        found: dict[str, int] = {}
        for num_blocks in range(len(hashes), 0, -1):
            holders = self._holders.get(hashes[num_blocks - 1])
            if holders is not None:
                for name in islice(holders, MAX_HOLDERS):
                    found.setdefault(name, num_blocks)
                if len(found) >= MAX_HOLDERS:
                    break
        return found

    def record(self, name: str, hashes: list[int]) -> Held | None:
        """An instance was sent this chain. Returns what it held of it before, None if nothing."""
        blocks = self._blocks.setdefault(name, OrderedDict())
        self._now += 1
        held: Held | None = None
        for number in range(len(hashes), 0, -1):
            value = hashes[number - 1]
            if value in blocks:
                held = held or Held(number, blocks[value])
            else:
                self._holders.setdefault(value, {})[name] = None
            blocks[value] = self._now
            blocks.move_to_end(value)
        while len(blocks) > self._max_blocks:
            self._drop(name, blocks.popitem(last=False)[0])
        return held

    def forget_unused_since(self, name: str, when: int) -> None:
        """What was used at `when` is gone from the instance, and so is, most likely, all that was not used since."""
        blocks = self._blocks.get(name)
        while blocks and next(iter(blocks.values())) <= when:
            self._drop(name, blocks.popitem(last=False)[0])

    def forget(self, name: str) -> None:
        """The instance has lost its memory."""
        for value in self._blocks.pop(name, ()):
            self._drop(name, value)

    def _drop(self, name: str, value: int) -> None:
        holders = self._holders[value]
        del holders[name]
        if not holders:
            del self._holders[value]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless both directions say the same, within the bound."""
        pairs = {(value, name) for name, blocks in self._blocks.items() for value in blocks}
        if pairs != {(value, name) for value, holders in self._holders.items() for name in holders}:
            raise RuntimeError("holders and blocks differ")
        if any(len(blocks) > self._max_blocks for blocks in self._blocks.values()):
            raise RuntimeError(f"an instance has more than {self._max_blocks} blocks")


class Expectation(NamedTuple):
    """The share of a prompt that an instance should hold, and when it was used there last."""

    share: float
    used_at: int


class KvAware:
    """Weighs what an instance holds of a prompt against how busy it is.

    An instance's cost is its outstanding invocations, less one for each bytes_per_request of the prompt that it
    holds: prefilling so much is taken to be as long as one more request in its batch.
    """

    def __init__(
        self, *, max_prompt_bytes: int, block_bytes: int, bytes_per_request: int, max_blocks_per_instance: int
    ) -> None:
        self.num_prefix_bytes = max_prompt_bytes
        self.index = PrefixIndex(max_blocks_per_instance=max_blocks_per_instance)
        self._block_bytes = block_bytes
        self._bytes_per_request = bytes_per_request

    def choose(self, request: RouteRequest, pool: Pool[C]) -> Pick[C] | None:
        """The open instance of the least cost; without a match that is the one with the fewest outstanding."""
        best = pool.find_least_outstanding(request.excluded)
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
                best, cost, reason = instance, cost_here, REASON
        return Pick(best, reason)

    def record(self, request: RouteRequest, name: str, *, body_bytes: int) -> Expectation | None:
        """A request with a body of so many bytes goes to an instance. Returns what should be held of it there."""
        held = self.index.record(name, self._chain_of(request))
        if held is None:
            return None
        return Expectation(held.num_blocks * self._block_bytes / max(body_bytes, len(request.prefix)), held.used_at)

    def check(self, name: str, expected: Expectation, *, num_kept: int, num_tokens: int) -> None:
        """An instance's answer tells how many of the prompt's tokens it still held.

        Much less than expected: that beginning was evicted, and so was, most likely, all that was used no later.
        """
        if num_kept < num_tokens * expected.share * MIN_KEPT:
            self.index.forget_unused_since(name, expected.used_at)

    def _chain_of(self, request: RouteRequest) -> list[int]:
        return chain(request.prefix[: self.num_prefix_bytes], self._block_bytes)
