"""Measures what sessions cost that clients never close. `make bench NAME=forgotten`

Two instances have room for 1,024 sessions each and a journal in a directory. Clients open sessions with an image and
never close them. After every hundredth opening, a random session of those opened so far gets a question. Halfway
through, the JVM of one instance is killed.

    refused                  openings that were refused
    lost, wrong              sessions whose question failed, or got a wrong answer
    rss_growth_after_full    memory of the worker that is not killed: at the end, relative to a full table
    opening_p99_vs_empty     P99 of the last fifth of the openings, relative to openings with an empty table
"""

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.failover_load import Conversation, make_conversations
from benchmarks.fleet import Fleet, rss_bytes, running_fleet
from benchmarks.report import ROOT, parse_options, percentile, print_report

MAX_SESSIONS = 1024
# The system provides the pages of the KV cache (1 GiB by default) at their first use, which would look like growth.
# So the cache is small, and questions use all its pages before the memory of a full table is measured.
KV_BYTES = 16 << 20
NUM_WARM_QUESTIONS = 300
NUM_INSTANCES = 2
NUM_CLIENTS = 4
ASK_EVERY = 100
NUM_WARM = 100  # first openings, which are not judged
NUM_EMPTY = 800  # openings after these, while the tables have room


@dataclass
class Result:
    """The outcomes that the clients saw. took_s: duration of each opening, ordered by its end."""

    took_s: list[float] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    num_asked: int = 0
    num_wrong: int = 0


class Clients:
    """Open sessions, which they never close, and ask some of them a question later."""

    def __init__(self, runtime: str, number: int) -> None:
        self.result = Result()
        self._runtime = runtime
        self._numbers: Iterator[int] = iter(range(number))
        self._templates = make_conversations(runtime, 16)
        self._open: list[Conversation] = []
        self._lock = threading.Lock()

    @property
    def num_opened(self) -> int:
        return len(self._open)

    @property
    def num_done(self) -> int:
        """The number of openings that have ended, refused ones included."""
        return len(self._open) + len(self.result.refusals)

    def end(self) -> None:
        """Let each client finish its current request, and then end."""
        with self._lock:
            self._numbers = iter(())

    def run(self) -> None:
        """Run the loop of one client. Several threads may call this."""
        while True:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            self._open_one(number)
            if number % ASK_EVERY == ASK_EVERY - 1:
                self.ask_one()

    def _open_one(self, number: int) -> None:
        template = self._templates[number % len(self._templates)]
        chat = Conversation(self._runtime, template.image, template.questions, is_streamed=template.is_streamed)
        began = time.monotonic()
        try:
            refusal = chat.try_open()
        except (OSError, HTTPException) as error:
            refusal = repr(error)
        with self._lock:
            if refusal:
                self.result.refusals.append(refusal)
            else:
                self.result.took_s.append(time.monotonic() - began)
                self._open.append(chat)

    def ask_one(self) -> None:
        """Ask a random session a question."""
        with self._lock:
            if not self._open:
                raise RuntimeError(f"no session could be opened: {self.result.refusals[-1]}")
            chat = random.choice(self._open)
        question, right = next(item for item in chat.questions if item[0].startswith("What color"))
        turn = chat.ask(question)
        with self._lock:
            self.result.num_asked += 1
            if turn.failure:
                self.result.lost.append(turn.failure)
            else:
                self.result.num_wrong += turn.answer != right


def main() -> None:
    options = parse_options(__doc__, quick="5,000 sessions instead of 100,000", rounds=None)
    number = 5_000 if options.quick else 100_000
    with tempfile.TemporaryDirectory(prefix="tm-forgotten-") as folder:
        journal = Path(folder)
        arguments = ("--journal", journal.as_uri())
        checkpoint = ROOT / "models" / "tiny-llava"
        settings = {"SESSION_MAX_SESSIONS": str(MAX_SESSIONS), "SESSION_KV_BYTES": str(KV_BYTES)}
        with running_fleet(checkpoint, num_instances=NUM_INSTANCES, arguments=arguments, **settings) as fleet:
            rows, ratios = run(fleet, journal, number)
    print_report("forgotten", rows, ratios, options, sessions=number)


def run(fleet: Fleet, journal: Path, number: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    clients = Clients(fleet.runtime, number)
    worker = fleet.processes("llava-0")[1]
    empty_bytes = rss_bytes(worker)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        running = [pool.submit(clients.run) for _ in range(NUM_CLIENTS)]
        try:
            wait_for(clients, running, int(1.2 * NUM_INSTANCES * MAX_SESSIONS))
            for _ in range(NUM_WARM_QUESTIONS):
                clients.ask_one()
            full_bytes = rss_bytes(worker)
            wait_for(clients, running, number // 2)
            os.kill(fleet.processes("llava-1")[0], signal.SIGKILL)
            for each in running:
                each.result()
        finally:
            clients.end()
    result, end_bytes = clients.result, rss_bytes(worker)
    for text in (*result.refusals[:10], *result.lost[:10]):
        print(text)
    took = result.took_s
    empty, last = took[NUM_WARM : NUM_WARM + NUM_EMPTY], took[-len(took) // 5 :]
    disk_bytes = sum({info.st_ino: info.st_blocks * 512 for info in map(Path.lstat, journal.rglob("*"))}.values())
    row = {
        "opened": clients.num_opened,
        "asked": result.num_asked,
        "opening_p99_empty_ms": percentile(empty, 0.99) * 1e3,
        "opening_p99_full_ms": percentile(last, 0.99) * 1e3,
        "disk_bytes_a_session": disk_bytes // clients.num_opened,
        "memory_bytes_a_session": (full_bytes - empty_bytes) // MAX_SESSIONS,
        "worker_mb": end_bytes // 1_000_000,
    }
    ratios = {
        "refused": len(result.refusals),
        "lost": len(result.lost),
        "wrong": result.num_wrong,
        "rss_growth_after_full": end_bytes / full_bytes,
        "opening_p99_vs_empty": percentile(last, 0.99) / percentile(empty, 0.99),
    }
    return [row], ratios


def wait_for(clients: Clients, running: Sequence[Future[None]], num_done: int) -> None:
    """Wait until this many openings have ended, and print the progress. Raises the error of a client that failed."""
    for tick in count():
        for each in running:
            if each.done():
                each.result()
        if clients.num_done >= num_done:
            return
        if tick % 100 == 0:
            print(f"{clients.num_opened} sessions opened", flush=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
