"""What do adapters cost in a step, where rows have none, the same one, or each another?

Eight streams of SmolLM2-135M-Instruct on one thread, float32; processor time a step without the prompts, the arms in
turn. An engine without the layers that accept adapters is the baseline. Adapters of rank 8 change all projections.

    make bench NAME=adapters [QUICK=1]
    python -m benchmarks.adapters [--quick] [--rounds 5] [--save]
"""

import os
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from benchmarks.engine_arms import CPU, FOR_EVER, KV_BYTES
from benchmarks.report import ROOT, median, parse_options, print_report
from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.kv_cache import SequenceCache
from handlers.engine.builtin.pace import Pace
from handlers.engine.builtin.runner import ModelRunner
from handlers.engine.builtin.scheduler import Scheduler
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import AnswerRequest, SamplingParams
from handlers.models.loader import load_model
from handlers.models.lora import LoraAdapter
from scripts.make_adapters import make_adapters

ROWS = 8
RANK = 8
NUM_STEPS, QUICK_STEPS = 32, 8
CHECKPOINT = ROOT / "models" / "smollm2"
PROMPT = list(range(1000, 1020))


class AdapterArm:
    """An engine whose steps this thread runs. max_rank: 0 for one without adapters."""

    def __init__(self, max_rank: int) -> None:
        self.model = load_model(CHECKPOINT, CPU, "float32", max_rank=max_rank)
        self.model.eos_token_ids = frozenset()  # all rows have all steps
        self._engine = Engine(ModelRunner(self.model, KV_BYTES), Scheduler(ROWS, Pace(512, 1e9)), 1)
        self._scopes = count()

    def run(self, adapters: Sequence[LoraAdapter | None], num_steps: int) -> float:
        """Return the processor milliseconds of a step in which each row has one of these adapters."""
        caches = []
        for adapter in adapters:
            cache = SequenceCache(self._engine.runner.pool, scope=str(next(self._scopes)))
            cache.pin()
            cache.match(PROMPT, "" if adapter is None else adapter.version)
            params = SamplingParams(max_new_tokens=num_steps + 1)
            request = AnswerRequest(
                prompt=PROMPT, images=[], params=params, deadline=FOR_EVER, on_event=lambda event: True, adapter=adapter
            )
            sequence = TokenSequence(cache, request)
            self._engine.admit(sequence)
            caches.append(cache)
        while any(sequence.is_prefilling for sequence in self._engine.scheduler.all()):
            self._engine.step()
        begin, before = time.process_time(), self._engine.num_steps
        while self._engine.scheduler.all():
            self._engine.step()
        spent = time.process_time() - begin
        for cache in caches:
            cache.drop()
        return spent * 1000 / (self._engine.num_steps - before)


def measure(rounds: int, num_steps: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    plain, adapted = AdapterArm(0), AdapterArm(RANK)
    assert adapted.model.adapted is not None
    with tempfile.TemporaryDirectory() as folder:
        made = make_adapters(CHECKPOINT, Path(folder), ROWS, rank=RANK)
        loaded = [adapted.model.adapted.read(each, torch.float32, CPU) for each in made]
    arms: dict[str, tuple[AdapterArm, Sequence[LoraAdapter | None]]] = {
        "no adapters": (plain, [None] * ROWS),
        "none in the step": (adapted, [None] * ROWS),
        "one for all rows": (adapted, loaded[:1] * ROWS),
        "another for each row": (adapted, loaded),
    }
    spent: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds + 1):  # the first round warms up
        for name, (arm, adapters) in arms.items():
            spent[name].append(arm.run(adapters, num_steps))
    own = {name: median(values[1:]) for name, values in spent.items()}
    rows = [{"arm": name, "cpu_ms_a_step": value} for name, value in own.items()]
    base, *others = own
    names = ("none_vs_without", "one_vs_without", "eight_vs_without")
    return rows, {name: own[arm] / own[base] for name, arm in zip(names, others, strict=True)}


def main() -> None:
    options = parse_options(__doc__, quick=f"one round of {QUICK_STEPS} steps")
    torch.set_num_threads(1)
    rows, ratios = measure(options.rounds, QUICK_STEPS if options.quick else NUM_STEPS)
    print_report("adapters", rows, ratios, save=options.save, quick=options.quick, rounds=options.rounds)


if __name__ == "__main__":
    main()
