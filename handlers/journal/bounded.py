"""A journal with a time-out for each operation, and one operation at a time while the store hangs.

    answering --an operation times out--> stalled --an operation ends in time--> answering

While it is stalled, one operation at a time tests whether the store is back; the others are refused at once. So a
hanging store blocks at most one of the worker's threads, for at most the time-out. Each operation runs on a thread of
its own, since some waits cannot be interrupted: a directory on a dead NFS server, a name server, a peer that sends one
byte per second. An operation that timed out continues there and may still succeed.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from handlers.journal.journal import Journal

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def _bounded(method: Callable[Concatenate[Journal, P], T]) -> Callable[Concatenate["BoundedJournal", P], T]:
    """Make the method of a BoundedJournal that calls this one of its journal."""

    def call(bounded: "BoundedJournal", /, *args: P.args, **options: P.kwargs) -> T:
        own: Callable[P, T] = getattr(bounded._journal, method.__name__)  # the journal is of a class of its own
        return bounded._run(partial(own, *args, **options))

    return call


class BoundedJournal:
    """timeout_s: for one operation. max_in_flight: operations at once, including timed-out ones that still hang."""

    def __init__(self, journal: Journal, timeout_s: float, max_in_flight: int) -> None:
        self._journal = journal
        self.timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        self._lock = threading.Lock()
        self._num_in_flight = 0
        self._is_stalled = False
        self._is_tried = False  # a test operation is in flight
        self._sweeping: Future[None] | None = None

    def __repr__(self) -> str:
        state = "stalled" if self._is_stalled else "answering"
        return f"<BoundedJournal {state} {self._num_in_flight}/{self._max_in_flight} in flight>"

    @property
    def used_bytes(self) -> int:
        return self._journal.used_bytes

    @property
    def num_sessions(self) -> int:
        return self._journal.num_sessions

    check_room = _bounded(Journal.check_room)
    append = _bounded(Journal.append)
    read = _bounded(Journal.read)
    put_image = _bounded(Journal.put_image)
    get_image = _bounded(Journal.get_image)
    put_kv = _bounded(Journal.put_kv)
    read_kv = _bounded(Journal.read_kv)
    close = _bounded(Journal.close)
    delete = _bounded(Journal.delete)
    claim = _bounded(Journal.claim)
    enlist = _bounded(Journal.enlist)
    delist = _bounded(Journal.delist)
    list_owned = _bounded(Journal.list_owned)
    list_ids = _bounded(Journal.list_ids)

    def sweep(self, expired_before: int, *, is_full: bool) -> None:
        """Sweep. A sweep that takes longer than the time-out continues, and the next call is skipped."""
        if self._sweeping is not None and not self._sweeping.done():
            return
        self._sweeping = _start(partial(self._journal.sweep, expired_before, is_full=is_full))
        try:
            self._sweeping.result(self.timeout_s)
        except TimeoutError:
            if self._sweeping.done():
                raise
            self._sweeping.add_done_callback(_log_failure)

    def _run(self, action: Callable[[], T]) -> T:
        """Run the action. Raises its errors, TimeoutError, and BlockingIOError if it was refused."""
        is_trial = self._enter()
        has_timed_out = False
        try:
            return _start(action, self._leave).result(self.timeout_s)
        except TimeoutError:
            has_timed_out = True
            raise TimeoutError("the journal did not answer in time") from None
        finally:
            with self._lock:
                self._is_stalled = has_timed_out
                if is_trial:
                    self._is_tried = False

    def _enter(self) -> bool:
        """Return True if the operation tests whether the store answers again."""
        with self._lock:
            if self._num_in_flight >= self._max_in_flight:
                raise BlockingIOError(f"{self._num_in_flight} operations of the journal are in flight")
            if self._is_stalled and self._is_tried:
                raise BlockingIOError("the journal does not answer")
            self._is_tried = self._is_stalled
            self._num_in_flight += 1
            return self._is_stalled

    def _leave(self) -> None:
        with self._lock:
            self._num_in_flight -= 1


def _log_failure(sweeping: "Future[None]") -> None:
    error = sweeping.exception()
    if error is not None:
        logger.error("sweep of the journal failed after its time-out error=%s", error, exc_info=error)


def _start(action: Callable[[], T], after: Callable[[], None] = lambda: None) -> "Future[T]":
    """Run the action on a daemon thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = action()
        except BaseException as exc:
            after()
            future.set_exception(exc)
        else:
            after()
            future.set_result(result)

    try:
        threading.Thread(target=run, name="journal", daemon=True).start()
    except RuntimeError as exc:
        after()
        raise OSError("no thread can be started for the journal") from exc
    return future
