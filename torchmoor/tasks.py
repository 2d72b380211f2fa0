"""Asyncio tasks in the background, and their end; calls in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from typing import Any, TypeVar, TypeVarTuple

Values = TypeVarTuple("Values")
T = TypeVar("T")


class BackgroundTasks:
    """Tasks that run until they end or are cancelled. asyncio itself keeps no reference to a task.

    max_tasks: `is_full` is True while that many run.
    """

    def __init__(self, max_tasks: float = inf) -> None:
        self._max_tasks = max_tasks
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_full(self) -> bool:
        return len(self._tasks) >= self._max_tasks

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` in a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait until all have ended, and leave them running if the wait is cancelled. Their errors are dropped."""
        await asyncio.gather(*map(asyncio.shield, self._tasks), return_exceptions=True)

    async def cancel(self) -> None:
        """Cancel all, and wait until they have ended. Their errors are dropped."""
        await cancel_all(self._tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended. Their errors are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait_at_most(timeout_s: float, event: asyncio.Event) -> None:
    """Wait until the event is set or the time is over."""
    with suppress(TimeoutError):  # not wait_for: Python 3.11's can lose a cancellation
        async with asyncio.timeout(timeout_s):
            await event.wait()


def start_thread(call: Callable[[*Values], T], *values: *Values) -> asyncio.Future[T]:
    """Make a call in a thread of its own. Raises RuntimeError if none can be started."""
    executor = ThreadPoolExecutor(1)  # not the event loop's: it keeps a call that it refuses, and runs it later
    try:
        return asyncio.wrap_future(executor.submit(call, *values))
    finally:
        executor.shutdown(wait=False)


async def in_thread(call: Callable[[*Values], T], *values: *Values) -> T:
    """Return a call's result, from a thread of its own, or from the caller's thread if none can be started."""
    try:
        running = start_thread(call, *values)
    except RuntimeError:
        return call(*values)
    return await running
