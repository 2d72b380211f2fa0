"""Measures what continuous batching saves and what serving adds, in processor time per token.

The arms run SmolLM2-135M-Instruct with its real weights on one thread: prompts of about 200 tokens, 64 new greedy
tokens. Processor time is user and system time of all processes that take part, prompts included.

    sequential   transformers' generate, one prompt after the other
    torchmoor    the engine in this process with 1, 4, 8 and 16 concurrent streams, float32 and bfloat16
    served       8 streams through boto3, the proxy and real TorchServe
    manager      transformers' continuous batching, 8 streams
    vllm         vLLM on the CPU in bfloat16, if TORCHMOOR_BENCH_VLLM names the Python of an environment that has it
                 (make setup-vllm); its AsyncLLM alone, and behind torchmoor's sessions (handler.engine.name: vllm)

Also measures follow-up questions that reuse a KV cache (vLLM: its prefix cache), and how much a prompt of 4,000 tokens
delays eight running streams. The goals come from prototypes: 1/3.7 of sequential with 8 streams, 1/5.1 with 16.

    make bench NAME=engine [QUICK=1]
    python -m benchmarks.engine [--quick] [--rounds 5] [--save]
"""

import json
import os
import random
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from benchmarks.engine_arms import (
    Answers,
    Ids,
    Sequential,
    Served,
    TorchmoorEngine,
    TransformersManager,
    Vllm,
    VllmChats,
)
from benchmarks.fleet import running_fleet
from benchmarks.report import ROOT, parse_options, print_report

CHECKPOINT = ROOT / "models" / "smollm2"
STREAMS = (1, 4, 8, 16)
NUM_FOLLOWUPS = 8
UNUSED_TOKEN = "<repo_name>"  # a token of the vocabulary that the model does not generate in a chat
ADDED = "added by serving"
GAP = "gap beside a long prompt"
VLLM_CHATS = ("alone", "sessions")
FIRST_TOKEN = "first token of a follow-up:"
WORDS = (
    "river mountain paper window garden engine letter summer winter bridge silver copper island harbour market "
    "station forest teacher doctor painter captain kitchen library morning evening table bottle pocket ladder "
    "animal flower planet signal winding quiet ancient modern narrow heavy bright distant early careful hidden "
    "walked carried painted opened followed answered repaired measured crossed counted borrowed gathered"
)


@dataclass(frozen=True, slots=True)
class Size:
    """The lengths of a run's prompts and answers, in tokens."""

    prompt: int
    new: int
    long_prompt: int


FULL = Size(prompt=200, new=64, long_prompt=4000)
QUICK = Size(prompt=60, new=12, long_prompt=600)


def make_endless(checkpoint: Path, folder: Path) -> Path:
    """Make a copy of the checkpoint whose end token is never generated, so that each answer reaches its limit."""
    for path in checkpoint.iterdir():
        if path.name not in ("tokenizer_config.json", "generation_config.json"):
            (folder / path.name).symlink_to(path.resolve())
    tokens = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "eos_token": UNUSED_TOKEN}))
    end = AutoTokenizer.from_pretrained(checkpoint).convert_tokens_to_ids(UNUSED_TOKEN)
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": end, "pad_token_id": end}))
    return folder


class Prompts:
    """Questions of a given length, a different one for each stream."""

    def __init__(self, checkpoint: Path, size: Size) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._size = size
        self._rng = random.Random(0)
        self.questions = [self._question(size.prompt) for _ in range(max(STREAMS))]
        self.ids = [self._render(question) for question in self.questions]
        self.long = self._render(self._question(size.long_prompt))

    def follow_up(self, prompt: Ids, answer: Ids) -> Ids:
        """Return the conversation so far and a second question of about 20 tokens."""
        words = self._words(8)
        question = f"<|im_end|>\n<|im_start|>user\nAnd what of the {words}?<|im_end|>\n<|im_start|>assistant\n"
        return prompt + answer + self._tokenizer(question, add_special_tokens=False)["input_ids"]

    def text(self, ids: Ids) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _question(self, num_tokens: int) -> str:
        words: list[str] = []
        while len(self._render(question := f"Write a story with these words: {' '.join(words)}.")) < num_tokens:
            words += self._words(max(1, (num_tokens - len(words)) // 16)).split()
        return question

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choices(WORDS.split(), k=count))

    def _render(self, question: str) -> Ids:
        messages = [{"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: Ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class Benchmark:
    """Runs all arms, collects their figures by round, and compares their answers."""

    def __init__(self, checkpoint: Path, size: Size, vllm: Path | None, stack: ExitStack, *, quick: bool) -> None:
        self._size = size
        self._prompts = Prompts(checkpoint, size)
        self._counts = {"float32": STREAMS} if quick else {"float32": STREAMS, "bfloat16": (1, 8, 16)}
        self._sequential = {dtype: Sequential(checkpoint, dtype) for dtype in self._counts}
        self._manager = TransformersManager(self._sequential["float32"])
        self._engines = {dtype: TorchmoorEngine(checkpoint, dtype) for dtype in self._counts}
        for engine in self._engines.values():
            stack.callback(engine.stop)
        self._served = Served(stack.enter_context(running_fleet(checkpoint, MODEL_DTYPE="float32")))
        self._vllm = Vllm(vllm, checkpoint, "bfloat16") if vllm else None
        self._chats = {kind: VllmChats(kind, vllm, checkpoint, "bfloat16") for kind in VLLM_CHATS} if vllm else {}
        for process in [self._vllm, *self._chats.values()]:
            if process is not None:
                stack.callback(process.stop)
        self.figures: dict[tuple[str, str, int], list[float]] = defaultdict(
            list
        )  # by arm, dtype and streams: one per round
        self.num_compared = 0
        self.is_equal = True
        self._served.ask(self._prompts.questions[:8], size.new)  # warms up the JVM's compiler
        self._alone = self._sequential["float32"].generate(self._prompts.ids, size.new).tokens

    def run_round(self) -> None:
        """Run every arm once, each baseline next to the arms that are compared with it."""
        ids, new = self._prompts.ids, self._size.new
        for dtype, counts in self._counts.items():
            self._note("sequential", dtype, 1, self._sequential[dtype].generate(ids[:1], new))
            for count in counts:
                if count != NUM_FOLLOWUPS:
                    self._note("torchmoor", dtype, count, self._engines[dtype].generate(ids[:count], new), self._alone)
            self._follow_up(dtype)
        self._note("manager", "float32", 8, self._manager.generate(ids[:8], new))
        self._serve()
        self._gaps()
        if self._vllm:
            self._note("vllm", "bfloat16", 1, self._vllm.generate(ids[:1], new))
            first = self._vllm.generate(ids[:NUM_FOLLOWUPS], new)
            second = [self._prompts.follow_up(p, a) for p, a in zip(ids, first.tokens, strict=False)]
            self._note("vllm", "bfloat16", NUM_FOLLOWUPS, first)
            self._note("vllm follow-up", "bfloat16", NUM_FOLLOWUPS, self._vllm.generate(second, new, is_fresh=False))
        for kind, arm in self._chats.items():
            self._chat(kind, arm)

    def _chat(self, kind: str, arm: VllmChats) -> None:
        """Run conversations of two turns; the second turn hits vLLM's prefix cache."""
        questions, new = self._prompts.questions[:NUM_FOLLOWUPS], self._size.new
        cpu_ms, _ = arm.chat(questions, new, is_followup=False)
        _, ttft_ms = arm.chat([f"And then? {each[:60]}" for each in questions], new, is_followup=True)
        self.figures[f"vllm {kind}", "bfloat16", NUM_FOLLOWUPS].append(cpu_ms)
        self.figures[f"{FIRST_TOKEN} vllm {kind}", "bfloat16", NUM_FOLLOWUPS].append(ttft_ms)
        print(f"vllm {kind}: {cpu_ms:.1f} CPU ms per token, follow-up {ttft_ms:.0f} ms", file=sys.stderr)

    def _follow_up(self, dtype: str) -> None:
        """Run conversations of two turns; the second turn reuses the KV cache of the first."""
        ids, new, engine = self._prompts.ids[:NUM_FOLLOWUPS], self._size.new, self._engines[dtype]
        caches = engine.open(len(ids))
        first = engine.follow_up(ids, new, caches)
        second = [self._prompts.follow_up(p, a) for p, a in zip(ids, first.tokens, strict=True)]
        answers = engine.follow_up(second, new, caches)
        engine.close(caches)
        alone = self._sequential[dtype].generate(second[:1], new)
        self._note("torchmoor", dtype, NUM_FOLLOWUPS, first, self._alone)
        self._note("torchmoor follow-up", dtype, NUM_FOLLOWUPS, answers, alone.tokens)
        self._note("sequential follow-up", dtype, 1, alone)

    def _serve(self) -> None:
        questions = self._prompts.questions[:8]
        texts, num_tokens, spent = self._served.ask(questions, self._size.new)
        parts = {"proxy": spent.proxy_s, "TorchServe": spent.torchserve_s, "worker but the engine": spent.worker_s}
        figures = {"served": spent.total_s, ADDED: sum(parts.values())}
        for arm, seconds in {**figures, **{f"{ADDED}: {name}": part for name, part in parts.items()}}.items():
            self.figures[arm, "float32", 8].append(seconds * 1000 / num_tokens)
        self._compare([self._prompts.text(ids) for ids in self._alone[: len(texts)]], texts)

    def _gaps(self) -> None:
        wall, cpu = self._engines["float32"].measure_gaps(self._prompts.ids[:8], self._prompts.long, num_before=8)
        self.figures[f"{GAP}, wall", "float32", 8].append(wall.stretch)
        self.figures[f"{GAP}, cpu", "float32", 8].append(cpu.stretch)

    def _note(self, arm: str, dtype: str, count: int, answers: Answers, alone: list[Ids] | None = None) -> None:
        """Record the cost of some answers.

        alone: the answers to the first of these prompts, generated one by one. They are compared in float32 only:
        with 16 bits, rounding may decide between two almost equally likely tokens.
        """
        self.figures[arm, dtype, count].append(answers.cpu_token_ms)
        print(f"{arm} {dtype} {count}: {answers.cpu_token_ms:.1f} CPU ms per token", file=sys.stderr)
        if alone is not None and dtype == "float32":
            both = min(len(alone), len(answers.tokens))
            self._compare(alone[:both], answers.tokens[:both])

    def _compare(self, expected: list[Any], found: list[Any]) -> None:
        self.num_compared += len(expected)
        different = sum(a != b for a, b in zip(expected, found, strict=True))
        if different:
            print(f"{different} of {len(expected)} answers differ", file=sys.stderr)
            self.is_equal = False

    def ratio(self, arm: tuple[str, str, int], base: tuple[str, str, int]) -> float | None:
        """Return the median of the rounds' ratios; None if one of the two was not measured."""
        pairs = list(zip(self.figures.get(arm, ()), self.figures.get(base, ()), strict=False))
        return median([a / b for a, b in pairs]) if pairs else None

    def median_of(self, arm: tuple[str, str, int]) -> float:
        return median(self.figures[arm])


def _unit(arm: str) -> str:
    if arm.startswith(FIRST_TOKEN):
        return "ms"
    return "times the usual" if arm.startswith(GAP) else "CPU ms a token"


def summarize(found: Benchmark) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows and ratios of the report."""
    rows = [
        {
            "arm": arm,
            "dtype": dtype,
            "streams": count,
            "unit": _unit(arm),
            "median": median(values),
            "least": min(values),
            "most": max(values),
        }
        for (arm, dtype, count), values in found.figures.items()
    ]
    alone, alone16 = ("sequential", "float32", 1), ("sequential", "bfloat16", 1)
    ours, ours16 = ("torchmoor", "float32", 8), ("torchmoor", "bfloat16", 8)
    vllm = ("vllm", "bfloat16", 8)
    ratios = {
        "cpu_token_4_vs_sequential": found.ratio(("torchmoor", "float32", 4), alone),
        "cpu_token_8_vs_sequential": found.ratio(ours, alone),
        "cpu_token_16_vs_sequential": found.ratio(("torchmoor", "float32", 16), alone),
        "cpu_token_8_vs_sequential_bfloat16": found.ratio(ours16, alone16),
        "cpu_token_16_vs_sequential_bfloat16": found.ratio(("torchmoor", "bfloat16", 16), alone16),
        "cpu_token_8_vs_manager": found.ratio(ours, ("manager", "float32", 8)),
        "cpu_token_8_vs_vllm": found.ratio(ours16, vllm),
        "cpu_token_8_float32_vs_vllm": found.ratio(ours, vllm),
        "cpu_token_followup_8_vs_vllm": found.ratio(
            ("torchmoor follow-up", "bfloat16", NUM_FOLLOWUPS), ("vllm follow-up", "bfloat16", NUM_FOLLOWUPS)
        ),
        "vllm_engine_cpu_token_8_vs_vllm": found.ratio(
            ("vllm sessions", "bfloat16", NUM_FOLLOWUPS), ("vllm alone", "bfloat16", NUM_FOLLOWUPS)
        ),
        "vllm_engine_followup_vs_prefix_hit": found.ratio(
            (f"{FIRST_TOKEN} vllm sessions", "bfloat16", NUM_FOLLOWUPS),
            (f"{FIRST_TOKEN} vllm alone", "bfloat16", NUM_FOLLOWUPS),
        ),
        "cpu_token_followup_8_vs_sequential": found.ratio(
            ("torchmoor follow-up", "float32", NUM_FOLLOWUPS), ("sequential follow-up", "float32", 1)
        ),
        "served_added_cpu_ms": found.median_of((ADDED, "float32", 8)),
        "served_vs_in_process": found.ratio(("served", "float32", 8), ours),
        "long_prompt_gap": found.median_of((f"{GAP}, cpu", "float32", 8)),
        "long_prompt_gap_wall": found.median_of((f"{GAP}, wall", "float32", 8)),
        "greedy_equal": found.is_equal,
    }
    return rows, ratios


def main() -> None:
    options = parse_options(__doc__, quick="shorter prompts and answers, float32 only, without vLLM")
    if not (CHECKPOINT / "config.json").is_file():
        raise SystemExit(f"engine: there is no {CHECKPOINT}; run scripts/make_smollm2.py")
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    size = QUICK if options.quick else FULL
    python = os.environ.get("TORCHMOOR_BENCH_VLLM")
    vllm = Path(python) if python and not options.quick else None
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchmoor-bench-"))
        benchmark = Benchmark(make_endless(CHECKPOINT, Path(folder)), size, vllm, stack, quick=options.quick)
        for number in range(options.rounds):
            benchmark.run_round()
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        rows, ratios = summarize(benchmark)
        print_report(
            "engine",
            rows,
            ratios,
            options,
            model="SmolLM2-135M-Instruct",
            prompt_tokens=size.prompt,
            new_tokens=size.new,
            long_prompt_tokens=size.long_prompt,
            answers_compared=benchmark.num_compared,
            vllm=str(vllm) if vllm else None,
        )


if __name__ == "__main__":
    main()
