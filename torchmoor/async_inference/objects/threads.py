"""Thread pool that runs an object store's blocking calls off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Runs calls in at most `max_threads` threads. Cancelling the caller does not stop a call that has begun."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._executor = ThreadPoolExecutor(max_threads, name)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the call's result."""
        return await asyncio.wrap_future(self.submit(call, *args, **kwargs))

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a call that continues without its caller. May be used from the event loop and from the threads."""
        return self._executor.submit(call, *args, **kwargs)

    async def close(self) -> None:
        """Wait for the submitted calls; accept no more."""
        await asyncio.to_thread(self._executor.shutdown)
