"""A thread pool with a queue (line) per caller, so that a caller with much work delays only its own.

Free threads serve the lines in turn; within a line the order is that of arrival.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class FairThreads:
    """Runs actions on threads. Any thread. max_per_line: threads that one line may use at a time; 0: all."""

    def __init__(self, num_threads: int, name: str, max_per_line: int = 0) -> None:
        self._num_threads = num_threads
        self._max_per_line = max_per_line or num_threads
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.RLock()  # a future that is cancelled leaves its line at once
        self._waiting: OrderedDict[str, dict[Future[None], Callable[[], None]]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._is_stopped = False

    def submit(self, line: str, action: Callable[[], None]) -> Future[None]:
        """Run an action when its line has its turn, unless it is cancelled first. Raises RuntimeError after `shutdown`.

        line: "" for work that belongs to no caller.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the threads have ended")
            self._waiting.setdefault(line, {})[future] = action
            self._start_more()
        future.add_done_callback(lambda done: self._leave(line, done))
        return future

    def _leave(self, line: str, future: Future[None]) -> None:
        with self._lock:
            waiting = self._waiting.get(line, {})
            if waiting.pop(future, None) is not None and not waiting:
                del self._waiting[line]

    def _start_more(self) -> None:
        """Start what may run now. The lock is held."""
        while self._running.total() < self._num_threads:
            line = next((line for line in self._waiting if self._running[line] < self._max_per_line), None)
            if line is None:
                break
            self._start(line)

    def _start(self, line: str) -> None:
        future = next(iter(self._waiting[line]))
        action = self._waiting[line].pop(future)
        if self._waiting[line]:
            self._waiting.move_to_end(line)
        else:
            del self._waiting[line]
        if future.set_running_or_notify_cancel():
            self._running[line] += 1
            self._threads.submit(self._run, line, future, action)

    def _run(self, line: str, future: Future[None], action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        finally:
            with self._lock:
                self._running[line] -= 1
                if not self._running[line]:
                    del self._running[line]
                self._start_more()

    def refuse(self) -> None:
        """Refuse further actions."""
        with self._lock:
            self._is_stopped = True

    def shutdown(self) -> None:
        """Refuse further actions, and wait until all others have ended."""
        with self._lock:
            self._is_stopped = True
            while self._waiting:
                self._start(next(iter(self._waiting)))
        self._threads.shutdown()
