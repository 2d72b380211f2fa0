"""Does anything grow, and what do good clients notice of hostile ones? `make bench NAME=soak`

Two instances of the demo model with small budgets and workers of many models, behind one proxy with keys off. Good
clients hold conversations about pictures (whole and streamed), submit asynchronous requests and ask many models, all
the time:

    warm      a tenth of the run; not judged
    calm      two fifths: good clients alone
    hostile   the rest: the kinds of soak_hostile.py at the same time. The JVM of one instance is killed every five
              minutes, in a quick run once

    proxy_growth, jvm_growth, worker_growth      memory during the last two thirds of `hostile`, of the instance that is
                                                 never killed: median of the last twentieth relative to the first
    threads_growth                               the same of the three processes' threads, the largest
    descriptors_left    the proxy's open files when all clients have gone, relative to `calm`
    p99_vs_calm         the good clients' slowest hundredth under hostile ones, relative to `calm`; without the requests
                        that a kill hit
    sessions_lost, turns_lost, async_lost        at the end; an acknowledged turn stands once in the journal
    wrong               answers of many models that are not the model's
    left_over           turns, rows and requests in flight when all clients have gone
"""

import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from benchmarks.async_load import Account, Client
from benchmarks.failover_load import Conversation, make_conversations
from benchmarks.fleet import Fleet, running_fleet
from benchmarks.report import ROOT, median, parse_options, print_report
from benchmarks.soak_hostile import KINDS, Mischief
from scripts.make_minilm import TARGET, make_variants

NUM_CONVERSATIONS = 8
NUM_MODELS = 4
TURNS = 12  # of a conversation; the small model is confused by much longer ones
PAUSE_S = 1.0
SAMPLE_S = 1.0
KILL_EVERY_S = 300.0
AFTER_KILL_S = 15.0  # a request that was in flight then, or began soon after, is the kill's
SETTLE_S = 60.0
# Small, so that they are full after the warm-up and what grows after that is a leak.
BUDGETS = {
    "SESSION_MAX_SESSIONS": "64",
    "SESSION_KV_BYTES": str(48 << 20),
    "SESSION_FEATURES_BYTES": str(4 << 20),
    "SESSION_HOST_BYTES": str(8 << 20),
}
NUM_MOMENTS = 20  # at which the report has the processes' memory
TEXT = b'{"inputs": "A red circle stands to the left of two green squares."}'


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process has at one moment."""

    at: float
    rss_bytes: int
    num_files: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Timed:
    """One good request."""

    began: float
    took_s: float
    failure: str


@dataclass
class Good:
    """What the good clients did. All of them write to it."""

    timed: list[Timed] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    num_turns_lost: int = 0
    num_wrong: int = 0


class Watcher(threading.Thread):
    """Samples processes once per second until `stop` is set. pids: by name."""

    def __init__(self, pids: dict[str, int], stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._pids, self._stop_event = pids, stop
        self.samples: dict[str, list[Sample]] = defaultdict(list)

    def run(self) -> None:
        while not self._stop_event.wait(SAMPLE_S):
            for name, pid in self._pids.items():
                self.samples[name].append(sample(pid))

    def median_of(self, name: str, column: str, start: float, end: float) -> float:
        """The median of a column between two moments."""
        return median([getattr(s, column) for s in self.samples[name] if start <= s.at <= end])

    def growth(self, name: str, column: str, start: float, end: float) -> float:
        """The median of a column in the last twentieth of a span, relative to the first."""
        part = (end - start) / 20
        return self.median_of(name, column, end - part, end) / self.median_of(name, column, start, start + part)

    def memory_mb(self, name: str) -> list[int]:
        """The process's memory at equal intervals."""
        samples = self.samples[name]
        return [each.rss_bytes >> 20 for each in samples[:: max(1, len(samples) // NUM_MOMENTS)]]


def sample(pid: int) -> Sample:
    folder = Path(f"/proc/{pid}")
    pages = int((folder / "statm").read_text().split()[1])
    files, threads = len(os.listdir(folder / "fd")), len(os.listdir(folder / "task"))
    return Sample(time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE"), files, threads)


def converse(make: "Conversations", good: Good, journal: Path, stop: threading.Event) -> None:
    """Hold one conversation after the other."""
    while not stop.is_set():
        chat = make.next()
        chat.open()
        while len(chat.asked) < TURNS and not stop.is_set():
            asked = chat.ask()
            good.timed.append(Timed(asked.began, asked.took_s, asked.failure))
            stop.wait(PAUSE_S)
        if not chat.is_alive():
            good.lost.append(chat.id)
        good.num_turns_lost += chat.num_turns_lost(journal)
        chat.close()


class Conversations:
    """Makes conversations about one picture after the other. Any thread."""

    def __init__(self, runtime: str) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._ready: list[Conversation] = []

    def next(self) -> Conversation:
        with self._lock:
            if not self._ready:
                self._ready = make_conversations(self._runtime, 2 * NUM_CONVERSATIONS)
            return self._ready.pop()


def ask_many(runtime: str, good: Good, stop: threading.Event) -> None:
    """Ask the models in turn; each one's answer stays what it was."""
    known: dict[str, bytes] = {}
    number = 0
    while not stop.wait(PAUSE_S):
        number += 1
        name = f"minilm-{number % NUM_MODELS:03}"
        fields = {"Content-Type": "application/json", "X-Amzn-SageMaker-Target-Model": name}
        began, failure, content = time.monotonic(), "", b""
        connection = HTTPConnection(urlsplit(runtime).netloc, timeout=60)
        try:
            connection.request("POST", "/endpoints/many/invocations", TEXT, fields)
            answer = connection.getresponse()
            content = answer.read()
            failure = "" if answer.status == 200 else f"{answer.status} {content[:200]!r}"
        except (OSError, HTTPException) as error:
            failure = repr(error)
        finally:
            connection.close()
        good.timed.append(Timed(began, time.monotonic() - began, failure))
        if not failure:
            good.num_wrong += known.setdefault(name, content) != content


def submit(runtime: str, account: Account, stop: threading.Event) -> None:
    client = Client(urlsplit(runtime).port or 80, "llava")
    while not stop.wait(PAUSE_S):
        inference_id, result, failure = client.submit(str(uuid4()))
        account.failures[inference_id], account.results[inference_id] = failure, result


def main() -> None:
    options = parse_options(__doc__, quick="three minutes instead of an hour", rounds=1)
    if not (TARGET / "config.json").is_file():
        raise SystemExit(f"there is no {TARGET}; scripts/make_minilm.py makes it")
    total_s = 180.0 if options.quick else 3600.0
    rows, ratios, memory_mb = run(total_s)
    print_report("soak", rows, ratios, save=options.save, quick=options.quick, seconds=total_s, memory_mb=memory_mb)


def run(total_s: float) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, list[int]]]:
    """Run the fleet and its clients; return rows, ratios, and each process's memory at equal intervals, in MB."""
    with tempfile.TemporaryDirectory(prefix="tm-soak-") as temporary:
        folder = Path(temporary)
        journal = folder / "journal"
        (folder / "models").mkdir()
        make_variants(TARGET, folder / "models", NUM_MODELS)
        arguments = (
            *("--endpoint", "llava", "--endpoint", "many", "--models", str(folder / "models")),
            *("--journal", journal.as_uri()),
        )
        checkpoint = ROOT / "models" / "tiny-llava"
        with running_fleet(checkpoint, num_instances=2, arguments=arguments, **BUDGETS) as fleet:
            return soak(fleet, journal, total_s)


def soak(
    fleet: Fleet, journal: Path, total_s: float
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, list[int]]]:
    jvm, worker = fleet.processes("llava-0")
    watched = {"proxy": fleet.pid, "jvm": jvm, "worker": worker}
    stop, over = threading.Event(), threading.Event()
    watcher = Watcher(watched, over)
    good, account, make = Good(), Account(), Conversations(fleet.runtime)
    clients = [
        *(threading.Thread(target=converse, args=(make, good, journal, stop)) for _ in range(NUM_CONVERSATIONS)),
        threading.Thread(target=ask_many, args=(fleet.runtime, good, stop)),
        threading.Thread(target=submit, args=(fleet.runtime, account, stop)),
    ]
    began = time.monotonic()
    warm_until, calm_until, end = (began + share * total_s for share in (0.1, 0.5, 1.0))
    for thread in (watcher, *clients):
        thread.start()
    wait_until(calm_until, "calm")
    hostile = [Mischief(kind, fleet.runtime, fleet.admin, stop) for kind in KINDS]
    for thread in hostile:
        thread.start()
    kills = kill_until(end, fleet, "llava-1")
    stop.set()
    for thread in (*clients, *hostile):
        thread.join(timeout=120)
    left_over = wait_for_rest(fleet, account)
    gone_at = time.monotonic()
    time.sleep(5 * SAMPLE_S)
    over.set()
    watcher.join()
    steady_from = end - (end - calm_until) * 2 / 3
    calm = [timed for timed in good.timed if warm_until <= timed.began < calm_until]
    loud = [timed for timed in good.timed if calm_until <= timed.began and not is_hit(timed, kills)]
    rows = [summarize("calm", calm), summarize("hostile", loud)]
    ratios = {
        **{f"{name}_growth": watcher.growth(name, "rss_bytes", steady_from, end) for name in watched},
        "threads_growth": max(watcher.growth(name, "num_threads", steady_from, end) for name in watched),
        "descriptors_left": watcher.median_of("proxy", "num_files", gone_at, time.monotonic())
        / watcher.median_of("proxy", "num_files", warm_until, calm_until),
        "p99_vs_calm": rows[1]["p99_s"] / rows[0]["p99_s"],
        "sessions_lost": len(good.lost),
        "turns_lost": good.num_turns_lost,
        "async_lost": account.missing(),
        "wrong": good.num_wrong,
        "left_over": left_over,
    }
    for each in hostile:
        print(f"{each.name}: {each.num_runs} times")
    for timed in (timed for timed in good.timed if timed.failure):
        print(f"{timed.began - began:.0f} s: {timed.failure}")
    return rows, ratios, {name: watcher.memory_mb(name) for name in watched}


def wait_until(end: float, phase: str) -> None:
    print(f"until {phase} is over: {end - time.monotonic():.0f} s", flush=True)
    time.sleep(max(0.0, end - time.monotonic()))


def kill_until(end: float, fleet: Fleet, victim: str) -> list[float]:
    """Kill the victim's JVM now and then; return when."""
    kills: list[float] = []
    kill_at = time.monotonic() + min(KILL_EVERY_S, (end - time.monotonic()) / 6)
    while kill_at < end - AFTER_KILL_S:
        wait_until(kill_at, "the time before a kill")
        os.kill(fleet.processes(victim)[0], signal.SIGKILL)
        kills.append(time.monotonic())
        kill_at += KILL_EVERY_S
    wait_until(end, "the run")
    return kills


def is_hit(timed: Timed, kills: Sequence[float]) -> bool:
    return any(timed.began < kill + AFTER_KILL_S and timed.began + timed.took_s > kill for kill in kills)


def wait_for_rest(fleet: Fleet, account: Account) -> int:
    """Wait until the instances are idle and the asynchronous requests done; return what is in flight after that."""
    until = time.monotonic() + SETTLE_S
    while True:
        instances = [each for each in fleet.instances() if each["state"] == "ready"]
        in_flight = sum(each["outstanding"] for each in instances)
        for each in instances:
            if each["endpoint"] == "llava":
                status = fleet.status(each)
                in_flight += status["turns"]["in_progress"] + status["engine"]["rows"] + status["engine"]["queued"]
        if (not in_flight and not account.missing()) or time.monotonic() > until:
            return in_flight
        time.sleep(1.0)


def summarize(phase: str, timed: Sequence[Timed]) -> dict[str, Any]:
    took = sorted(each.took_s for each in timed if not each.failure)
    return {
        "phase": phase,
        "requests": len(timed),
        "failed": sum(bool(each.failure) for each in timed),
        "p50_s": took[len(took) // 2],
        "p99_s": took[len(took) * 99 // 100],
    }


if __name__ == "__main__":
    main()
