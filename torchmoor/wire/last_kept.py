"""A dictionary of the last entries, in which a new one replaces the oldest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LastKept(OrderedDict[K, V]):
    """Keeps max_kept entries, the oldest first. Assign with `keep` only."""

    def __init__(self, max_kept: int) -> None:
        super().__init__()
        self._max_kept = max_kept

    def keep(self, key: K, value: V) -> None:
        """Set an entry, and make it the newest."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._max_kept:
            self.popitem(last=False)
