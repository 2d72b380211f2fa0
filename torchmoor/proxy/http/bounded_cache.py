"""A bounded cache of parsed values, which is emptied when it is full."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """`cache[key]` calls `read` for an unknown key; the lookup of a known key runs no Python code."""

    def __init__(
        self, read: Callable[[K], V], max_items: int, may_keep: Callable[[K, V], bool] = lambda key, value: True
    ) -> None:
        """read: makes a key's value, or raises. may_keep: whether to remember it."""
        super().__init__()
        self._read = read
        self._max_items = max_items
        self._may_keep = may_keep

    def __missing__(self, key: K) -> V:
        value = self._read(key)
        if self._may_keep(key, value):
            if len(self) >= self._max_items:
                self.clear()
            self[key] = value
        return value
