"""Measures what it costs to make answers follow a JSON schema, and checks that such answers are valid.

Cost: eight streams of SmolLM2-135M-Instruct on one thread, float32, 64 new tokens each, greedy and sampled; processor
time per token with a JSON schema relative to the same streams without one, which take turns. The time to read a
vocabulary and to compile a schema is reported separately.

Validity: sampled answers of the demo checkpoint in batches of eight, each with its own schema, which hypothesis
generates. jsonschema validates those that end by themselves. Some patterns and formats have no maximum length, so a
few answers reach their token limit instead; these count as `cut`.

    make bench NAME=grammar [QUICK=1]
    python -m benchmarks.grammar [--quick] [--rounds 5] [--save]
"""

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import jsonschema
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.grammar_schemas import SCHEMAS
from benchmarks.report import ROOT, parse_options, print_report
from benchmarks.stepped_engine import Row, SteppedEngine
from handlers.engine.contract import FinishReason, GrammarText, SamplingParams, TokenEvent
from handlers.engine.grammar import Grammar, GrammarCompiler
from handlers.models.loader import load_model
from handlers.settings.grammar import GrammarSettings

ROWS = 8
NUM_NEW, QUICK_NEW = 64, 16
NUM_SCHEMAS = 10_000
QUICK_SCHEMAS = 80
MAX_JUDGED_TOKENS = 400
QUESTION = "List ten people with their names, ages and what they like."
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "format": "email"},
        "likes": {"type": "array", "items": {"enum": ["music", "books", "sport", "food"]}, "minItems": 1},
    },
    "required": ["name", "age", "email", "likes"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 50}  # longer than an answer may be, so that none ends early


class Bench:
    """A checkpoint with its engine and its grammar compiler."""

    def __init__(self, checkpoint: str) -> None:
        self.model = load_model(ROOT / "models" / checkpoint, torch.device("cpu"), "float32")
        self.compiler = GrammarCompiler(
            self.model.tokenizer, self.model.eos_token_ids, self.model.vocabulary, GrammarSettings()
        )
        self._engine = SteppedEngine(self.model, ROWS)
        message = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
        self._prompt = self.model.render([message], [])

    def compile(self, schema: Any) -> Grammar:
        return self.compiler.compile(GrammarText("json_schema", json.dumps(schema), "schema"))

    def run(self, params: list[SamplingParams]) -> tuple[list[tuple[list[int], TokenEvent]], float]:
        """Return each row's tokens and last event, and the processor time in s of the steps after the prompts."""
        generated = self._engine.generate(self._prompt, [Row(each) for each in params])
        answers = [([e.token_id for e in own if e.token_id is not None], own[-1]) for own in generated.events]
        return answers, generated.cpu_s


def measure(rounds: int, num_new: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Compare streams with and without a schema."""
    bench = Bench("smollm2")
    begin = time.perf_counter()
    bench.compile({"type": "boolean"})
    vocabulary_s = time.perf_counter() - begin
    begin = time.perf_counter()
    grammar = bench.compile(PEOPLE)
    compile_s = time.perf_counter() - begin
    kinds: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"do_sample": True, "top_k": 50, "temperature": 0.8}}
    rows, ratios = [], {}
    for kind, fields in kinds.items():
        spent: dict[str, list[float]] = {"free": [], "schema": []}
        for _ in range(rounds + 1):
            for arm, own in (("free", None), ("schema", grammar)):
                params = [SamplingParams(max_new_tokens=num_new, grammar=own, seed=n, **fields) for n in range(ROWS)]
                answers, seconds = bench.run(params)
                num_tokens = sum(len(tokens) - 1 for tokens, _ in answers)
                spent[arm].append(seconds * 1000 / num_tokens)
        own_ms = {arm: median(values[1:]) for arm, values in spent.items()}  # the first round warms up
        ratios[f"cpu_vs_free_{kind}"] = own_ms["schema"] / own_ms["free"]
        rows += [{"arm": f"{kind}, {arm}", "cpu_ms_a_token": value} for arm, value in own_ms.items()]
    bench.compiler.stop()
    ratios |= {"vocabulary_ms": vocabulary_s * 1000, "compile_ms": compile_s * 1000}
    return rows, ratios


def draw_schemas(count: int) -> list[Any]:
    """Return this number of random schemas, the same in each run."""
    drawn: list[Any] = []

    @seed(1)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMAS)
    def draw(schema: Any) -> None:
        drawn.append(schema)

    draw()
    return drawn


def judge(count: int) -> Iterator[str]:
    """Generate an answer for each schema, and yield its verdict: `valid`, `invalid` or `cut`."""
    bench = Bench("tiny-llava")
    rng = random.Random(0)
    drawn = iter(draw_schemas(count))
    while schemas := list(islice(drawn, ROWS)):
        params = [
            SamplingParams(
                max_new_tokens=MAX_JUDGED_TOKENS,
                grammar=bench.compile(schema),
                do_sample=True,
                temperature=rng.choice((0.7, 1.0, 2.0)),
                top_k=rng.choice((None, 40)),
                top_p=rng.choice((None, 0.9)),
                seed=rng.randrange(2**32),
            )
            for schema in schemas
        ]
        for schema, (tokens, last) in zip(schemas, bench.run(params)[0], strict=True):
            text = bench.model.tokenizer.decode(tokens, skip_special_tokens=True)
            yield _judge(schema, text, last)
    bench.compiler.stop()


def _judge(schema: Any, text: str, last: TokenEvent) -> str:
    if last.finish_reason is FinishReason.LENGTH:
        return "cut"
    try:
        if last.error is not None:
            raise last.error
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except Exception as exc:
        print(f"invalid: {schema} {text!r} {exc}", file=sys.stderr)
        return "invalid"
    return "valid"


def main() -> None:
    options = parse_options(__doc__, quick=f"one round of {QUICK_NEW} tokens and {QUICK_SCHEMAS} schemas")
    torch.set_num_threads(1)
    rows, ratios = measure(options.rounds, QUICK_NEW if options.quick else NUM_NEW)
    num_schemas = QUICK_SCHEMAS if options.quick else NUM_SCHEMAS
    found = Counter(judge(num_schemas))
    counts = {name: found[name] for name in ("valid", "invalid", "cut")}
    print_report("grammar", rows, {**ratios, **counts}, options)


if __name__ == "__main__":
    main()
