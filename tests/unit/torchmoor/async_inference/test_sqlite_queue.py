"""Faults and plans of a queue in a file: a full, locked or damaged file, another program's file, and indexes."""

import asyncio
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.unit.torchmoor.async_inference.stores import ENDPOINT, Store, claimed, ended, request, result
from torchmoor.async_inference.queues.sqlite_database import SqliteDatabase
from torchmoor.async_inference.queues.sqlite_queue import SqliteQueue
from torchmoor.config.async_queue import AsyncQueueSettings
from torchmoor.errors import ConfigError, QueueUnavailable

pytestmark = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


def sqlite_queue(store: Store, **limits: float) -> SqliteQueue:
    """Open the store's queue."""
    return store.opened(**limits)


def file_of(store: Store) -> Path:
    """Return the queue's file."""
    return Path(store.url.removeprefix("sqlite://"))


class Watched(sqlite3.Connection):
    """A connection to a disk whose free space the test sets; it records statements."""

    max_pages = 100_000
    statements: ClassVar[set[str]] = set()

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql.startswith("BEGIN"):
            super().execute(f"PRAGMA max_page_count = {self.max_pages}")
            self.set_trace_callback(self.statements.add)
        return super().execute(sql, *parameters)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    """Make every new connection a Watched one."""

    class Own(Watched):
        statements: ClassVar[set[str]] = set()

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Own))
    return Own


def test_a_full_disk_refuses_and_loses_nothing(watched: type[Watched], store: Store) -> None:
    """A write that does not fit is refused as a whole; stored requests can be read, and writes succeed later."""
    queue = sqlite_queue(store)
    stored = []
    watched.max_pages = 100

    def fill() -> None:
        for number in range(100):
            store.do(queue.submit(request(f"r{number}", body=b"x" * 10_000)))
            stored.append(f"r{number}")

    with pytest.raises(QueueUnavailable, match="disk is full"):
        fill()

    async def submit() -> list[object]:
        sent = [request(f"s{number}", body=b"x" * 10_000) for number in range(5)]
        return await asyncio.gather(*map(queue.submit, sent), return_exceptions=True)

    assert [type(answer) for answer in store.do(submit())] == [QueueUnavailable] * 5
    assert [record.request.inference_id for record in store.do(queue.list(ENDPOINT))] == stored
    claim = store.do(claimed(queue))
    with pytest.raises(QueueUnavailable, match="disk is full"):
        store.do(queue.decide(claim, result(b"x" * 100_000)))
    watched.max_pages = 100_000
    assert store.do(queue.decide(claim, result(b"x" * 100_000)))
    assert store.do(queue.finish(claim))
    assert [store.do(ended(queue)).request.inference_id for _ in stored[1:]] == stored[1:]


def test_a_file_that_is_locked_for_long_refuses(store: Store) -> None:
    """On a locked file all waiting operations fail after the time-out, and later ones succeed."""
    queue = sqlite_queue(store, timeout_s=0.1)

    async def submit() -> list[object]:
        return await asyncio.gather(*(queue.submit(request(f"r{n}")) for n in range(50)), return_exceptions=True)

    with closing(sqlite3.connect(file_of(store), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        answers = store.do(submit())
        other.execute("ROLLBACK")

    assert {type(answer) for answer in answers} == {QueueUnavailable}
    assert "do not let go" in str(answers[0])
    assert store.do(queue.backlog(ENDPOINT)).waiting == 0
    assert store.do(queue.submit(request("r1"))).received_at


def test_a_file_that_is_locked_for_long_is_logged_rarely(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Clients could fill the log by their requests, which are refused meanwhile."""
    queue = sqlite_queue(store, timeout_s=0.1)

    with closing(sqlite3.connect(file_of(store), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for number in range(3):
            with pytest.raises(QueueUnavailable):
                store.do(queue.submit(request(f"r{number}")))

    assert len([each for each in caplog.messages if "asynchronous queue unavailable" in each]) == 1


def test_what_fails_is_undone_alone(store: Store) -> None:
    """If one operation of a shared transaction fails, the others succeed."""
    database = SqliteDatabase(file_of(store), timeout_s=60)

    def write(db: sqlite3.Connection) -> int:
        return db.execute("INSERT INTO inputs VALUES (NULL, 'x')").rowcount

    def write_and_fail(db: sqlite3.Connection) -> int:
        write(db)
        raise ValueError("half done")

    async def run() -> list[object]:
        works = [write, write_and_fail, write, write_and_fail, write]
        return await asyncio.gather(*map(database.run, works), return_exceptions=True)

    answers = store.do(run())
    store.do(database.close())

    assert [answer == 1 for answer in answers] == [True, False, True, False, True]
    with closing(sqlite3.connect(file_of(store))) as other:
        assert other.execute("SELECT count(*) FROM inputs").fetchone() == (3,)


def test_a_closed_queue_says_so(store: Store) -> None:
    """A closed queue refuses operations; those that were in progress have completed."""
    queue = sqlite_queue(store)

    async def submit_and_close() -> None:
        under_way = asyncio.create_task(queue.submit(request("r1")))
        await asyncio.sleep(0)
        await queue.close()
        await under_way

    store.do(submit_and_close())
    with pytest.raises(QueueUnavailable, match="closed"):
        store.do(queue.submit(request("r2")))


def test_a_file_that_is_no_queue_is_refused(store: Store, tmp_path: Path) -> None:
    """A file that is damaged, from another program or version, or without permission is refused at the start."""
    damaged, other, later = tmp_path / "damaged", tmp_path / "other", tmp_path / "later"
    damaged.write_bytes(b"not a database" * 1000)
    with closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE theirs (x)")
    with closing(sqlite3.connect(later)) as db:
        db.execute("PRAGMA user_version = 99")

    for path, words in (
        *((damaged, "not a database"), (other, "another program's"), (later, "version 99")),
        *((tmp_path, "directory"), (damaged / "below", "cannot be used")),
    ):
        with pytest.raises(ConfigError, match=words):
            SqliteQueue(path, AsyncQueueSettings())


def test_the_files_are_for_their_owner_alone(store: Store) -> None:
    """The queue's files, which contain clients' requests, are readable by their owner only."""
    store.do(sqlite_queue(store).submit(request("r1", body=b"secret")))

    modes = {path.name: path.stat().st_mode & 0o777 for path in file_of(store).parent.iterdir()}

    assert modes == dict.fromkeys(("requests.db", "requests.db-wal", "requests.db-shm"), 0o600)


def test_no_operation_looks_through_all_requests(watched: type[Watched], store: Store) -> None:
    """Each statement uses an index, so thousands of waiting requests do not slow operations down."""
    queue = sqlite_queue(store, max_remembered=1, remember_s=10)

    for number in range(6):
        store.do(queue.submit(request(f"r{number}", body=b"x", ttl_s=100 if number < 5 else 10, invocation_id="a")))
        store.do(queue.submit(request(f"s{number}")))
        store.do(queue.retry(store.do(claimed(queue, 10)), 1, "again"))
        store.clock.step(2)
        store.do(queue.extend(store.do(claimed(queue, 10)), 10))
        store.do(ended(queue))
        store.do(queue.cancel(f"s{number}"))
        store.clock.step(11)
        store.do(queue.claim(ENDPOINT, 10, may_begin=False))
        store.do(queue.list(ENDPOINT, after="s1"))
        store.do(queue.get("r1"))
        store.do(queue.backlog(ENDPOINT))
        store.do(queue.forget())

    queries = [
        text
        for text in watched.statements
        if text.split()[0] in ("SELECT", "INSERT", "UPDATE", "DELETE") and "sqlite_schema" not in text
    ]
    assert len(queries) > 15
    with closing(sqlite3.connect(file_of(store))) as db:
        plans = [row[3] for text in queries for row in db.execute(f"EXPLAIN QUERY PLAN {text}")]

    slow = ("SCAN", "USE TEMP B-TREE", "SEARCH requests USING INTEGER PRIMARY KEY (rowid>?)")
    found = {plan for plan in plans if plan.startswith(slow)}
    # As many totals as endpoints have states; of what ended the oldest first, until the limit.
    assert found <= {"SCAN totals", "SCAN requests USING COVERING INDEX ended"}
