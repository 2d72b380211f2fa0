"""Checks that no asynchronous request is lost or processed twice when processes are killed, and measures their cost.

`make bench NAME=async_inference`

kills     Clients send small requests to `torchmoor up` (real TorchServe, a SQLite queue, results as files) while
          SIGKILL hits the proxy (`up` itself, which is started again in the same directory), a TorchServe's JVM or its
          Python worker at random moments. At the end, each accepted request must have exactly one result.
1 GB      One request has an input and an answer of 1 GB each. It passes through `torchmoor serve` to an instance that
          answers at once; input and result are files. Measures how much the proxy's peak resident memory grows beyond
          that of small requests.
submit    A submit over HTTP, compared with an insert into SQLite that is as durable as the queue's. Both take turns.
wake      A request to an endpoint at zero instances, from its submit until its result exists, compared with the start
          of the same instance by `torchmoor up`. Both take turns.

    submitted, missing, duplicated      the last two must be 0
    rss_growth_mb_1gb                   must be at most 64
    submit_vs_insert                    ratio of the medians; must be at most 3
    wake_vs_start                       median of the rounds; must be at most 1.1
"""

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

from benchmarks.async_load import BODY, AcceptedRequests, Client, Submitter
from benchmarks.async_wake import measure_wakes
from benchmarks.fleet import peak_rss_bytes
from benchmarks.report import ROOT, parse_options, print_report

NUM_REQUESTS, NUM_QUICK = 10_000, 300
NUM_SUBMITTERS = 4
PAUSE_S = 0.05  # mean pause of each submitter between two requests
NUM_KILLS, NUM_QUICK_KILLS = 30, 3
END_TIMEOUT_S = 1800.0
NUM_SUBMITS, NUM_QUICK_SUBMITS = 400, 60
NUM_WAKES, NUM_QUICK_WAKES = 5, 1
LOG_BYTES = 4_000  # printed of the log of a fleet that failed
GIB = 1 << 30
TARGETS = ("proxy", "jvm", "worker")


def main() -> None:
    options = parse_options(__doc__, quick="300 requests, three kills, one wake", rounds=None)
    with tempfile.TemporaryDirectory(prefix="tm-async-") as folder:
        rows = [run_kills(Path(folder) / "kills", is_quick=options.quick)]
        growth_mb, ratio, seconds = run_large(Path(folder) / "large", is_quick=options.quick)
        wakes = measure_wakes(Path(folder) / "wakes", NUM_QUICK_WAKES if options.quick else NUM_WAKES)
    ratios = {
        "submitted": sum(row["submitted"] for row in rows),
        "missing": sum(row["missing"] for row in rows),
        "duplicated": sum(row["duplicated"] for row in rows),
        "rss_growth_mb_1gb": round(growth_mb, 1),
        "submit_vs_insert": round(ratio, 2),
        "wake_vs_start": round(wakes.wake_vs_start, 3),
    }
    settings = {"queue": "sqlite", "objects": "files", "gb_s": seconds, **asdict(wakes)}
    print_report("async_inference", rows, ratios, options, **settings)


# Kills


class RestartedFleet:
    """`torchmoor up` in one directory and on the same ports, however often it is killed."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self._log = (folder / "up.log").open("a+b")
        self.port = self.admin_port = 0
        self.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.show_log()
            raise RuntimeError("torchmoor up did not start; the end of its log is above")
        where = json.loads(line)
        self.port, self.admin_port = (int(where[key].rpartition(":")[2]) for key in ("runtime", "admin"))

    def start(self) -> None:
        """Start it without waiting until it is ready: requests and kills begin at once."""
        command = [sys.executable, "-m", "torchmoor", "up", "--instances", "2", "--run-dir", str(self.run_dir)]
        command += ["--port", str(self.port), "--admin-port", str(self.admin_port), "--start-timeout", "300"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )

    def revive(self) -> None:
        """Start it again if it has ended, which it does if an instance is killed during its first start."""
        if self.process.poll() is not None:
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.start()

    def kill(self, target: str, rng: random.Random) -> bool:
        """Send SIGKILL to one of the processes. Return False if there is no such process at the moment."""
        if target == "proxy":
            self.process.kill()
            self.process.wait()
            self.revive()
            return True
        pid_file = self.run_dir / f"llava-{rng.randrange(2)}" / "tmp" / ".model_server.pid"
        with suppress(OSError, ValueError, IndexError, psutil.NoSuchProcess):
            jvm = psutil.Process(int(pid_file.read_text()))
            (jvm if target == "jvm" else rng.choice(jvm.children())).kill()
            return True
        return False

    def show_log(self) -> None:
        """Print the end of the log, which is deleted with the benchmark's folder."""
        self._log.seek(0)
        print(self._log.read()[-LOG_BYTES:].decode(errors="replace"), file=sys.stderr)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=90)
        finally:
            self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


def run_kills(folder: Path, *, is_quick: bool) -> dict[str, Any]:
    folder.mkdir()
    rng, kills = random.Random(6), Counter[str]()
    number = NUM_QUICK if is_quick else NUM_REQUESTS
    fleet, accepted = RestartedFleet(folder), AcceptedRequests()
    began = time.monotonic()
    try:
        names = [f"invocation-{each}" for each in range(number)]
        submitters = [
            Submitter(accepted, fleet.port, "llava", names[first::NUM_SUBMITTERS], PAUSE_S)
            for first in range(NUM_SUBMITTERS)
        ]
        for submitter in submitters:
            submitter.start()
        num_kills = NUM_QUICK_KILLS if is_quick else NUM_KILLS
        kill_after = sorted(rng.sample(range(number // 20, number * 9 // 10), num_kills))  # numbers of outcomes
        while (num_outcomes := accepted.record()) < number and time.monotonic() - began < END_TIMEOUT_S:
            if kill_after and num_outcomes >= kill_after[0]:
                del kill_after[0]
                target = TARGETS[len(kill_after) % len(TARGETS)]
                kills[target] += fleet.kill(target, rng)
            fleet.revive()
            time.sleep(0.05)
        for submitter in submitters:
            submitter.join(60)
        if accepted.missing() or accepted.duplicated():
            fleet.show_log()
    finally:
        fleet.stop()
    return {
        "arm": "kills",
        "submitted": len(accepted.results),
        "missing": accepted.missing(),
        "duplicated": accepted.duplicated(),
        "failures": sum(path.exists() for path in accepted.failures.values()),
        **{f"killed_{target}": kills[target] for target in TARGETS},
        "seconds": round(time.monotonic() - began),
    }


# 1 GB, and submits


@contextmanager
def serving(folder: Path, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Run `torchmoor serve` with one instance that answers with `num_bytes`; yield the proxy's port and process id."""
    (folder / "inputs").mkdir(parents=True)
    instance = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "async_instance.py"), str(num_bytes)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert instance.stdout is not None
    content = {
        "Endpoints": [
            {
                "EndpointConfig": {
                    "EndpointConfigName": "m",
                    "ProductionVariants": [{"VariantName": "v", "ModelName": "m"}],
                    "AsyncInferenceConfig": {"OutputConfig": {}},
                }
            }
        ],
        "Instances": [{"name": "a", "port": int(instance.stdout.readline()), "max_inflight_body_bytes": 2 * num_bytes}],
        "listen": {"port": 0, "admin_port": 0},
        "async_inference": {"queue": f"sqlite://{folder}/queue.db", "output_root": (folder / "results").as_uri()},
        "objects": {
            "input_directories": [str(folder / "inputs")],
            "output_directories": [str(folder / "results")],
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "torchmoor", "serve", "--config", str(folder / "config.yaml")]
    proxy = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert proxy.stdout is not None
        yield int(json.loads(proxy.stdout.readline())["runtime"].rpartition(":")[2]), proxy.pid
    finally:
        for process in (proxy, instance):
            process.terminate()
            process.wait(timeout=30)
            assert process.stdout is not None
            process.stdout.close()


def run_large(folder: Path, *, is_quick: bool) -> tuple[float, float, float]:
    """Return the proxy's growth in MB, the ratio of submit to insert, and the seconds of the large request."""
    with serving(folder, GIB) as (port, pid):
        client = Client(port, "m")
        ratio = compare_submits(client, folder, NUM_QUICK_SUBMITS if is_quick else NUM_SUBMITS)
        large = folder / "inputs" / "large"
        with large.open("wb") as file:
            file.truncate(GIB)
        before = peak_rss_bytes(pid)
        began = time.monotonic()
        fields = {"X-Amzn-SageMaker-InputLocation": large.as_uri()}
        _, result, failure = client.submit("large", b"", **fields)
        while not result.exists():
            if failure.exists():
                raise RuntimeError(failure.read_text())
            time.sleep(0.05)
        seconds = time.monotonic() - began
        if result.stat().st_size != GIB:
            raise RuntimeError(f"the result has {result.stat().st_size} bytes")
        growth_mb = (peak_rss_bytes(pid) - before) / (1 << 20)
    shutil.rmtree(folder)
    return growth_mb, ratio, round(seconds, 1)


def compare_submits(client: Client, folder: Path, number: int) -> float:
    """Return the median time of submits divided by that of durable inserts, which take turns."""
    database = sqlite3.connect(folder / "compare.db", isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE requests (id TEXT PRIMARY KEY, request TEXT, body BLOB)")
    submits, inserts = [], []
    for each in range(number):
        began = time.perf_counter()
        _, result, _ = client.submit(f"submit-{each}")
        submits.append(time.perf_counter() - began)
        while not result.exists():  # so that the request's processing overlaps with no measurement
            time.sleep(0.001)
        time.sleep(0.01)
        began = time.perf_counter()
        database.execute("INSERT INTO requests VALUES (?, ?, ?)", (f"insert-{each}", "x" * 400, BODY))
        inserts.append(time.perf_counter() - began)
    database.close()
    return median(submits) / median(inserts)


if __name__ == "__main__":
    main()
