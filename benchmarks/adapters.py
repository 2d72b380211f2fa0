"""Measures what LoRA adapters cost per step: rows without one, with a common one, and with one each.

Eight streams of SmolLM2-135M-Instruct on one thread, float32; processor time per step without the prompts. The arms
take turns. The baseline is an engine whose layers accept no adapters. Adapters of rank 8 change all projections.

    make bench NAME=adapters [QUICK=1]
    python -m benchmarks.adapters [--quick] [--rounds 5] [--save]
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from benchmarks.report import ROOT, parse_options, print_report
from benchmarks.stepped_engine import Row, SteppedEngine
from handlers.engine.contract import SamplingParams
from handlers.models.loader import load_model
from handlers.models.lora import LoraAdapter
from scripts.make_adapters import make_adapters

ROWS = 8
RANK = 8
NUM_STEPS, QUICK_STEPS = 32, 8
CHECKPOINT = ROOT / "models" / "smollm2"
PROMPT = list(range(1000, 1020))
CPU = torch.device("cpu")


class AdapterArm:
    """A model and its engine. max_rank: 0 loads the model without layers for adapters."""

    def __init__(self, max_rank: int) -> None:
        self.model = load_model(CHECKPOINT, CPU, "float32", max_rank=max_rank)
        self.model.eos_token_ids = frozenset()  # every row takes part in every step
        self._engine = SteppedEngine(self.model, ROWS)

    def run(self, adapters: Sequence[LoraAdapter | None], num_steps: int) -> float:
        """Return the processor time per step in ms, with one row for each of these adapters."""
        params = SamplingParams(max_new_tokens=num_steps + 1)
        generated = self._engine.generate(PROMPT, [Row(params, adapter) for adapter in adapters])
        return generated.cpu_s * 1000 / generated.num_steps


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
    print_report("adapters", rows, ratios, options)


if __name__ == "__main__":
    main()
