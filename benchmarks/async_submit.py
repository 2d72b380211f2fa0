"""What a submit to the asynchronous queue costs against the least that durability costs: part of async_inference.py.

Arms, interleaved, on the same disk, a folder each: one INSERT of the same bytes into a table with a primary key, by
sqlite3 itself in the calling thread, in a write-ahead log with synchronous=FULL; and `submit` of the queue, which asks
for an earlier call of the same client and for room, keeps its indexes and counts, and does it off the event loop.
Both run sequentially, with enough waiting requests to reveal a scan.
"""

import asyncio
import contextlib
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import median
from torchmoor.async_inference.queues.queue_url import open_queue
from torchmoor.async_inference.request import AsyncRequest
from torchmoor.config.asynchronous import AsyncQueueSettings

NUM_WAITING = 5_000
NUM_A_ROUND = 200
NUM_TURNS = 10  # of the arms in a round
BODY = b"x" * 1_000


def measure_submit(num_rounds: int) -> list[dict[str, Any]]:
    """A row a round: medians in microseconds, and their ratio `submit_vs_insert`."""
    with tempfile.TemporaryDirectory(prefix="torchmoor-queue-", dir=Path.cwd()) as folder:
        return asyncio.run(_measure(Path(folder), num_rounds))


async def _measure(folder: Path, num_rounds: int) -> list[dict[str, Any]]:
    queue = open_queue(f"sqlite://{folder}/queue.db", AsyncQueueSettings())
    names = iter(range(1 << 30))

    async def submit(num: int) -> list[float]:
        times = []
        for request in [_request(next(names)) for _ in range(num)]:
            start = time.perf_counter()
            await queue.submit(request)
            times.append(time.perf_counter() - start)
        return times

    for _ in range(NUM_WAITING // 50):
        await asyncio.gather(*(queue.submit(_request(next(names))) for _ in range(50)))
    rows = []
    with contextlib.closing(sqlite3.connect(folder / "insert.db", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("CREATE TABLE requests (name TEXT PRIMARY KEY, request TEXT, body BLOB)")
        _insert(db, [_request(next(names)) for _ in range(NUM_A_ROUND)])  # warm
        for _ in range(num_rounds):
            inserts: list[float] = []
            submits: list[float] = []
            for _ in range(NUM_TURNS):
                inserts += _insert(db, [_request(next(names)) for _ in range(NUM_A_ROUND // NUM_TURNS)])
                submits += await submit(NUM_A_ROUND // NUM_TURNS)
            insert_us, submit_us = median(inserts) * 1e6, median(submits) * 1e6
            rows.append({"insert_us": insert_us, "submit_us": submit_us, "submit_vs_insert": submit_us / insert_us})
    await queue.close()
    return rows


def _insert(db: sqlite3.Connection, requests: Sequence[AsyncRequest]) -> list[float]:
    times = []
    for request in requests:
        values = (request.inference_id, request.to_json(), request.body)
        start = time.perf_counter()
        db.execute("INSERT INTO requests VALUES (?, ?, ?)", values)
        times.append(time.perf_counter() - start)
    return times


def _request(number: int) -> AsyncRequest:
    name = f"{number:032x}"
    return AsyncRequest(
        inference_id=name,
        endpoint="chat",
        invocation_id=name,
        output_location=f"s3://bucket/{name}.out",
        failure_location=f"s3://bucket/{name}-error.out",
        content_type="application/json",
        body=BODY,
    )
