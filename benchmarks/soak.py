"""Measures how memory grows, and how much good clients notice of hostile ones. `make bench NAME=soak`

One proxy that requires tokens serves two instances of the demo model, with small budgets, and two of many models. Good
clients continuously hold conversations about images (whole and streamed), submit asynchronous requests and use many
models. After a warm-up, each round has these parts:

    calm      good clients alone
    sink      also the clients of soak_hostile.py, which send everything to soak_sink.py, a server that refuses it at
              once; the difference from `calm` is the hostile clients' own use of the processor
    hostile   the same clients at the fleet, with another address and another token than the good ones
    kill      the same, and the JVM of one instance is killed; only losses are judged

The parts are repeated in each round so that other work on the machine affects all of them.

    proxy_growth, jvm_growth, worker_growth      memory in the last two thirds of all `calm` parts, of the instance that
                                                 is never killed: median of the last twentieth relative to the first
    threads_growth                               the same for the threads of the three processes; the largest
    descriptors_left    the proxy's open files after all clients have left and unused connections to instances are
                        closed, relative to `calm`
    p99_vs_calm, p99_vs_sink    the good clients' P99 in `hostile`, relative to `calm` and to `sink`
    sessions_lost, turns_lost, async_lost        in the whole run; turns_lost: answered turns that are not in the
                                                 journal exactly once
    wrong               answers of many models that come from another model
    left_over           turns, rows and requests in flight after all clients have left
"""

import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import psutil

from benchmarks.async_load import AcceptedRequests, Client
from benchmarks.failover_load import Conversation, authorization, make_conversations
from benchmarks.fleet import Fleet, rss_bytes, running_fleet
from benchmarks.report import ROOT, parse_options, percentile, print_report
from benchmarks.soak_hostile import HostileClients
from benchmarks.soak_sink import running_sink
from scripts.make_minilm import TARGET, make_variants
from torchmoor.config.timeouts import TimeoutSettings

NUM_CONVERSATIONS = 8
NUM_MODELS = 4
TURNS = 12  # per conversation; the small model errs in much longer ones
PAUSE_S = 1.0
SAMPLE_S = 1.0
PART_S, QUICK_PART_S = 60.0, 35.0  # duration of each part of a round
PARTS = ("calm", "sink", "hostile", "kill")
JUDGED = ("calm", "sink", "hostile")
SETTLE_S = 60.0
# So small that they are full after the warm-up: later growth is a leak.
BUDGETS = {
    "SESSION_MAX_SESSIONS": "64",
    "SESSION_KV_BYTES": str(8 << 20),
    "SESSION_FEATURES_BYTES": str(4 << 20),
    "SESSION_HOST_BYTES": str(8 << 20),
}
NUM_MOMENTS = 20  # at which the report shows the processes' memory
GOOD_TOKEN, HOSTILE_TOKEN = "good-clients-token", "hostile-clients-token"
TEXT = b'{"inputs": "A red circle stands to the left of two green squares."}'


@dataclass(frozen=True, slots=True)
class Sample:
    """The resources of a process at one moment."""

    at: float
    rss_bytes: int
    num_files: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Timed:
    """A request of a good client."""

    began: float
    took_s: float
    failure: str


@dataclass(frozen=True, slots=True)
class Span:
    """One run of a part. fleet_s, hostile_s: processor time of the fleet and of the hostile clients."""

    start: float
    end: float
    fleet_s: float = 0.0
    hostile_s: float = 0.0

    def has(self, moment: float) -> bool:
        return self.start <= moment < self.end


@dataclass
class GoodResults:
    """The results of all good clients, whose threads write to it."""

    timed: list[Timed] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # of openings, which the clients repeat
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

    def values(self, name: str, column: str, spans: "Sequence[Span]") -> list[float]:
        """Return the values of a column in these spans."""
        return [getattr(s, column) for s in self.samples[name] if any(span.has(s.at) for span in spans)]

    def growth(self, name: str, column: str, spans: "Sequence[Span]") -> float:
        """Return the median of a column in the last twentieth of the values, relative to the first twentieth.

        The values are those in these spans, without the first third.
        """
        values = self.values(name, column, spans)
        values = values[len(values) // 3 :]
        part = max(1, len(values) // 20)
        return median(values[-part:]) / median(values[:part])

    def memory_mb(self, name: str) -> list[int]:
        """Return the memory of a process at equal intervals."""
        samples = self.samples[name]
        return [each.rss_bytes >> 20 for each in samples[:: max(1, len(samples) // NUM_MOMENTS)]]


def sample(pid: int) -> Sample:
    process = psutil.Process(pid)
    return Sample(time.monotonic(), rss_bytes(pid), process.num_fds(), process.num_threads())


def converse(conversations: "Conversations", good: GoodResults, journal: Path, stop: threading.Event) -> None:
    """Hold one conversation after the other."""
    while not stop.is_set():
        chat = conversations.next()
        while refusal := chat.try_open():
            good.refusals.append(refusal)
            if stop.wait(PAUSE_S):
                return
        while len(chat.turns) < TURNS and not stop.is_set():
            turn = chat.ask()
            good.timed.append(Timed(turn.began, turn.took_s, turn.failure))
            stop.wait(PAUSE_S)
        if not has_survived(chat):
            good.lost.append(chat.id)
        good.num_turns_lost += chat.num_turns_lost(journal)
        chat.close()


def has_survived(chat: Conversation) -> bool:
    """Return whether the session still gives right answers. Repeats a 503, as AWS's clients do."""
    until = time.monotonic() + SETTLE_S
    while not chat.is_alive():
        if not chat.turns[-1].failure.startswith("503") or time.monotonic() > until:
            return False
        time.sleep(PAUSE_S)
    return True


class Conversations:
    """Makes conversations about one image after the other, for any thread."""

    def __init__(self, runtime: str) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._ready: list[Conversation] = []

    def next(self) -> Conversation:
        with self._lock:
            if not self._ready:
                self._ready = make_conversations(self._runtime, 2 * NUM_CONVERSATIONS, GOOD_TOKEN)
            return self._ready.pop()


def ask_many(runtime: str, good: GoodResults, stop: threading.Event) -> None:
    """Send requests to the models in turn, and count answers that differ from the model's first one."""
    known: dict[str, bytes] = {}
    number = 0
    while not stop.wait(PAUSE_S):
        number += 1
        name = f"minilm-{number % NUM_MODELS:03}"
        fields = {
            "Content-Type": "application/json",
            "X-Amzn-SageMaker-Target-Model": name,
            **authorization(GOOD_TOKEN),
        }
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


def submit(runtime: str, accepted: AcceptedRequests, stop: threading.Event) -> None:
    """Submit asynchronous requests."""
    client = Client(urlsplit(runtime).port or 80, "llava")
    while not stop.wait(PAUSE_S):
        inference_id, result, failure = client.submit(str(uuid4()), **authorization(GOOD_TOKEN))
        accepted.failures[inference_id], accepted.results[inference_id] = failure, result


def main() -> None:
    options = parse_options(__doc__, quick="five minutes instead of an hour", rounds=15)
    if not (TARGET / "config.json").is_file():
        raise SystemExit(f"there is no {TARGET}; run scripts/make_minilm.py")
    part_s = QUICK_PART_S if options.quick else PART_S
    rows, ratios, memory_mb = run(options.rounds, part_s)
    print_report("soak", rows, ratios, options, part_s=part_s, memory_mb=memory_mb)


def run(rounds: int, part_s: float) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, list[int]]]:
    """Run the fleet and its clients; return rows, ratios, and the memory of each process at equal intervals, in MB."""
    with tempfile.TemporaryDirectory(prefix="tm-soak-") as temporary:
        folder = Path(temporary)
        journal = folder / "journal"
        (folder / "models").mkdir()
        make_variants(TARGET, folder / "models", NUM_MODELS)
        keys = folder / "keys.txt"
        keys.touch(mode=0o600)
        keys.write_text(f"token good {GOOD_TOKEN}\ntoken hostile {HOSTILE_TOKEN}\n")
        arguments = (
            *("--endpoint", "llava", "--endpoint", "many", "--models", str(folder / "models")),
            *("--journal", journal.as_uri(), "--keys", str(keys)),
        )
        checkpoint = ROOT / "models" / "tiny-llava"
        with running_fleet(checkpoint, num_instances=2, arguments=arguments, **BUDGETS) as fleet:
            return soak(fleet, journal, rounds, part_s)


def soak(
    fleet: Fleet, journal: Path, rounds: int, part_s: float
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, list[int]]]:
    jvm, worker = fleet.processes("llava-0")
    watched = {"proxy": fleet.pid, "jvm": jvm, "worker": worker}
    stop, over = threading.Event(), threading.Event()
    watcher = Watcher(watched, over)
    good, accepted, conversations = GoodResults(), AcceptedRequests(), Conversations(fleet.runtime)
    tasks: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        *[(converse, (conversations, good, journal, stop))] * NUM_CONVERSATIONS,
        (ask_many, (fleet.runtime, good, stop)),
        (submit, (fleet.runtime, accepted, stop)),
    ]
    clients = [threading.Thread(target=task, args=arguments, daemon=True) for task, arguments in tasks]
    began = time.monotonic()
    for thread in (watcher, *clients):
        thread.start()
    time.sleep(part_s / 2)
    with running_sink() as sink:
        spans = run_rounds(fleet, sink, rounds, part_s)
    stop.set()
    for thread in clients:
        thread.join(timeout=120)
    left_over = wait_for_rest(fleet, accepted)
    time.sleep(TimeoutSettings().pool_idle_timeout_s)
    unused_closed_at = time.monotonic()
    time.sleep(5 * SAMPLE_S)
    over.set()
    watcher.join()
    rows = [summarize(part, good.timed, spans[part]) for part in JUDGED]
    p99_s = {row["part"]: row["p99_s"] for row in rows}
    files_left = watcher.values("proxy", "num_files", [Span(unused_closed_at, time.monotonic())])
    ratios = {
        **{f"{name}_growth": watcher.growth(name, "rss_bytes", spans["calm"]) for name in watched},
        "threads_growth": max(watcher.growth(name, "num_threads", spans["calm"]) for name in watched),
        "descriptors_left": median(files_left) / median(watcher.values("proxy", "num_files", spans["calm"])),
        "p99_vs_calm": p99_s["hostile"] / p99_s["calm"],
        "p99_vs_sink": p99_s["hostile"] / p99_s["sink"],
        "sessions_lost": len(good.lost),
        "turns_lost": good.num_turns_lost,
        "async_lost": accepted.missing(),
        "wrong": good.num_wrong,
        "left_over": left_over,
    }
    for refusal in good.refusals:
        print(f"an opening was refused: {refusal}")
    for timed in (timed for timed in good.timed if timed.failure):
        print(f"{timed.began - began:.0f} s: {timed.failure}")
    return rows, ratios, {name: watcher.memory_mb(name) for name in watched}


def run_rounds(fleet: Fleet, sink: str, rounds: int, part_s: float) -> dict[str, list[Span]]:
    """Run all parts of all rounds; return their spans."""
    spans: dict[str, list[Span]] = {part: [] for part in PARTS}
    for number in range(rounds):
        spans["calm"].append(run_part(fleet, part_s, None))
        for part, urls in (("sink", (sink, sink)), ("hostile", (fleet.runtime, fleet.admin))):
            hostile = HostileClients(*urls, HOSTILE_TOKEN)
            spans[part].append(run_part(fleet, part_s, hostile))
            if part == "hostile":
                os.kill(fleet.processes("llava-1")[0], signal.SIGKILL)
                spans["kill"].append(run_part(fleet, part_s, hostile))
            print(f"round {number + 1}, {part}: {hostile.stop()}", flush=True)
            wait_until_ready(fleet)
    return spans


def run_part(fleet: Fleet, part_s: float, hostile: HostileClients | None) -> Span:
    start, fleet_s = time.monotonic(), fleet_cpu_s(fleet)
    hostile_s = hostile.cpu_s() if hostile is not None else 0.0
    time.sleep(part_s)
    spent_s = fleet_cpu_s(fleet) - fleet_s
    return Span(start, time.monotonic(), spent_s, hostile.cpu_s() - hostile_s if hostile is not None else 0.0)


def fleet_cpu_s(fleet: Fleet) -> float:
    times = fleet.cpu_times()
    return times.proxy_s + times.torchserve_s + times.worker_s


def wait_until_ready(fleet: Fleet) -> None:
    """Wait until all instances are ready, and some seconds more for requests that the hostile clients have left."""
    until = time.monotonic() + SETTLE_S
    while any(each["state"] != "ready" for each in fleet.instances()) and time.monotonic() < until:
        time.sleep(SAMPLE_S)
    time.sleep(5 * SAMPLE_S)


def wait_for_rest(fleet: Fleet, accepted: AcceptedRequests) -> int:
    """Wait until the instances are idle and the asynchronous requests done; return how many are still in flight."""
    until = time.monotonic() + SETTLE_S
    while True:
        instances = [each for each in fleet.instances() if each["state"] == "ready"]
        in_flight = sum(each["outstanding"] for each in instances)
        for each in instances:
            if each["endpoint"] == "llava":
                status = fleet.status(each)
                in_flight += status["turns"]["in_progress"] + status["engine"]["rows"] + status["engine"]["queued"]
        if (not in_flight and not accepted.missing()) or time.monotonic() > until:
            return in_flight
        time.sleep(1.0)


def summarize(part: str, timed: Sequence[Timed], spans: Sequence[Span]) -> dict[str, Any]:
    of_part = [each for each in timed if any(span.has(each.began) for span in spans)]
    took = [each.took_s for each in of_part if not each.failure]
    seconds = sum(span.end - span.start for span in spans)
    return {
        "part": part,
        "requests": len(of_part),
        "failed": sum(bool(each.failure) for each in of_part),
        "p50_s": percentile(took, 0.5),
        "p99_s": percentile(took, 0.99),
        "fleet_cores": sum(span.fleet_s for span in spans) / seconds,
        "hostile_cores": sum(span.hostile_s for span in spans) / seconds,
    }


if __name__ == "__main__":
    main()
