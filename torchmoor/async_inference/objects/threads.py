"""Blocking calls off the event loop: a bounded number of threads, and an end that waits for what they still do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A pool of threads. A cancelled caller does not wait, but the call that has begun goes on to its end."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._executor = ThreadPoolExecutor(max_threads, name)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result."""
        return await asyncio.wrap_future(self.submit(call, *args, **kwargs))

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have it done whatever becomes of the caller. From the event loop or one of the threads."""
        return self._executor.submit(call, *args, **kwargs)

    async def close(self) -> None:
        """Take no more calls, and wait for those that were submitted."""
        await asyncio.to_thread(self._executor.shutdown)
