"""What do two hundred models in one worker cost, and what would each cost alone? `make bench NAME=many_models`

MiniLM-L6 (90.9 MB, float32, one thread): 200 variants that answer differently, on one worker with memory for 20;
beside it, in the same run, TorchServe's own way, a worker process for each of three models with a handler as its users
write it. Requests go straight to TorchServe, one after the other; processor time of the JVM and the worker, because the
machine is shared. Then both of two instances under Zipf traffic through the proxy, with broken archives, and kill -9 of
one of them in the middle.

    models                     of the 200, how many one worker has answered for, rightly; each had to be loaded
    resident                   the most of them that were in memory at a time
    warm_vs_alone              a request for a model in memory, with 19 others there / the same model's own process
    cold_vs_read               a request that loads its model, and evicts another / reading the file and a forward pass
    memory_vs_process_a_model  the worker's memory, mapped weights and all libraries included, by the 20 models in it,
                               which are 20 files / private memory of a process with one model
    private_vs_process_a_model the same without page cache, which the kernel may drop, on both sides
    memory_of_one_more         what each of the 20 adds, against the same
    memory_of_200_vs_200       the most that the worker took while it served all 200, against 200 such processes
    wrong                      requests lost, or answered wrongly, in everything above and under the Zipf traffic
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
from typing import Any
from urllib.request import Request

from benchmarks.fleet import Fleet, cpu_of, running_fleet
from benchmarks.many_models_alone import ProcessAModel, running_process_a_model
from benchmarks.many_models_load import TEXTS, Ask, Cost, Load, Reference, zipf
from benchmarks.report import median, parse_options, print_report
from scripts.make_minilm import TARGET, make_variants
from torchmoor.cli.model_archive import package
from torchmoor.clients.local import make_opener

NUM_MODELS, NUM_RESIDENT, NUM_ALONE = 200, 20, 3
MODEL_BYTES = 91_000_000
NUM_WARM, NUM_ARCHIVES, NUM_READS, NUM_UNLOADS = 90, 3, 10, 15  # of a round
RETURN_TIMEOUT_S = 180.0
MB = 1e6


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: of the worker without a model and with its 20, and of a process with one model.

    private: without pages of files, as the kernel tells it; process: all but what it shares with others.
    """

    empty: float
    full: float
    full_private: float
    process: float
    process_private: float


class Benchmark:
    """One worker of many models, the processes of a model each, and what has been measured of them."""

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
        """All models are used in the same way."""
        texts = range(len(TEXTS))
        self._load.run([Ask(self._url, "copy-00", 0, text) for text in texts])
        self._operate("unload", "copy-00")
        empty = _memory(self._pids[1], "Rss")
        copies = [f"copy-{number:02}" for number in range(NUM_RESIDENT)]
        self._load.run([Ask(self._url, copy, 0, text) for text in texts for copy in copies])
        self._look()
        self._load.run([Ask(self._alone.url(number), None, 0, text) for text in texts for number in range(NUM_ALONE)])
        return Memory(
            empty,
            _memory(self._pids[1], "Rss"),
            _memory(self._pids[1], "Anonymous"),
            median([_memory(pid, "Private_Clean", "Private_Dirty") for pid in self._alone.workers]),
            median([_memory(pid, "Anonymous") for pid in self._alone.workers]),
        )

    def run_round(self, number: int, num_cold: int) -> None:
        """Every arm once. number: of the round."""
        own, alone = self._pids, (self._alone.jvm, self._alone.workers[0])
        texts = [each % len(TEXTS) for each in range(NUM_WARM)]
        self._load.run([Ask(self._url, f"copy-{each:02}", 0) for each in range(NUM_RESIDENT)])
        self._note("alone", [Ask(self._alone.url(0), None, 0, text) for text in texts], alone)
        self._note("many, in memory", [Ask(self._url, "copy-00", 0, text) for text in texts], own)
        in_turn = [(each % NUM_ALONE, text) for each, text in enumerate(texts)]
        everyone = (self._alone.jvm, *self._alone.workers)
        self._note("alone, three in turn", [Ask(self._alone.url(k), None, 0, text) for k, text in in_turn], everyone)
        self._note("many, three in turn", [Ask(self._url, f"copy-{k:02}", 0, text) for k, text in in_turn], own)
        for _ in range(NUM_READS):
            self.figures["read and pass"].append(self._load.reference.read_and_pass())
        cold = [self._cold[(number * num_cold + each) % NUM_MODELS] for each in range(num_cold)]
        self._note("cold, folder", [Ask(self._url, name, int(name[-3:])) for name in cold], own)
        archives = [f"packed-{number}-{each}.tar.gz" for each in range(NUM_ARCHIVES)]
        for name in archives:
            os.link(self._source / "packed.tar.gz", self._source / name)
        self._note("cold, archive", [Ask(self._url, name, 0) for name in archives], own)
        self._unload(cold[-NUM_UNLOADS:])

    def _note(self, arm: str, asks: Sequence[Ask], pids: Sequence[int]) -> None:
        cost = self._load.measure(asks, pids)
        self.figures[arm].append(cost)
        self._look()
        print(f"{arm}: {cost.cpu_ms:.1f} CPU ms, {cost.wall_ms:.1f} ms")

    def _unload(self, names: Sequence[str]) -> None:
        """What of the memory that models have touched is the system's when the worker says that they are unloaded."""
        before, cpu, began = _memory(self._pids[1], "Rss"), cpu_of(self._pids), time.perf_counter()
        for name in names:
            self._operate("unload", name)
        wall_ms = 1000 * (time.perf_counter() - began) / len(names)
        self.freed.append((before - _memory(self._pids[1], "Rss")) / len(names))
        self.figures["unload"].append(Cost(1000 * (cpu_of(self._pids) - cpu) / len(names), wall_ms))

    def _look(self) -> None:
        models = self._fleet.status(self._instance)["models"]
        self.resident = max(self.resident, sum(model["tier"] == "device" for model in models))
        self.most_bytes = max(self.most_bytes, _memory(self._pids[1], "Rss"))

    def _operate(self, action: str, name: str) -> None:
        body = f'{{"action": "{action}", "model": "{name}"}}'.encode()
        headers = {"X-Torchmoor-Operation": "models", "Content-Type": "application/json"}
        with make_opener(self._url).open(Request(self._url, body, headers), timeout=60):
            pass

    def run_zipf(self, number: int) -> None:
        """Through the proxy, to both instances; one is killed meanwhile, and works again at the end."""
        url = f"{self._fleet.runtime}/endpoints/many/invocations"
        asks = [Ask(url, f"minilm-{each:03}", each, each % len(TEXTS)) for each in zipf(NUM_MODELS, number, seed=1)]
        asks += [Ask(url, name, None) for name in ("broken.tar.gz", "cut.tar.gz", "nobody.tar.gz") * (number // 60)]
        random.Random(2).shuffle(asks)
        jvm = self._pids[0]
        self._load.run(asks, lambda: os.kill(jvm, signal.SIGKILL))
        until = time.monotonic() + RETURN_TIMEOUT_S
        while any(each["state"] != "ready" for each in self._fleet.instances()):
            if time.monotonic() > until:
                raise SystemExit("the killed instance did not come back")
            time.sleep(0.2)
        self._load.run(asks[: number // 4])


def main() -> None:
    options = parse_options(__doc__, quick="one round, and a third of the Zipf traffic")
    if not (TARGET / "config.json").is_file():
        raise SystemExit(f"there is no {TARGET}; scripts/make_minilm.py makes it")
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
            num_right = len([name for name in load.right if name.startswith("minilm-")])
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
        save=options.save,
        rounds=options.rounds,
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
    """The variants; copies, which share no pages of the page cache; an archive; broken ones."""
    source.mkdir()
    make_variants(TARGET, source, NUM_MODELS)
    for number in range(NUM_RESIDENT):
        shutil.copytree(TARGET, source / f"copy-{number:02}")
    package(TARGET, source / "packed.tar.gz")
    (source / "broken.tar.gz").write_bytes(b"this is no archive")
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
    """Of processor times: the median of the rounds' own."""
    costs, bases = benchmark.figures[arm], benchmark.figures[base]
    part = len(bases) // len(costs)  # measured so often a round
    return median(
        [cost.cpu_ms / median([b.cpu_ms for b in bases[i * part : (i + 1) * part]]) for i, cost in enumerate(costs)]
    )


def _memory(pid: int, *fields: str) -> float:
    """Return the bytes of a process, by the kernel's own sums."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = dict(line.split(":", 1) for line in lines)
    return sum(1024.0 * int(found[field].split()[0]) for field in fields)


if __name__ == "__main__":
    main()
