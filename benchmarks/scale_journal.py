"""Counts the operations and bytes of a session's journal, at a real Valkey and SeaweedFS behind a real TorchServe.

Clients hold conversations over HTTP. The servers' counters are read before and after.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.failover_load import make_conversations
from benchmarks.fleet import running_fleet
from benchmarks.report import ROOT
from tests.servers import BUCKET, ForwardingProxy, run_redis, run_s3

NUM_TURNS = 4
PREFIX = "bench"
_REQUEST = re.compile(rb"(?:GET|HEAD|PUT|POST|DELETE) /[^ ]* HTTP/1\.1\r\n")


@dataclass(frozen=True, slots=True)
class JournalCost:
    """Round trips to the store for an opening, a turn and a close.

    session_bytes: of a session of NUM_TURNS turns, without its image, which other sessions share.
    """

    store: str
    opening: float
    turn: float
    close: float
    session_bytes: float


def measure_redis(num_sessions: int) -> JournalCost:
    """Count the scripts that Valkey runs, and the memory of the keys as Valkey reports it."""
    with tempfile.TemporaryDirectory() as folder, run_redis(Path(folder)) as server, server.client() as client:

        def count() -> int:
            stats: Any = client.info("commandstats")
            return int(stats.get("cmdstat_eval", {}).get("calls", 0))

        def kept() -> int:
            keys = [key for key in client.scan_iter(count=1000) if b":claim:" not in key and b":picture:" not in key]
            return sum(int(client.memory_usage(key, samples=0) or 0) for key in keys)

        return _measure("Redis or Valkey", server.url, num_sessions, count, kept)


def measure_s3(num_sessions: int) -> JournalCost:
    """Count the requests to SeaweedFS, and the bytes of the objects."""
    with tempfile.TemporaryDirectory() as folder, run_s3(Path(folder)) as server:
        proxy = CountingProxy(server.port)

        def kept() -> int:
            pages = (
                server.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{PREFIX}/sessions/")
            )
            return sum(item["Size"] for page in pages for item in page.get("Contents", []))

        environment = {**server.environment, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{proxy.port}"}
        with proxy, _environment(environment):
            return _measure("S3", f"s3://{BUCKET}/{PREFIX}", num_sessions, lambda: proxy.num_requests, kept)


def _measure(store: str, url: str, num_sessions: int, count: Callable[[], int], kept: Callable[[], int]) -> JournalCost:
    with running_fleet(ROOT / "models" / "tiny-llava", arguments=("--journal", url)) as fleet:
        chats = make_conversations(fleet.runtime, num_sessions)
        counts = [count()]
        for chat in chats:
            chat.open()
        counts.append(count())
        for chat in chats:
            for _ in range(NUM_TURNS):
                turn = chat.ask()
                if turn.failure:
                    raise SystemExit(f"a turn failed: {turn}")
        counts.append(count())
        session_bytes = kept()
        for chat in chats:
            chat.close()
        counts.append(count())
    opening, turns, close = ((after - before) / num_sessions for before, after in pairwise(counts))
    return JournalCost(store, opening, turns / NUM_TURNS, close, session_bytes / num_sessions)


class CountingProxy(ForwardingProxy):
    """Counts the requests that HTTP clients send through it."""

    num_requests = 0

    def accepts(self, data: bytes, *, is_answer: bool) -> bool:
        if not is_answer and _REQUEST.match(data):  # clients do not pipeline, so a head begins a read
            self.num_requests += 1
        return True


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process, and so of the processes that it starts meanwhile."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
