"""A short-lived cache of expensive answers: concurrent equal queries cost one look-up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from time import monotonic
from typing import Any

from torchmoor.wire.last_kept import LastKept

MAX_KEPT = 16  # different queries


class RecentAnswers:
    """Computes one answer at a time and keeps it for `fresh_s`, so that the cost is bounded under any load."""

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._lock = asyncio.Lock()
        self._kept: LastKept[Hashable, tuple[float, Any]] = LastKept(MAX_KEPT)
        self._num_changes = 0

    async def get(self, query: Hashable, find: Callable[[], Awaitable[Any]]) -> Any:
        """Return the fresh answer to a query, or call `find` for it."""
        async with self._lock:
            known = self._kept.get(query)
            if known is None or monotonic() - known[0] >= self._fresh_s:
                num_changes = self._num_changes
                answer = await find()
                if num_changes != self._num_changes:  # possibly older than the change: not kept for later callers
                    return answer
                known = (monotonic(), answer)
            self._kept.keep(query, known)
            return known[1]

    def forget(self) -> None:
        """Drop all answers after a change, those being computed included."""
        self._num_changes += 1
        self._kept.clear()
