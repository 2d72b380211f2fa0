"""Parts of a sequence's KV cache as bytes, to store them elsewhere and to use them again."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from handlers.engine.kv_cache import BLOCK, CacheShape, SequenceCache

PART = 4 * BLOCK  # positions


def part_bytes(shape: CacheShape) -> int:
    return shape.num_bytes(PART)


def part_names(about: str, keys: Sequence[int], digests: Mapping[int, str]) -> list[bytes]:
    """Name the full parts of a sequence, 32 bytes each, so that a name stands for all tokens up to its part's end.

    about: the model and the cache's layout. keys: see `Sequence`. digests: of the images, by their keys. The names end
    where a key has no digest.
    """
    digest = hashlib.sha256(about.encode())
    names: list[bytes] = []
    for start, end in pairwise(range(0, len(keys) + 1, PART)):
        part = keys[start:end]
        images = sorted({key for key in part if key < 0})
        if not digests.keys() >= set(images):
            break
        places = {key: -1 - place for place, key in enumerate(images)}
        digest.update(array("q", [places.get(key, key) for key in part]).tobytes())
        for key in images:
            digest.update(f"{digests[key]}\n".encode())
        names.append(digest.digest())
    return names


def read_part(cache: SequenceCache, keys: Sequence[int], number: int) -> bytes | None:
    """Return the keys and values of a part; None if the cache does not hold it any more. Engine thread only."""
    start, end = number * PART, (number + 1) * PART
    with cache.pool.lock:
        if cache.tokens[start:end] != keys[start:end]:
            return None
        slots = cache.slots[start:end]
    found = cache.pool.storage.index_select(3, slots).cpu()
    return found.view(torch.uint8).numpy().tobytes()


@torch.inference_mode()
def write_part(cache: SequenceCache, keys: Sequence[int], number: int, content: memoryview) -> None:
    """Extend a cache, which holds all before this part, by the part. Engine thread only. Raises OutOfMemory."""
    start, end = number * PART, (number + 1) * PART
    pool = cache.pool
    layers, kinds, heads, _, size = pool.storage.shape
    cache.truncate(start)
    cache.reserve(end)
    found = torch.frombuffer(bytearray(content), dtype=pool.shape.dtype).view(layers, kinds, heads, PART, size)
    pool.storage.index_copy_(3, cache.slots[start:end], found.to(pool.shape.device))
    cache.advance(keys[start:end])
