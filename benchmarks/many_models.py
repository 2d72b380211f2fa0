"""Measures the cost of 200 models in one worker, compared with a process per model. `make bench NAME=many_models`

200 variants of MiniLM-L6 (90.9 MB, float32, one thread), which answer differently, are served by one worker with memory
for 20. The baseline, in the same run, is TorchServe's usual deployment: a worker process for each of three models, with
a handler like those that users write. Requests go to TorchServe directly, one after the other. The benchmark measures
processor time of the JVM and the worker, because other work may use the machine. Then Zipf traffic, which includes
broken archives, goes through the proxy to two instances, one of which gets kill -9 in the middle.

    models                     number of models for which one worker answered correctly; each had to be loaded
    resident                   largest number of models in memory at a time
    warm_vs_alone              request for one of 20 models in memory / request to the model's own process
    cold_vs_read               request that loads a model and evicts another / reading the file and one forward pass
    memory_vs_process_a_model  memory per model of a worker with 20 models, each with its own file, including libraries
                               and mapped weights / private memory of a process with one model
    private_vs_process_a_model the same without page cache, which the kernel may drop, on both sides
    memory_of_one_more         memory that each of the 20 adds / private memory of a process with one model
    memory_of_200_vs_200       peak memory of the worker that served all 200 / 200 such processes
    wrong                      requests without an answer or with a wrong one, in all of the above and the Zipf traffic
"""

import os
import random
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request

from benchmarks.fleet import Fleet, cpu_of, running_fleet
from benchmarks.many_models_alone import ProcessAModel, running_process_a_model
from benchmarks.many_models_load import TEXTS, Cost, Load, ModelRequest, Reference, zipf
from benchmarks.report import parse_options, print_report
from scripts.make_minilm import TARGET, make_variants
from torchmoor.cli.model_archive import package
from torchmoor.clients.local import make_opener

NUM_MODELS, NUM_RESIDENT, NUM_ALONE = 200, 20, 3
MODEL_BYTES = 91_000_000
NUM_WARM, NUM_ARCHIVES, NUM_READS, NUM_UNLOADS = 90, 3, 10, 15  # per round
RETURN_TIMEOUT_S = 180.0
MB = 1e6


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the worker without a model and with 20 models, and of a process with one model.

    *_private: anonymous memory, which is without pages of files. process: memory that it shares with no other process.
    """

    empty: float
    full: float
    full_private: float
    process: float
    process_private: float


class Benchmark:
    """Measures one worker of many models, and the processes with one model each."""

    def __init__(self, source: Path, fleet: Fleet, alone: ProcessAModel, load: Load) -> None:
        self.figures: dict[str, list[Cost]] = defaultdict(list)
        self.resident = 0
        self.most_bytes = 0
        self.freed: list[float] = []
        self._source = source
        self._fleet = fleet
        self._alone = alone
        self._load = load
        self._instance = next(each for each in fleet.instances() if each["name"] == "many-0")
        self._pids = fleet.processes("many-0")
        self._url = f"http://{self._instance['host']}:{self._instance['port']}/predictions/many"
        self._cold = [f"minilm-{number:03}" for number in range(NUM_MODELS)]

    def measure_memory(self) -> Memory:
        """Measure the memory after every model has answered the same requests."""
        texts = range(len(TEXTS))
        self._load.run([ModelRequest(self._url, "copy-00", 0, text) for text in texts])
        self._operate("unload", "copy-00")
        empty = _memory(self._pids[1], "Rss")
        copies = [f"copy-{number:02}" for number in range(NUM_RESIDENT)]
        self._load.run([ModelRequest(self._url, copy, 0, text) for text in texts for copy in copies])
        self._record_peaks()
        self._load.run(
            [ModelRequest(self._alone.url(number), None, 0, text) for text in texts for number in range(NUM_ALONE)]
        )
        return Memory(
            empty,
            _memory(self._pids[1], "Rss"),
            _memory(self._pids[1], "Anonymous"),
            median([_memory(pid, "Private_Clean", "Private_Dirty") for pid in self._alone.workers]),
            median([_memory(pid, "Anonymous") for pid in self._alone.workers]),
        )

    def run_round(self, number: int, num_cold: int) -> None:
        """Run every arm once. number: of this round."""
        own, alone = self._pids, (self._alone.jvm, self._alone.workers[0])
        texts = [each % len(TEXTS) for each in range(NUM_WARM)]
        self._load.run([ModelRequest(self._url, f"copy-{each:02}", 0) for each in range(NUM_RESIDENT)])
        self._note("alone", [ModelRequest(self._alone.url(0), None, 0, text) for text in texts], alone)
        self._note("many, in memory", [ModelRequest(self._url, "copy-00", 0, text) for text in texts], own)
        in_turn = [(each % NUM_ALONE, text) for each, text in enumerate(texts)]
        everyone = (self._alone.jvm, *self._alone.workers)
        self._note(
            "alone, three in turn", [ModelRequest(self._alone.url(k), None, 0, text) for k, text in in_turn], everyone
        )
        self._note(
            "many, three in turn", [ModelRequest(self._url, f"copy-{k:02}", 0, text) for k, text in in_turn], own
        )
        for _ in range(NUM_READS):
            self.figures["read and pass"].append(self._load.reference.read_and_pass())
        cold = [self._cold[(number * num_cold + each) % NUM_MODELS] for each in range(num_cold)]
        self._note("cold, folder", [ModelRequest(self._url, name, int(name[-3:])) for name in cold], own)
        archives = [f"packed-{number}-{each}.tar.gz" for each in range(NUM_ARCHIVES)]
        for name in archives:
            os.link(self._source / "packed.tar.gz", self._source / name)
        self._note("cold, archive", [ModelRequest(self._url, name, 0) for name in archives], own)
        self._unload(cold[-NUM_UNLOADS:])

    def _note(self, arm: str, requests: Sequence[ModelRequest], pids: Sequence[int]) -> None:
        cost = self._load.measure(requests, pids)
        self.figures[arm].append(cost)
        self._record_peaks()
        print(f"{arm}: {cost.cpu_ms:.1f} CPU ms, {cost.wall_ms:.1f} ms")

    def _unload(self, names: Sequence[str]) -> None:
        """Unload models, and measure the memory that is free when the worker reports the end of the last unload."""
        before, cpu, began = _memory(self._pids[1], "Rss"), cpu_of(self._pids), time.perf_counter()
        for name in names:
            self._operate("unload", name)
        wall_ms = 1000 * (time.perf_counter() - began) / len(names)
        self.freed.append((before - _memory(self._pids[1], "Rss")) / len(names))
        self.figures["unload"].append(Cost(1000 * (cpu_of(self._pids) - cpu) / len(names), wall_ms))

    def _record_peaks(self) -> None:
        """Update the largest number of models in memory and the largest memory."""
        models = self._fleet.status(self._instance)["models"]
        self.resident = max(self.resident, sum(model["tier"] == "device" for model in models))
        self.most_bytes = max(self.most_bytes, _memory(self._pids[1], "Rss"))

    def _operate(self, action: str, name: str) -> None:
        body = f'{{"action": "{action}", "model": "{name}"}}'.encode()
        headers = {"X-Torchmoor-Operation": "models", "Content-Type": "application/json"}
        with make_opener(self._url).open(Request(self._url, body, headers), timeout=60):
            pass

    def run_zipf(self, number: int) -> None:
        """Send Zipf traffic through the proxy to both instances, one of which is killed and comes back meanwhile."""
        url = f"{self._fleet.runtime}/endpoints/many/invocations"
        requests = [
            ModelRequest(url, f"minilm-{each:03}", each, each % len(TEXTS)) for each in zipf(NUM_MODELS, number, seed=1)
        ]
        bad_archives = ("broken.tar.gz", "cut.tar.gz", "absent.tar.gz")
        requests += [ModelRequest(url, name, None) for name in bad_archives * (number // 60)]
        random.Random(2).shuffle(requests)
        jvm = self._pids[0]
        self._load.run(requests, lambda: os.kill(jvm, signal.SIGKILL))
        until = time.monotonic() + RETURN_TIMEOUT_S
        while any(each["state"] != "ready" for each in self._fleet.instances()):
            if time.monotonic() > until:
                raise SystemExit(f"the killed instance was not ready again after {RETURN_TIMEOUT_S:.0f} s")
            time.sleep(0.2)
        self._load.run(requests[: number // 4])


def main() -> None:
    options = parse_options(__doc__, quick="one round, and a third of the Zipf traffic")
    if not (TARGET / "config.json").is_file():
        raise SystemExit(f"there is no {TARGET}; run scripts/make_minilm.py")
    reference = Reference(TARGET)
    load = Load(reference)
    num_zipf = 300 if options.quick else 900
    with tempfile.TemporaryDirectory(prefix="tm-many-") as temporary:
        folder = Path(temporary)
        source = fill(folder / "models")
        settings = {
            "MANY_CACHE_DIR": str(folder / "cache"),
            "MANY_DEVICE_BYTES": str(NUM_RESIDENT * MODEL_BYTES),
        }
        arguments = ("--endpoint", "many", "--models", str(source))
        checkpoints = [folder / f"alone-{number}" for number in range(NUM_ALONE)]
        for checkpoint in checkpoints:
            shutil.copytree(TARGET, checkpoint)
        with (
            running_process_a_model(checkpoints, folder / "alone") as alone,
            running_fleet(TARGET, num_instances=2, arguments=arguments, **settings) as fleet,
        ):
            benchmark = Benchmark(source, fleet, alone, load)
            memory = benchmark.measure_memory()
            for number in range(options.rounds):
                benchmark.run_round(number, NUM_MODELS // options.rounds)
            num_right = len([name for name in load.correct_models if name.startswith("minilm-")])
            benchmark.run_zipf(num_zipf)
    rows = [row_of(arm, costs) for arm, costs in benchmark.figures.items()]
    one_more = (memory.full - memory.empty) / NUM_RESIDENT
    ratios = {
        "models": num_right,
        "resident": benchmark.resident,
        "warm_vs_alone": ratio(benchmark, "many, in memory", "alone"),
        "warm_in_turn_vs_alone": ratio(benchmark, "many, three in turn", "alone, three in turn"),
        "cold_vs_read": ratio(benchmark, "cold, folder", "read and pass"),
        "memory_vs_process_a_model": memory.full / NUM_RESIDENT / memory.process,
        "private_vs_process_a_model": memory.full_private / NUM_RESIDENT / memory.process_private,
        "memory_of_one_more": one_more / memory.process,
        "memory_of_200_vs_200": benchmark.most_bytes / NUM_MODELS / memory.process,
        "wrong": load.wrong,
    }
    print_report(
        "many_models",
        rows,
        ratios,
        options,
        zipf_requests=num_zipf,
        process_mb=round(memory.process / MB),
        process_private_mb=round(memory.process_private / MB),
        empty_worker_mb=round(memory.empty / MB),
        full_worker_mb=round(memory.full / MB),
        full_worker_private_mb=round(memory.full_private / MB),
        most_worker_mb=round(benchmark.most_bytes / MB),
        freed_by_an_unload_mb=round(median(benchmark.freed) / MB),
        models_a_gb=round(1e9 / one_more, 1),
    )


def fill(source: Path) -> Path:
    """Make the folder of models: variants, copies (which share no page cache), an archive, and broken archives."""
    source.mkdir()
    make_variants(TARGET, source, NUM_MODELS)
    for number in range(NUM_RESIDENT):
        shutil.copytree(TARGET, source / f"copy-{number:02}")
    package(TARGET, source / "packed.tar.gz")
    (source / "broken.tar.gz").write_bytes(b"not an archive")
    (source / "cut.tar.gz").write_bytes((source / "packed.tar.gz").read_bytes()[:100_000])
    return source


def row_of(arm: str, costs: Sequence[Cost]) -> Mapping[str, Any]:
    cpu = [cost.cpu_ms for cost in costs]
    return {
        "arm": arm,
        "cpu_ms": median(cpu),
        "least": min(cpu),
        "most": max(cpu),
        "wall_ms": median([cost.wall_ms for cost in costs]),
    }


def ratio(benchmark: Benchmark, arm: str, base: str) -> float:
    """Return the median over the rounds of the ratio of two arms' processor times."""
    costs, bases = benchmark.figures[arm], benchmark.figures[base]
    part = len(bases) // len(costs)  # measurements of the base per round
    return median(
        [cost.cpu_ms / median([b.cpu_ms for b in bases[i * part : (i + 1) * part]]) for i, cost in enumerate(costs)]
    )


def _memory(pid: int, *fields: str) -> float:
    """Return the sum of these fields of a process's smaps_rollup, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = dict(line.split(":", 1) for line in lines)
    return sum(1024.0 * int(found[field].split()[0]) for field in fields)


if __name__ == "__main__":
    main()
