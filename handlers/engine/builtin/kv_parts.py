"""Converts parts of a sequence's KV cache to bytes and back, to store them elsewhere."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch

from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.kv_cache import BLOCK, SequenceCache
from handlers.engine.contract import KvCache, KvPart

PART_BLOCKS = 4  # of a part that is not the last one
PART = PART_BLOCKS * BLOCK  # positions


class BlockParts:
    """Implements `KvParts` for whole blocks."""

    length = PART

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shape = shape = engine.runner.pool.shape
        fingerprint = engine.runner.model.fingerprint
        self._about = f"{fingerprint} {shape.num_layers} {shape.num_kv_heads} {shape.head_size} {shape.dtype}"
        self.max_bytes = shape.num_bytes(PART)

    @property
    def token_s(self) -> float | None:
        return self._engine.scheduler.pace.token_s

    def keys(self, cache: KvCache) -> list[int]:
        return list(_own(cache).tokens)

    def name(self, keys: Sequence[int], digests: Mapping[int, str], variant: str) -> list[bytes]:
        """Name the full blocks, 32 bytes each, also by the model and the cache's layout."""
        digest = hashlib.sha256(f"{self._about} {variant}".rstrip().encode())
        names: list[bytes] = []
        for start, end in pairwise(range(0, len(keys) + 1, BLOCK)):
            block = keys[start:end]
            images = sorted({key for key in block if key < 0})
            if not digests.keys() >= set(images):
                break
            places = {key: -1 - place for place, key in enumerate(images)}
            digest.update(array("q", [places.get(key, key) for key in block]).tobytes())
            for key in images:
                digest.update(f"{digests[key]}\n".encode())
            names.append(digest.digest())
        return names

    def split(self, names: Sequence[bytes]) -> list[KvPart]:
        ends = [min(start + PART_BLOCKS, len(names)) for start in range(0, len(names), PART_BLOCKS)]
        return [KvPart(names[end - 1], number * PART, end * BLOCK) for number, end in enumerate(ends)]

    def find(self, names: Sequence[bytes], number: int, num_bytes: int) -> KvPart | None:
        num_blocks, rest = divmod(num_bytes, self._shape.block_bytes)
        last = number * PART_BLOCKS + num_blocks - 1
        if rest or not 1 <= num_blocks <= PART_BLOCKS or last >= len(names):
            return None
        return KvPart(names[last], number * PART, (last + 1) * BLOCK)

    def read(self, cache: KvCache, keys: Sequence[int], part: KvPart, variant: str) -> bytes | None:
        return self._engine.call(partial(_read, _own(cache), keys, part, variant)).result()

    def write(self, cache: KvCache, keys: Sequence[int], part: KvPart, content: memoryview) -> None:
        self._engine.call(partial(_write, _own(cache), keys, part, content)).result()


def _read(cache: SequenceCache, keys: Sequence[int], part: KvPart, variant: str) -> bytes | None:
    """Return the keys and values of a part; None if the cache no longer holds it. Engine thread only."""
    with cache.pool.lock:
        if cache.variant != variant or cache.tokens[part.start : part.end] != keys[part.start : part.end]:
            return None
        slots = cache.slots[part.start : part.end]
    found = cache.pool.storage.index_select(3, slots).cpu()
    return found.view(torch.uint8).numpy().tobytes()


@torch.inference_mode()
def _write(cache: SequenceCache, keys: Sequence[int], part: KvPart, content: memoryview) -> None:
    """Append a part to a cache that holds everything before it. Engine thread only. Raises OutOfMemory."""
    pool = cache.pool
    layers, kinds, heads, _, size = pool.storage.shape
    cache.truncate(part.start)
    cache.reserve(part.end)
    found = torch.frombuffer(bytearray(content), dtype=pool.shape.dtype)
    found = found.view(layers, kinds, heads, part.end - part.start, size)
    pool.storage.index_copy_(3, cache.slots[part.start : part.end], found.to(pool.shape.device))
    cache.advance(keys[part.start : part.end])


def _own(cache: KvCache) -> SequenceCache:
    assert isinstance(cache, SequenceCache)  # the pool has opened it
    return cache
