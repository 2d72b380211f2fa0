"""SQLite file used from an event loop through one thread and one connection.

Jobs that arrive during a transaction share the next one and its fsync, which makes concurrent submits cheap. A job that
raises is rolled back alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torchmoor.async_inference.queues import sqlite_schema
from torchmoor.errors import ConfigError, QueueUnavailable
from torchmoor.fault_log import FaultLog

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
MAX_JOBS_TOGETHER = 64

_REASONS = {
    sqlite3.SQLITE_FULL: "its disk is full",
    sqlite3.SQLITE_BUSY: "other processes do not let go of it",
    sqlite3.SQLITE_LOCKED: "other processes do not let go of it",
    sqlite3.SQLITE_CORRUPT: "its file is damaged",
    sqlite3.SQLITE_NOTADB: "its file is damaged",
}
_HARMLESS = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)  # the connection remains usable


@dataclass(slots=True)
class _Job:
    work: Callable[[sqlite3.Connection], Any]
    is_durable: bool
    future: Future[Any]
    result: Any = None
    error: BaseException | None = None

    def resolve(self) -> None:
        """Set the future's result."""
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class SqliteDatabase:
    """Runs jobs in transactions. path: created for this user if missing. timeout_s: to wait for other processes."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_closed = False
        self._connection: sqlite3.Connection | None = None
        self._faults = FaultLog(logger)  # used by the thread only
        try:
            self._connect().close()
        except (OSError, sqlite3.Error) as exc:
            raise ConfigError(f"the asynchronous queue's file {path} cannot be used: {exc}") from exc
        self._thread = threading.Thread(target=self._work, name="async-queue", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[sqlite3.Connection], Result], *, is_durable: bool = False) -> Result:
        """Run `work` in a transaction. is_durable: a power cut after the return does not undo it.

        Raises QueueUnavailable, and what `work` raises. Cancelling the caller does not undo a running job.
        """
        if self._is_closed:
            raise QueueUnavailable("The queue of asynchronous requests is closed.")
        future: Future[Result] = Future()
        self._jobs.put(_Job(work, is_durable, future))
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Close the file after the running jobs."""
        if not self._is_closed:
            self._is_closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(
            os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        )  # SQLite itself would make it readable by others
        connection = sqlite3.connect(
            self._path, timeout=self._timeout_s, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
                raise sqlite3.OperationalError("it does not take a write-ahead log; a local disk is needed")
            connection.execute("PRAGMA synchronous = FULL")
            sqlite_schema.prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _work(self) -> None:
        """Run jobs until the end, in the thread."""
        is_last = False
        while not is_last:
            jobs, is_last = self._next_jobs()
            self._do(jobs)
            for job in jobs:
                job.resolve()
        if self._connection is not None:
            self._connection.close()

    def _next_jobs(self) -> tuple[list[_Job], bool]:
        """Wait for jobs. Returns them, and whether they are the last."""
        jobs: list[_Job] = []
        item = self._jobs.get()
        while item is not None:
            if item.future.set_running_or_notify_cancel():
                jobs.append(item)
            if len(jobs) == MAX_JOBS_TOGETHER:
                return jobs, False
            try:
                item = self._jobs.get_nowait()
            except queue.Empty:
                return jobs, False
        return jobs, True

    def _do(self, jobs: list[_Job], *, is_retry: bool = False) -> None:
        """Run all jobs in one transaction; if that fails, each in its own."""
        try:
            self._transact(jobs)
        except Exception as exc:
            self._recover(exc)
            # One job may have failed for all, or the disk has space again. But the wait for a lock was long enough, and
            # after a disk error the log may or may not hold the transaction.
            if not is_retry and _code(exc) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR):
                for job in jobs:
                    self._do([job], is_retry=True)
            else:
                error = self._translate(exc)
                for job in jobs:
                    job.error = error

    def _transact(self, jobs: list[_Job]) -> None:
        if self._connection is None:
            self._connection = self._connect()
        connection = self._connection
        is_durable = any(job.is_durable for job in jobs)
        connection.execute(f"PRAGMA synchronous = {'FULL' if is_durable else 'NORMAL'}")
        connection.execute("BEGIN IMMEDIATE")
        for job in jobs:
            job.error = None
            connection.execute("SAVEPOINT job")
            try:
                job.result = job.work(connection)
            except sqlite3.Error:
                raise
            except Exception as exc:
                job.error = exc
                connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")
        connection.execute("COMMIT")

    def _recover(self, exc: Exception) -> None:
        """End the open transaction; close the connection if it may be damaged."""
        if self._connection is None:
            return
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            if _code(exc) == sqlite3.SQLITE_FULL:  # truncating the log may free enough space
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            if _code(exc) in _HARMLESS:
                return
        except sqlite3.Error as error:
            self._faults.add("asynchronous queue reconnects", error)
        self._connection.close()
        self._connection = None

    def _translate(self, exc: Exception) -> Exception:
        """Return QueueUnavailable for a failure of the store. Any other exception is our own fault and stays."""
        is_foreign = isinstance(exc, (sqlite3.OperationalError, OSError, ConfigError))
        if not is_foreign and type(exc) is not sqlite3.DatabaseError:
            return exc
        reason = _REASONS.get(_code(exc) or 0, "its file cannot be read or written")
        self._faults.add("asynchronous queue unavailable", exc)
        error = QueueUnavailable(f"The queue of asynchronous requests cannot be used now: {reason}. Try again.")
        error.__cause__ = exc
        return error


def _code(exc: Exception) -> int | None:
    """Return SQLite's primary result code."""
    code = getattr(exc, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def used_bytes(db: sqlite3.Connection) -> int:
    """Return the file's size without the pages that deleted rows left free."""
    names = "page_size", "page_count", "freelist_count"
    size, total, free = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
    return int(size * (total - free))
