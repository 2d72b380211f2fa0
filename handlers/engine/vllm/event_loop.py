"""An asyncio event loop on a thread of its own, since the worker's threads are not asynchronous."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from handlers.errors import STOPPING, InternalError

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines and callbacks of other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()  # a thread may wait for it
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine's result. Any thread but the loop's. Raises InternalError once the loop stops."""
        with self._lock:
            if self._is_stopping:
                work.close()
                raise InternalError(STOPPING)
            result = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return result.result()
        except CancelledError as exc:
            raise InternalError(STOPPING) from exc

    def post(self, action: Callable[[], object]) -> None:
        """Run an action on the loop, after those that were posted before. Raises InternalError once the loop stops."""
        with self._lock:
            if self._is_stopping:
                raise InternalError(STOPPING)
            self._loop.call_soon_threadsafe(action)

    def stop(self) -> None:
        """End the loop and its thread. Cancels what still runs there."""
        with self._lock:
            self._is_stopping = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
