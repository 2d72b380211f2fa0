"""Bridge from a blocking iterator to a coroutine, by a thread that runs the iterator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_AHEAD = 64  # items that wait for the coroutine


async def read_in_thread(iterate: Callable[[], Iterator[T]], abort: Callable[[], object]) -> AsyncGenerator[T, None]:
    """Yield the iterator's items. The iterator stops when the caller does.

    iterate: makes the iterator, in the thread that also closes it. abort: ends a wait for the next item; it is called
    from another thread.
    """
    reading = _Reading(iterate, asyncio.get_running_loop())
    reading.thread.start()
    is_over = False
    try:
        while (item := await reading.items.get()) is not _END:
            reading.permits.release()
            yield item  # type: ignore[misc]
        is_over = True
        if reading.error is not None:
            raise reading.error
    finally:
        if not is_over:
            reading.is_wanted = False
            reading.permits.release()
            abort()


class _Reading(Generic[T]):
    def __init__(self, iterate: Callable[[], Iterator[T]], loop: asyncio.AbstractEventLoop) -> None:
        self.items: asyncio.Queue[T | object] = asyncio.Queue()
        self.permits = threading.Semaphore(MAX_AHEAD)
        self.is_wanted = True
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="read-stream", daemon=True)
        self._iterate = iterate
        self._loop = loop

    def _run(self) -> None:
        iterator = self._iterate()
        try:
            for item in iterator:
                self.permits.acquire()
                if not self.is_wanted:
                    break
                self._put(item)
        except BaseException as error:
            self.error = error
        finally:
            getattr(iterator, "close", lambda: None)()
            self._put(_END)

    def _put(self, item: T | object) -> None:
        try:
            self._loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:  # the loop is closed
            self.is_wanted = False


_END = object()
