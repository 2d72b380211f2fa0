"""An asyncio event loop on a thread of its own, since the worker's threads are not asynchronous."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from handlers.errors import InternalError

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines and callbacks of other threads."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine's result. Any thread but the loop's. Raises InternalError after `stop`."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except RuntimeError as exc:
            if not self._loop.is_closed():
                raise
            work.close()
            raise InternalError("the worker is stopping") from exc

    def post(self, action: Callable[[], object]) -> None:
        """Run an action on the loop, after those that were posted before. Raises InternalError after `stop`."""
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError as exc:
            raise InternalError("the worker is stopping") from exc

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
