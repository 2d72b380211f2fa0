"""Threads for requests whose images are fetched: callers take turns, and a slow address delays its own caller only.

* A request waits in its caller's queue. Threads take from the queues in turn, and from each in the order of arrival.
* A caller has at most half of the threads, so a caller whose addresses do not answer leaves the rest to others.
* A request's further images are fetched at the same time, as far as its caller's threads are free.
* The images must arrive within a part of the request's time. A slow address is then reported as the client's error,
  before the proxy's deadline counts it as a fault of the instance.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from urllib.parse import urlsplit

from handlers.chat.images.schemes import is_fetched
from handlers.chat.messages import ImageReference
from handlers.errors import STOPPING, HandlerError, InternalError
from handlers.requests.incoming import Caller
from handlers.requests.reply import PendingReply
from handlers.settings.intake import IntakeSettings
from handlers.worker.fair_threads import FairThreads

TIME_SHARE = 2 / 3  # fraction of a request's time for its downloads; the rest is for its answer


def find_line(caller: Caller, references: Sequence[ImageReference]) -> str | None:
    """Return the queue in which a request waits for its downloads; None if it has no image to download.

    The queue is the caller's or, without a caller, that of the first address's host.
    """
    for reference in references:
        if isinstance(reference, str) and is_fetched(reference):
            return caller.line or _host_of(reference.strip())
    return None


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).netloc
    except ValueError:  # the loader refuses it
        return ""


class FetchPool:
    """Runs actions that fetch images. Any thread."""

    def __init__(self, settings: IntakeSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._timeout_s = settings.fetching_timeout_s
        self._threads = FairThreads(settings.fetch_threads, "fetch", max(1, settings.fetch_threads // 2))
        self._lock = threading.Lock()
        self._waiting: dict[Future[None], PendingReply | None] = {}  # None: of an early fetch

    def submit(self, line: str, reply: PendingReply, action: Callable[[], None]) -> Future[None]:
        """Run an action when its queue has its turn, and set the deadline of the reply's downloads.

        The action does not run if its reply is cancelled first. Raises RuntimeError after `shutdown`.
        """
        now = self._clock()
        reply.fetches_end_at = now + min(self._timeout_s, TIME_SHARE * (reply.deadline - now))
        reply.fetch_line = line
        return self._add(line, reply, action, waits=reply)

    def fetch_early(self, reply: PendingReply, fetch: Callable[[PendingReply], bytes | None]) -> "EarlyFetch":
        """Let another thread begin a fetch that this reply's action will need later. Only in an action of `submit`."""
        early = EarlyFetch(reply, fetch)
        assert reply.fetch_line is not None
        with suppress(RuntimeError):  # after `shutdown`, the action fetches by itself
            early.future = self._add(reply.fetch_line, reply, early.run, waits=None)
        return early

    def _add(
        self, line: str, reply: PendingReply, action: Callable[[], None], waits: PendingReply | None
    ) -> Future[None]:
        """Run an action, unless its reply is cancelled first. waits: the reply, if it is lost without this action."""

        def begin() -> None:
            with self._lock:
                self._waiting.pop(future, None)
            action()

        def leave(reason: HandlerError) -> None:
            future.cancel()

        with self._lock:  # so that the action cannot begin before it is registered
            future = self._threads.submit(line, begin)
            self._waiting[future] = waits
        future.add_done_callback(self._forget)
        reply.on_cancel(leave)
        return future

    def _forget(self, future: Future[None]) -> None:
        """Forget an action that has ended, or was cancelled while it waited."""
        with self._lock:
            self._waiting.pop(future, None)

    def shutdown(self) -> None:
        """Refuse new actions, cancel the replies of waiting ones, and wait for running ones."""
        self._threads.refuse()
        with self._lock:
            waiting = list(self._waiting.items())
        for future, reply in waiting:
            if reply is None:  # the running action fetches by itself
                future.cancel()
            else:
                reply.cancel(InternalError(STOPPING))
        self._threads.shutdown()


class EarlyFetch:
    """A fetch that a free thread may begin before its request comes to it.

    The request never waits for a thread: what has not begun by then, it fetches itself. fetch: ends when the reply that
    it gets is cancelled; None leaves the image to the request.
    """

    def __init__(self, reply: PendingReply, fetch: Callable[[PendingReply], bytes | None]) -> None:
        self.future: Future[None] | None = None
        self._reply = reply
        self._fetch = fetch
        self._own = PendingReply(lambda: None)  # ends this fetch alone
        self._own.fetches_end_at = reply.fetches_end_at
        self._is_needed = True
        self._data: bytes | None = None

    def run(self) -> None:
        self._own.on_cancel(self._pass_on)
        self._reply.on_cancel(self._own.cancel)
        self._data = self._fetch(self._own)

    def _pass_on(self, reason: HandlerError) -> None:
        """Cancel the request if the fetch cannot end in time, so that the request does not wait for it."""
        if self._is_needed:
            self._reply.cancel(reason)

    def take(self) -> bytes | None:
        """Return the fetched bytes, once; None if the request must fetch them. Raises what the fetch raises."""
        if self.future is None or self.future.cancel():
            return None
        self.future.result()
        data, self._data = self._data, None
        return data

    def cancel(self) -> None:
        """Do not begin the fetch, or end it."""
        self._is_needed = False
        if self.future is not None and not self.future.cancel():
            self._own.cancel()
