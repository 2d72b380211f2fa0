"""Answers that cost something to find, found once for all who ask at about the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from time import monotonic
from typing import Any

MAX_KEPT = 16  # different questions


class RecentAnswers:
    """One is found at a time, and is good for `fresh_s`: so the cost is bounded, however many ask whatever."""

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._lock = asyncio.Lock()
        self._kept: dict[Hashable, tuple[float, Any]] = {}
        self._num_changes = 0

    async def get(self, question: Hashable, find: Callable[[], Awaitable[Any]]) -> Any:
        """The answer to a question: a fresh one, or what `find` finds."""
        async with self._lock:
            known = self._kept.pop(question, None)
            if known is None or monotonic() - known[0] >= self._fresh_s:
                num_changes = self._num_changes
                answer = await find()
                if num_changes != self._num_changes:  # it may be of before: good for who asked, and for nobody after
                    return answer
                known = (monotonic(), answer)
            self._kept[question] = known
            while len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            return known[1]

    def forget(self) -> None:
        """Something has been changed: no answer that was found, or begun to be, is good any more."""
        self._num_changes += 1
        self._kept.clear()
