"""Keys and values of one conversation, on the device, kept from turn to turn.

The contract: `tokens` names what each stored position holds; positions [0, length) are valid. Only the engine
thread appends, and only while the owning sequence is in its batch. `length` moves when a step has succeeded, so
a step that failed half way leaves nothing behind.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64  # capacity is a multiple of this many positions


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one position of a model's cache is made of."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a cache with room for this many positions, rounded up to whole blocks."""
        capacity = -(-num_tokens // BLOCK) * BLOCK
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype.itemsize * capacity


class SequenceCache:
    """Grows by `reserve`, shrinks by `truncate`, `trim` and `drop`."""

    __slots__ = ("_storage", "shape", "tokens")

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.tokens: list[int] = []
        self._storage: Tensor | None = None  # (layers, 2, kv heads, capacity, head size)

    def __repr__(self) -> str:
        return f"<SequenceCache {self.length}/{self.capacity} positions>"

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def capacity(self) -> int:
        return 0 if self._storage is None else self._storage.shape[3]

    @property
    def num_bytes(self) -> int:
        """Bytes really held on the device."""
        return 0 if self._storage is None else self._storage.nbytes

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` positions in all, keeping what is stored."""
        capacity = -(-num_tokens // BLOCK) * BLOCK
        if capacity > self.capacity:
            self._resize(capacity)

    def trim(self) -> None:
        """Give back the blocks that hold nothing."""
        capacity = -(-self.length // BLOCK) * BLOCK
        if capacity < self.capacity:
            self._resize(capacity)

    def _resize(self, capacity: int) -> None:
        s = self.shape
        storage = None
        if capacity:
            size = (s.num_layers, 2, s.num_kv_heads, capacity, s.head_size)
            storage = torch.empty(size, dtype=s.dtype, device=s.device)
            if self._storage is not None:
                storage[:, :, :, : self.length] = self._storage[:, :, :, : self.length]
        self._storage = storage

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        del self.tokens[length:]

    def drop(self) -> None:
        """Forget everything and free the memory."""
        self.tokens.clear()
        self._storage = None

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's (1, kv heads, new tokens, head size) behind the valid positions; returns all of them."""
        assert self._storage is not None
        end = self.length + keys.shape[2]
        stored = self._storage[layer, :, None, :, :end]  # (2, 1, kv heads, end, head size)
        stored[0, :, :, self.length :] = keys
        stored[1, :, :, self.length :] = values
        return stored[0], stored[1]

    def advance(self, tokens: list[int]) -> None:
        """The step that appended these has succeeded."""
        self.tokens.extend(tokens)

    def common_prefix(self, tokens: list[int]) -> int:
        """How many leading positions hold just these tokens."""
        held = self.tokens
        limit = min(len(held), len(tokens))
        if held[:limit] == tokens[:limit]:
            return limit
        return next(i for i in range(limit) if held[i] != tokens[i])
