"""The KV cache: keys and values of all conversations in one preallocated tensor, allocated in blocks.

    BlockPool      the storage; which caches hold each block, what full blocks contain, which caches may be evicted
    SequenceCache  one conversation's table of blocks

The contract: a block belongs to the caches that hold it and is free when none does. A full block is published under its
content and everything before it, so that another cache with the same beginning can hold it too; it is never written
again. A cache is pinned while a turn uses it and idle between turns. When blocks run short, the least recently used
idle cache loses its blocks. A session's end drops its cache at once; a completion's cache stays idle. `length` changes
only after a successful step, so a failed step has no effect.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from handlers.engine.builtin.free_blocks import FreeBlocks
from handlers.engine.contract import KvCache
from handlers.errors import OutOfMemory
from handlers.models.text import TextModel

BLOCK = 16  # positions


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of one position of a model's cache."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype.itemsize * BLOCK

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the blocks that this many positions take."""
        return num_blocks(num_tokens) * self.block_bytes


def cache_shape(model: TextModel) -> CacheShape:
    """Return the shape of a position of this model's KV cache."""
    return CacheShape(model.num_layers, model.num_kv_heads, model.head_size, model.dtype, model.device)


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


@dataclass(slots=True)
class _Block:
    num_holders: int = 0
    content: int = 0  # a number that is never reused; set while the block is published
    key: tuple[object, tuple[int, ...]] | None = None  # its key in the index, while it is published


class BlockPool:
    """All methods may be called from any thread; the tensors are read and written by the engine's only.

    max_bytes: size limit of all caches. Raises OutOfMemory if the device does not have that much. num_spare: further
    blocks behind the others in storage, which no cache gets.
    """

    can_pin = True

    def __init__(self, shape: CacheShape, max_bytes: int, num_spare: int = 0) -> None:
        self.shape = shape
        self.capacity = max_bytes // shape.block_bytes
        num_slots = (self.capacity + num_spare) * BLOCK
        size = (shape.num_layers, 2, shape.num_kv_heads, num_slots, shape.head_size)
        try:
            self.storage = torch.empty(size, dtype=shape.dtype, device=shape.device)
        except RuntimeError as exc:  # torch.OutOfMemoryError on a GPU, a plain one from the CPU's allocator
            raise OutOfMemory(f"the device has no room for a KV cache of {max_bytes} bytes") from exc
        self.num_evicted = 0  # caches that have lost their blocks to others
        self.lock = threading.RLock()
        self._free = FreeBlocks(self.capacity)
        self._blocks = [_Block() for _ in range(self.capacity)]
        self._published: dict[tuple[object, tuple[int, ...]], int] = {}
        self._num_contents = 0
        self._idle: OrderedDict[SequenceCache, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<BlockPool {self.num_used}/{self.capacity} blocks, {len(self._idle)} idle caches>"

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    @property
    def used_bytes(self) -> int:
        return self.num_used * self.shape.block_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.capacity * self.shape.block_bytes

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the blocks that this many positions take."""
        return self.shape.num_bytes(num_tokens)

    def num_tokens(self, num_bytes: int) -> int:
        """Return how many positions fit into this many bytes."""
        return num_bytes // self.shape.block_bytes * BLOCK

    def open(self, scope: str) -> "SequenceCache":
        return SequenceCache(self, scope)

    def close(self) -> None:
        """Free the storage's memory although others still refer to the pool. No step may follow."""
        self.storage = self.storage.new_empty(0)

    def take(self, count: int, after: int | None) -> list[int]:
        """Hold `count` free blocks, and evict idle caches if necessary. Raises OutOfMemory if there are too few."""
        with self.lock:
            if len(self._free) < count and self._can_evict(count - len(self._free)):  # evict none in vain
                while len(self._free) < count:
                    next(iter(self._idle)).drop()
                    self.num_evicted += 1
            if len(self._free) < count:
                raise OutOfMemory(
                    f"the KV cache of {self.capacity * BLOCK} tokens has no room for this turn; try again later"
                )
            taken = self._free.take(count, after)
            for block in taken:
                self._blocks[block].num_holders = 1
            return taken

    def _can_evict(self, count: int) -> bool:
        """Return True if the eviction of idle caches frees this many blocks. Reads only the caches that must go."""
        held: Counter[int] = Counter()
        for cache in self._idle:
            held.update(cache.table)
            count -= sum(held[block] == self._blocks[block].num_holders for block in cache.table)
            if count <= 0:
                return True
        return False

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one holder from each of these blocks."""
        with self.lock:
            for block in blocks:
                state = self._blocks[block]
                state.num_holders -= 1
                if state.num_holders == 0:
                    self._unpublish(block)
                    self._free.give(block)

    def publish(self, block: int, parent: object, tokens: tuple[int, ...]) -> object:
        """Register a full block under its tokens and its prefix; return the name of the extended prefix.

        parent: the name of the prefix before it. If another block with the same content is published, that one stays.
        """
        with self.lock:
            key = (parent, tokens)
            known = self._published.get(key)
            if known is None:
                self._num_contents += 1
                self._published[key] = known = block
                self._blocks[block].key, self._blocks[block].content = key, self._num_contents
            return self._blocks[known].content

    def _unpublish(self, block: int) -> None:
        state = self._blocks[block]
        if state.key is not None:
            del self._published[state.key]
            state.key = None

    def make_private(self, block: int) -> bool:
        """Unpublish a block with one holder, so that it may write to it. Return False if there are several holders."""
        with self.lock:
            if self._blocks[block].num_holders > 1:
                return False
            self._unpublish(block)
            return True

    def find(self, scope: object, tokens: Sequence[int]) -> tuple[list[int], list[object]]:
        """Return the published blocks with the longest beginning of `tokens`, and the prefixes' names.

        Hold the lock.
        """
        blocks: list[int] = []
        names: list[object] = []
        parent = scope
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = self._published.get((parent, tuple(tokens[start : start + BLOCK])))
            if block is None:
                break
            parent = self._blocks[block].content
            blocks.append(block)
            names.append(parent)
        return blocks, names

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one holder to each of these blocks. Hold the lock since `find`."""
        for block in blocks:
            self._blocks[block].num_holders += 1

    def check_integrity(self, caches: Iterable[KvCache]) -> None:
        """Raise RuntimeError unless these caches and the idle ones account for every block that is not free."""
        with self.lock:
            holders = [0] * self.capacity
            for cache in {*(each for each in caches if isinstance(each, SequenceCache)), *self._idle}:
                for block in cache.table:
                    holders[block] += 1
            if holders != [state.num_holders for state in self._blocks]:
                raise RuntimeError("the pool's holders are not the caches that hold its blocks")
            if sorted(self._free) != [block for block, count in enumerate(holders) if count == 0]:
                raise RuntimeError("the free list differs from the blocks that no cache holds")
            published = {block: state.key for block, state in enumerate(self._blocks) if state.key is not None}
            if {key: block for block, key in published.items()} != self._published:
                raise RuntimeError("a block is published under a content that it does not hold")
            if any(holders[block] == 0 for block in published):
                raise RuntimeError("a free block is published")


class SequenceCache:
    """One sequence's part of the cache: `match`, `reserve` and `advance` extend it, `truncate` and `drop` shrink it.

    scope: caches share blocks only within a scope. variant: see `KvCache.match`.
    """

    __slots__ = ("_blocks", "_names", "_slots", "pool", "run", "scope", "table", "tokens", "variant")

    def __init__(self, pool: BlockPool, scope: str = "") -> None:
        self.pool = pool
        self.scope = scope
        self.variant = ""
        self.tokens: list[int] = []  # the key at each valid position
        self.table: list[int] = []  # its blocks in order
        self.run: int | None = None  # where in storage it begins, if its blocks lie side by side
        self._names: list[object] = []  # of its full blocks' prefixes
        self._blocks: Tensor | None = None  # its table on the device
        self._slots: Tensor | None = None  # where in storage each position is, up to capacity

    def __repr__(self) -> str:
        return f"<SequenceCache {self.length}/{self.capacity} positions>"

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def capacity(self) -> int:
        return len(self.table) * BLOCK

    @property
    def is_pinned(self) -> bool:
        with self.pool.lock:
            return bool(self.table) and self not in self.pool._idle

    def pin(self) -> None:
        with self.pool.lock:
            self.pool._idle.pop(self, None)

    def unpin(self, *, is_kept: bool = False) -> None:
        with self.pool.lock:
            self.truncate(self.length)
            if self.table and not is_kept:
                self.pool._idle[self] = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its blocks; a shared block counts for each cache."""
        return len(self.table) * self.pool.shape.block_bytes

    @property
    def blocks(self) -> Tensor:
        """(blocks,) int32 on the device: its table; another tensor after each change. Engine thread only."""
        if self._blocks is None:
            self._blocks = torch.tensor(self.table, dtype=torch.int32, device=self.pool.shape.device)
        return self._blocks

    @property
    def slots(self) -> Tensor:
        """(capacity,) int64 on the device: where in storage each position is. Engine thread only."""
        if self._slots is None:
            starts = self.blocks.long()[:, None] * BLOCK
            self._slots = (starts + torch.arange(BLOCK, device=starts.device)).flatten()
        return self._slots

    @property
    def _root(self) -> object:
        """The name of the empty prefix."""
        return self.scope, self.variant

    def match(self, prompt: Sequence[int], variant: str = "") -> int:
        """Set the cache to the longest stored prefix of `prompt`, its own or another cache's, and return its length.

        At least one token of the prompt is left to compute.
        """
        pool = self.pool
        limit = len(prompt) - 1
        with pool.lock:
            if variant != self.variant:
                self.drop()
                self.variant = variant
            own = min(self.common_prefix(prompt), limit)
            blocks, names = pool.find(self._root, prompt[:limit])
            if len(blocks) * BLOCK <= own:
                return self.truncate(own)
            pool.hold(blocks)
            self.drop()
            self.table, self._names = blocks, names
            self.tokens = list(prompt[: self.capacity])
            self._changed()
            return self.length

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` positions in all, keeping what is stored. Raises OutOfMemory."""
        with self.pool.lock:
            missing = num_blocks(num_tokens) - len(self.table)
            if missing > 0:
                self.table += self.pool.take(missing, self.table[-1] if self.table else None)
                self._changed()

    def truncate(self, length: int) -> int:
        """Drop the positions from `length` on, and all of the last block if other caches share it.

        Return the length left.
        """
        with self.pool.lock:
            length = min(length, self.length)
            kept = num_blocks(length)
            if length % BLOCK and not self.pool.make_private(self.table[kept - 1]):
                kept -= 1
                length = kept * BLOCK
            if kept < len(self.table):
                self.pool.release(self.table[kept:])
                del self.table[kept:]
                self._changed()
            del self.tokens[length:]
            del self._names[length // BLOCK :]
            return length

    def drop(self) -> None:
        """Forget everything and free the memory."""
        with self.pool.lock:
            self.pool._idle.pop(self, None)
            self.truncate(0)

    def _changed(self) -> None:
        first = self.table[0] if self.table else 0
        self.run = first * BLOCK if self.table == list(range(first, first + len(self.table))) else None
        self._blocks = self._slots = None

    def advance(self, tokens: Sequence[int]) -> None:
        """Add positions that a successful step has stored."""
        self.tokens.extend(tokens)
        while len(self._names) < self.length // BLOCK:
            i = len(self._names)
            parent = self._names[-1] if i else self._root
            self._names.append(
                self.pool.publish(self.table[i], parent, tuple(self.tokens[i * BLOCK : (i + 1) * BLOCK]))
            )

    def common_prefix(self, tokens: Sequence[int]) -> int:
        """Return the number of leading positions that hold exactly these tokens."""
        held = self.tokens
        limit = min(len(held), len(tokens))
        if held[:limit] == tokens[:limit]:
            return limit
        return next(i for i in range(limit) if held[i] != tokens[i])
