"""A queue shared by processes that race and are killed: acknowledged operations last, and requests end once."""

import contextlib
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.unit.torchmoor.async_inference.stores import ENDPOINT, Store, request, result
from tests.waiting import wait_until
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import AsyncRecord, AsyncState, Backlog

ROOT = Path(__file__).parents[4]
NUM_PROCESSES = 3
NUM_KILLS = 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("store", ["sqlite", pytest.param("valkey", marks=pytest.mark.redis)], indirect=True),
]


@contextlib.contextmanager
def user(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Start queue_user.py and yield the ready process; kill it at the end if it still runs."""
    command = [sys.executable, "-m", "tests.unit.torchmoor.async_inference.queue_user", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_of_racing_processes_one_decides(store: Store) -> None:
    """With leases that end at once and processes that race, each request gets one outcome and is finished."""
    queue = store.opened_by_url()
    names = {f"r{number}" for number in range(60)}
    for name in sorted(names):
        store.do(queue.submit(request(name)))

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(user("race", store.url)) for _ in range(NUM_PROCESSES)]
        said = [process.communicate("go\n", timeout=120)[0] for process in processes]

    lines = [line.split() for text in said for line in text.splitlines()]
    decided = [line[1:] for line in lines if line[0] == "decided"]
    assert [process.returncode for process in processes] == [0] * NUM_PROCESSES
    assert len(decided) == len(names)
    records = records_of(store, queue)
    assert dict(decided) == {name: record.outcome.staged for name, record in records.items() if record.outcome}
    assert {record.state for record in records.values()} == {AsyncState.COMPLETED}


def test_a_kill_loses_nothing_that_was_acknowledged(store: Store) -> None:
    """After SIGKILL at any point, acknowledged operations are stored, other requests continue, and counts are right."""
    acknowledged: list[list[str]] = []
    for number in range(NUM_KILLS):
        with user("churn", store.url, f"a{number}") as one, user("churn", store.url, f"b{number}") as other:
            for process in (one, other):
                for _ in range(random.randrange(5, 60)):
                    acknowledged.append(process.stdout.readline().split())
                process.kill()
                rest = process.stdout.read()
                acknowledged += [line.split() for line in rest.splitlines(keepends=True) if line.endswith("\n")]

    queue = store.opened_by_url()
    records = records_of(store, queue)
    for what, name, *staged in acknowledged:
        outcome = records[name].outcome
        if what == "decided":
            assert [outcome.staged] == staged
        elif what == "cancelled":
            assert outcome.state is AsyncState.CANCELLED
        elif what == "finished":
            assert records[name].state.is_end
    wait_until(lambda: not work_off(store, queue), "all leases have lapsed and all is worked off")
    ends = records_of(store, queue)
    assert len(ends) == len(records)
    for name, record in records.items():
        assert ends[name].state.is_end
        assert record.outcome in (None, ends[name].outcome)
    if urlsplit(store.url).scheme == "sqlite":
        check_file(urlsplit(store.url).path)


def work_off(store: Store, queue: Queue) -> bool:
    """Process every request that can be claimed; return whether any is left."""
    while claim := store.do(queue.claim(ENDPOINT, 30)):
        if claim.decided is None:
            assert store.do(queue.decide(claim, result()))
        assert store.do(queue.finish(claim))
    return store.do(queue.backlog(ENDPOINT)) != Backlog()


def records_of(store: Store, queue: Queue) -> dict[str, AsyncRecord]:
    """Return all records, page by page."""
    found: list[AsyncRecord] = []
    while page := store.do(queue.list(ENDPOINT, after=found[-1].request.inference_id if found else None)):
        found += page
    records = {record.request.inference_id: record for record in found}
    assert len(records) == len(found)
    return records


def check_file(path: str) -> None:
    """Check the file's integrity, its totals, and that no body of an ended request is left."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        counted = "SELECT endpoint, state, count(*), sum(body_bytes) FROM requests GROUP BY 1, 2 ORDER BY 1, 2"
        totals = "SELECT * FROM totals WHERE requests != 0 OR body_bytes != 0 ORDER BY 1, 2"
        assert db.execute(counted).fetchall() == db.execute(totals).fetchall()
        assert db.execute("SELECT (SELECT count(*) FROM inputs), (SELECT count(*) FROM outputs)").fetchone() == (0, 0)
