"""Queue in a SQLite file, shared by the processes of one machine. sqlite_schema.py defines its tables.

Only submits and decisions wait for the disk. A power cut may undo a claim, a lease or a finish; another worker then
repeats it, which the fencing token makes safe. A kill -9 undoes nothing.
"""

from __future__ import annotations

import builtins
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any
from uuid import uuid4

from torchmoor.async_inference.queues.queue import CLOCK_TOLERANCE_S, Queue
from torchmoor.async_inference.queues.sqlite_database import SqliteDatabase, used_bytes
from torchmoor.async_inference.queues.sqlite_schema import ENDED, TAKEABLE, UNDECIDED, check_share, take_share
from torchmoor.async_inference.request import (
    CANCELLED,
    EXPIRED,
    AsyncOutcome,
    AsyncRecord,
    AsyncRequest,
    AsyncState,
    Backlog,
    CallerShare,
    Claim,
)
from torchmoor.config.async_queue import AsyncQueueSettings
from torchmoor.errors import ApiError, DiskFull, InferenceIdInUse, QueueFull, ResultLocationInUse

_LAST_SEQ = 2**63 - 1
MAX_AT_ONCE = 500  # rows that one call wakes or drops, so that a transaction stays short
_PENDING = (AsyncState.WAITING, AsyncState.RUNNING, AsyncState.DECIDED)
_COLUMNS = "seq, request, state, attempts, wake_at, updated_at, reason, instance, outcome"


class _MustBeDurable(Exception):
    """Raised when a transaction that need not be durable would decide a request."""


class SqliteQueue(Queue):
    """clock: epoch seconds; may step."""

    def __init__(self, path: Path, settings: AsyncQueueSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._folder = path.parent
        self._database = SqliteDatabase(path, settings.timeout_s)

    async def submit(
        self, request: AsyncRequest, *, refusal: ApiError | None = None, share: CallerShare | None = None
    ) -> AsyncRequest:
        return await self._database.run(partial(self._submit, request, refusal, share), is_durable=True)

    async def claim(self, endpoint: str, lease_s: float, *, may_begin: bool = True) -> Claim | None:
        take = partial(self._take, endpoint, lease_s, may_begin)
        try:
            return await self._database.run(partial(take, False))
        except _MustBeDurable:
            return await self._database.run(partial(take, True), is_durable=True)

    async def extend(self, claim: Claim, lease_s: float, *, instance: str = "") -> bool:
        now = self._clock()
        sql = """
            UPDATE requests SET wake_at = ?, set_at = ?, span_s = ?, instance = CASE ? WHEN '' THEN instance ELSE ? END
            WHERE inference_id = ? AND token = ? AND state IN ('RUNNING', 'DECIDED')
        """
        values = (now + lease_s, now, lease_s, instance, instance, claim.request.inference_id, claim.token)
        return await self._database.run(lambda db: db.execute(sql, values).rowcount == 1)

    async def decide(self, claim: Claim, outcome: AsyncOutcome) -> bool:
        return await self._database.run(partial(self._decide, claim, outcome), is_durable=True)

    async def replace(self, claim: Claim, outcome: AsyncOutcome) -> bool:
        return await self._database.run(partial(self._replace, claim, outcome), is_durable=True)

    async def finish(self, claim: Claim) -> bool:
        return await self._database.run(partial(self._finish, claim))

    async def retry(self, claim: Claim, delay_s: float, reason: str, *, counts: bool = True) -> bool:
        now = self._clock()
        sql = """
            UPDATE requests SET state = CASE state WHEN 'RUNNING' THEN 'WAITING' ELSE state END, token = NULL,
                attempts = attempts - CASE state WHEN 'RUNNING' THEN ? ELSE 0 END,
                wake_at = ?, set_at = ?, span_s = ?, reason = ?, updated_at = ?
            WHERE inference_id = ? AND token = ? AND state IN ('RUNNING', 'DECIDED')
        """
        num_uncounted = 0 if counts else 1
        wake_at = now + delay_s if delay_s > 0 else None
        values = (num_uncounted, wake_at, now, delay_s, reason, now, claim.request.inference_id, claim.token)
        return await self._database.run(lambda db: db.execute(sql, values).rowcount == 1)

    async def cancel(self, inference_id: str, outcome: AsyncOutcome = CANCELLED) -> AsyncState | None:
        return await self._database.run(partial(self._cancel, inference_id, outcome), is_durable=True)

    async def size_bytes(self) -> int:
        return await self._database.run(used_bytes)

    async def get(self, inference_id: str) -> AsyncRecord | None:
        sql = f"SELECT {_COLUMNS} FROM requests WHERE inference_id = ?"
        row = await self._database.run(lambda db: db.execute(sql, (inference_id,)).fetchone())
        return None if row is None else AsyncRecord.restore(row)

    async def list(
        self,
        endpoint: str,
        state: AsyncState | None = None,
        after: str | None = None,
        limit: int = 100,
        *,
        is_newest_first: bool = False,
    ) -> Sequence[AsyncRecord]:
        return await self._database.run(partial(self._list, endpoint, state, after, limit, is_newest_first))

    async def backlog(self, endpoint: str) -> Backlog:
        return await self._database.run(partial(self._backlog, endpoint))

    async def forget(self) -> int:
        return await self._database.run(self._forget)

    async def close(self) -> None:
        await self._database.close()

    # The methods below run in the database's thread, inside a transaction.

    def _submit(
        self, request: AsyncRequest, refusal: ApiError | None, share: CallerShare | None, db: sqlite3.Connection
    ) -> AsyncRequest:
        row = db.execute(
            "SELECT r.request, i.body FROM requests r LEFT JOIN inputs i USING (seq) WHERE r.invocation = ?",
            (request.invocation_key,),
        ).fetchone()
        if row is not None:
            return AsyncRequest.from_json(*row)
        found = db.execute("SELECT 1 FROM requests WHERE inference_id = ?", (request.inference_id,)).fetchone()
        if found is not None:
            raise InferenceIdInUse(request.inference_id)
        if refusal is not None:
            raise refusal
        if any(_is_reserved(db, location) for location in request.locations):
            raise ResultLocationInUse
        size = len(request.body or b"")
        if share is not None:
            check_share(db, share, size)
        self._check_limits(db, request.endpoint, size)
        request = request.stamped(self._clock())
        _insert(db, request, share, size)
        return request

    def _check_limits(self, db: sqlite3.Connection, endpoint: str, size: int) -> None:
        """Raise QueueFull or DiskFull if the request exceeds a limit."""
        if used_bytes(db) + size > self._settings.max_file_bytes:
            raise DiskFull("async_queue.max_file_bytes")
        if shutil.disk_usage(self._folder).free < self._settings.min_free_bytes:
            raise DiskFull("async_queue.min_free_bytes")
        num_pending = num_bytes = 0
        for state, count, body_bytes in _totals(db, endpoint):
            if state in _PENDING:
                num_pending, num_bytes = num_pending + count, num_bytes + body_bytes
        if num_pending >= self._settings.max_pending:
            raise QueueFull(endpoint, "max_pending")
        if num_bytes + size > self._settings.max_pending_bytes:
            raise QueueFull(endpoint, "max_pending_bytes")

    def _take(
        self, endpoint: str, lease_s: float, may_begin: bool, may_expire: bool, db: sqlite3.Connection
    ) -> Claim | None:
        now = self._clock()
        _wake(db, endpoint, now)
        seq = _first(db, "INDEXED BY decided WHERE endpoint = ? AND wake_at IS NULL AND state = 'DECIDED'", endpoint)
        if seq is not None:
            return _hold(db, seq, lease_s, now, "")
        where = f"INDEXED BY expiring WHERE endpoint = ? AND {TAKEABLE} AND expires_at <= ?"
        seq = _first(db, where, endpoint, now, order="expires_at")
        if seq is not None:
            if not may_expire:
                raise _MustBeDurable
            _settle(db, seq, EXPIRED, now)
            return _hold(db, seq, lease_s, now, "")
        seq = _first(db, f"INDEXED BY takeable WHERE endpoint = ? AND {TAKEABLE}", endpoint) if may_begin else None
        if seq is None:
            return None
        return _hold(db, seq, lease_s, now, "state = 'RUNNING', attempts = attempts + 1,")

    def _decide(self, claim: Claim, outcome: AsyncOutcome, db: sqlite3.Connection) -> bool:
        row = db.execute(
            "SELECT r.seq, r.state, r.span_s, r.outcome, o.body FROM requests r LEFT JOIN outputs o USING (seq)"
            " WHERE r.inference_id = ? AND r.token = ?",
            (claim.request.inference_id, claim.token),
        ).fetchone()
        if row is None:
            return False
        seq, state, span_s, settled, body = row
        if state == AsyncState.DECIDED:  # the same claim decided it; the answer was lost
            return AsyncOutcome.from_json(settled, body) == outcome
        if state != AsyncState.RUNNING:
            return False
        now = self._clock()
        _settle(db, seq, outcome, now)
        db.execute("UPDATE requests SET wake_at = ?, set_at = ? WHERE seq = ?", (now + span_s, now, seq))
        return True

    def _replace(self, claim: Claim, outcome: AsyncOutcome, db: sqlite3.Connection) -> bool:
        row = db.execute(
            "UPDATE requests SET outcome = ?, reason = ?, updated_at = ?"
            " WHERE inference_id = ? AND token = ? AND state = 'DECIDED' RETURNING seq",
            (outcome.to_json(), outcome.reason, self._clock(), claim.request.inference_id, claim.token),
        ).fetchone()
        if row is None:
            return False
        db.execute("DELETE FROM outputs WHERE seq = ?", row)
        return True

    def _finish(self, claim: Claim, db: sqlite3.Connection) -> bool:
        row = db.execute(
            "SELECT seq, state, outcome FROM requests WHERE inference_id = ? AND token = ?",
            (claim.request.inference_id, claim.token),
        ).fetchone()
        if row is None:
            return False
        seq, state, settled = row
        if AsyncState(state).is_end:  # the same claim finished it; the answer was lost
            return True
        if state != AsyncState.DECIDED:
            raise ValueError("a request is finished after it is decided")
        end = AsyncOutcome.from_json(settled, None)
        db.execute(
            "UPDATE requests SET state = ?, reason = ?, wake_at = NULL, updated_at = ? WHERE seq = ?",
            (end.state.value, end.reason, self._clock(), seq),
        )
        db.execute("DELETE FROM inputs WHERE seq = ?", (seq,))
        db.execute("DELETE FROM outputs WHERE seq = ?", (seq,))
        db.execute("DELETE FROM reserved WHERE location IN (?, ?)", claim.request.locations)
        return True

    def _cancel(self, inference_id: str, outcome: AsyncOutcome, db: sqlite3.Connection) -> AsyncState | None:
        row = db.execute("SELECT seq, state, outcome FROM requests WHERE inference_id = ?", (inference_id,)).fetchone()
        if row is None:
            return None
        seq, state, settled = row
        if settled is None:
            _settle(db, seq, outcome, self._clock())
            db.execute("UPDATE requests SET token = NULL, wake_at = NULL WHERE seq = ?", (seq,))
            return AsyncState.CANCELLED
        end = AsyncOutcome.from_json(settled, None).state
        return end if end is AsyncState.CANCELLED else AsyncState(state)

    def _list(
        self,
        endpoint: str,
        state: AsyncState | None,
        after: str | None,
        limit: int,
        is_newest_first: bool,
        db: sqlite3.Connection,
    ) -> Sequence[AsyncRecord]:
        found = db.execute("SELECT seq FROM requests WHERE inference_id = ?", (after,)).fetchone()
        sql = f"""
            SELECT {_COLUMNS} FROM requests INDEXED BY by_state
            WHERE endpoint = ? AND state = ? AND seq {"<" if is_newest_first else ">"} ?
            ORDER BY seq {"DESC" if is_newest_first else ""} LIMIT ?
        """
        first = _LAST_SEQ if is_newest_first else 0
        rows: builtins.list[Any] = []
        for one in AsyncState if state is None else (state,):
            rows += db.execute(sql, (endpoint, one.value, found[0] if found else first, limit)).fetchall()
        rows.sort(key=itemgetter(0), reverse=is_newest_first)
        return [AsyncRecord.restore(row) for row in rows[:limit]]

    def _backlog(self, endpoint: str, db: sqlite3.Connection) -> Backlog:
        counts = {AsyncState(state): count for state, count, _ in _totals(db, endpoint)}
        heads = []
        for state in (AsyncState.WAITING, AsyncState.RUNNING):
            sql = "SELECT request FROM requests WHERE endpoint = ? AND state = ? ORDER BY seq LIMIT 1"
            heads += [
                AsyncRequest.from_json(row[0], None).received_at for row in db.execute(sql, (endpoint, state.value))
            ]
        return Backlog.of(counts, min(heads, default=None), self._clock())

    def _forget(self, db: sqlite3.Connection) -> int:
        total = "SELECT coalesce(sum(requests), 0) FROM totals WHERE " + ENDED
        num_excess = db.execute(total).fetchone()[0] - self._settings.max_remembered
        oldest = f"SELECT seq FROM requests INDEXED BY ended WHERE {ENDED}"
        num_old = db.execute(
            f"DELETE FROM requests WHERE seq IN ({oldest} AND updated_at < ? ORDER BY updated_at LIMIT ?)",
            (self._clock() - self._settings.remember_s, MAX_AT_ONCE),
        ).rowcount
        num_more = min(num_excess, MAX_AT_ONCE) - num_old
        if num_more > 0:
            sql = f"DELETE FROM requests WHERE seq IN ({oldest} ORDER BY updated_at LIMIT ?)"
            num_old += db.execute(sql, (num_more,)).rowcount
        return num_old


def _wake(db: sqlite3.Connection, endpoint: str, now: float) -> None:
    """Make requests claimable whose lease or delay is over; after a clock step back, restart their span now."""
    db.execute(
        "UPDATE requests SET wake_at = ? + span_s, set_at = ? WHERE seq IN (SELECT seq FROM requests INDEXED BY slept"
        " WHERE endpoint = ? AND wake_at IS NOT NULL AND set_at > ? LIMIT ?)",
        (now, now, endpoint, now + CLOCK_TOLERANCE_S, MAX_AT_ONCE),
    )
    db.execute(
        "UPDATE requests SET wake_at = NULL WHERE seq IN (SELECT seq FROM requests INDEXED BY sleeping"
        " WHERE endpoint = ? AND wake_at IS NOT NULL AND wake_at <= ? ORDER BY wake_at LIMIT ?)",
        (endpoint, now, MAX_AT_ONCE),
    )


def _first(db: sqlite3.Connection, where: str, *values: object, order: str = "seq") -> int | None:
    row = db.execute(f"SELECT seq FROM requests {where} ORDER BY {order} LIMIT 1", values).fetchone()
    return None if row is None else int(row[0])


def _insert(db: sqlite3.Connection, request: AsyncRequest, share: CallerShare | None, size: int) -> None:
    """Add a waiting request, its body, its caller's share and the places of its results."""
    seq = db.execute(
        "INSERT INTO requests"
        " (inference_id, endpoint, invocation, request, expires_at, body_bytes, state, updated_at)"
        " VALUES (?, ?, ?, ?, ?, ?, 'WAITING', ?)",
        (
            *(request.inference_id, request.endpoint, request.invocation_key, request.to_json()),
            *(request.expires_at, size, request.received_at),
        ),
    ).lastrowid
    if request.body is not None:
        db.execute("INSERT INTO inputs VALUES (?, ?)", (seq, request.body))
    if share is not None:
        take_share(db, share, seq, size)
    for location in request.locations:
        db.execute("INSERT OR IGNORE INTO reserved VALUES (?)", (location,))


def _hold(db: sqlite3.Connection, seq: int, lease_s: float, now: float, changes: str) -> Claim:
    """Lease a request to a new claim."""
    token = uuid4().hex
    db.execute(
        f"UPDATE requests SET {changes} token = ?, wake_at = ?, set_at = ?, span_s = ?, updated_at = ? WHERE seq = ?",
        (token, now + lease_s, now, lease_s, now, seq),
    )
    row = db.execute(
        "SELECT r.request, i.body, r.attempts, r.outcome, o.body FROM requests r"
        " LEFT JOIN inputs i USING (seq) LEFT JOIN outputs o USING (seq) WHERE r.seq = ?",
        (seq,),
    ).fetchone()
    return Claim.restore(token, row)


def _settle(db: sqlite3.Connection, seq: int, outcome: AsyncOutcome, now: float) -> None:
    """Fix a request's outcome."""
    sql = (
        f"UPDATE requests SET state = 'DECIDED', outcome = ?, reason = ?, updated_at = ? WHERE seq = ? AND {UNDECIDED}"
    )
    done = db.execute(sql, (outcome.to_json(), outcome.reason, now, seq)).rowcount
    assert done == 1, "a request is decided once"
    if outcome.body is not None:
        db.execute("INSERT INTO outputs VALUES (?, ?)", (seq, outcome.body))


def _is_reserved(db: sqlite3.Connection, location: str) -> bool:
    """Return whether a pending request has this location, one above it or one below it."""
    above = [location[:at] for at, letter in enumerate(location) if letter == "/"]
    sql = f"""
        SELECT 1 FROM reserved WHERE location IN (?{", ?" * len(above)})
        UNION ALL SELECT 1 FROM reserved WHERE location > ? AND location < ?
    """  # "0" is the character after "/"
    return db.execute(sql, (location, *above, location + "/", location + "0")).fetchone() is not None


def _totals(db: sqlite3.Connection, endpoint: str) -> builtins.list[tuple[str, int, int]]:
    """Return the number of requests in each state, and the size of their inline bodies."""
    return db.execute("SELECT state, requests, body_bytes FROM totals WHERE endpoint = ?", (endpoint,)).fetchall()
