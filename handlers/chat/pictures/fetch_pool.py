"""Threads for requests whose images are fetched: callers take turns, and a slow address delays its own caller only.

a request waits in its caller's line; the lines take turns, each request in the order of its arrival
a caller has at most half of the threads, so that one whose addresses do not answer leaves the rest to others
the images must arrive within a part of the request's time: a slow address ends as the client's error, before the
proxy's own deadline counts it as a fault of the instance
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from handlers.chat.messages import ImageReference
from handlers.chat.pictures.addresses import is_fetched
from handlers.errors import InternalError
from handlers.reply import PendingReply
from handlers.requests import Caller
from handlers.settings import IntakeSettings

TIME_SHARE = 2 / 3  # of a request's time, for its fetches; the rest is for its answer


def find_line(caller: Caller, references: Sequence[ImageReference]) -> str | None:
    """Return the line in which a request waits for its fetches; None if it has no image to fetch.

    Without a name of the caller it is the line of the first address's host.
    """
    for reference in references:
        if isinstance(reference, str) and is_fetched(reference):
            return caller.scope if caller.principal else _host_of(reference.strip())
    return None


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).netloc
    except ValueError:  # the loader refuses it
        return ""


@dataclass(frozen=True, slots=True)
class _Waiting:
    reply: PendingReply
    action: Callable[[], None]


class FetchPool:
    """Runs actions that fetch images. Any thread."""

    def __init__(self, settings: IntakeSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_threads = settings.fetch_threads
        self._max_per_line = max(1, settings.fetch_threads // 2)
        self._timeout_s = settings.fetching_timeout_s
        self._threads = ThreadPoolExecutor(settings.fetch_threads, "fetch")
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, dict[Future[None], _Waiting]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._is_stopped = False

    def submit(self, line: str, reply: PendingReply, action: Callable[[], None]) -> Future[None]:
        """Run an action when its line has its turn, and set the time at which the reply's fetches end.

        An action whose reply is cancelled before does not run. Raises RuntimeError after `shutdown`.
        """
        now = self._clock()
        reply.fetches_end_at = now + min(self._timeout_s, TIME_SHARE * (reply.deadline - now))
        future: Future[None] = Future()
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the pool is shut down")
            self._waiting.setdefault(line, {})[future] = _Waiting(reply, action)
            self._start_more()
        reply.on_cancel(lambda reason: self._leave(line, future))
        return future

    def _leave(self, line: str, future: Future[None]) -> None:
        with self._lock:
            waiting = self._waiting.get(line, {})
            if waiting.pop(future, None) is not None:
                future.cancel()
                if not waiting:
                    del self._waiting[line]

    def _start_more(self) -> None:
        """Start what may run now. The lock is held."""
        while self._running.total() < self._num_threads:
            line = next((line for line in self._waiting if self._running[line] < self._max_per_line), None)
            if line is None:
                break
            future = next(iter(self._waiting[line]))
            action = self._waiting[line].pop(future).action
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

    def shutdown(self) -> None:
        """Refuse new actions, cancel the replies of those that wait, and wait for those that run."""
        with self._lock:
            self._is_stopped = True
            replies = [each.reply for waiting in self._waiting.values() for each in waiting.values()]
        for reply in replies:
            reply.cancel(InternalError("the worker is stopping"))
        self._threads.shutdown()
