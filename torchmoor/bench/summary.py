"""Results of a load, with the names of vLLM's serving benchmark, and their table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median, pstdev
from textwrap import wrap
from typing import Any

from torchmoor.bench.client import Sample
from torchmoor.bench.load import LoadOutcome, LoadSettings

PERCENTILES = (50, 90, 99)
WIDTH = 80
INDENT = " " * 11  # of a failure's reason
METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after it",
    "itl": "between parts of an answer",
    "e2el": "whole answer",
}


def summarize(outcome: LoadOutcome, settings: LoadSettings) -> dict[str, Any]:
    """Return the results as one flat object, with None for values that were not measured."""
    done = [sample for sample in outcome.samples if sample.error is None]
    failed = [sample for sample in outcome.samples if sample.error is not None]
    duration = max(outcome.ended - outcome.began, 1e-9)
    num_input = sum(int(sample.receipt.get("context_tokens", 0)) for sample in done)
    num_output = sum(sample.output_tokens for sample in done)
    itls = [itl for sample in done for itl in sample.itls_s]
    return {
        "request_rate": settings.rate,
        "max_concurrency": settings.users,
        "duration": round(duration, 3),
        "completed": len(done),
        "failed": len(failed),
        "total_input_tokens": num_input,
        "total_prefilled_tokens": sum(int(sample.receipt.get("prefill_tokens", 0)) for sample in done),
        "total_output_tokens": num_output,
        "request_throughput": round(len(done) / duration, 3),
        "output_throughput": round(num_output / duration, 3),
        "total_token_throughput": round((num_input + num_output) / duration, 3),
        **_describe("ttft", [ttft for sample in done if (ttft := sample.ttft_s) is not None]),
        **_describe("tpot", [tpot for sample in done if (tpot := sample.tpot_s) is not None]),
        **_describe("itl", itls),
        **_describe("e2el", [sample.latency_s for sample in done]),
        "errors": dict(Counter(str(sample.error) for sample in failed).most_common()),
        "error_reasons": {str(sample.error): sample.reason for sample in reversed(failed) if sample.reason},
        "instances": _count(done, "instance"),
        "routing_reasons": _count(done, "routing_reason"),
        "cache_tiers": _count(done, "cache_tier"),
        "is_interrupted": outcome.is_interrupted,
    }


def _describe(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    values = sorted(1000 * each for each in seconds)
    found: dict[str, float | None] = {
        f"mean_{name}_ms": fmean(values) if values else None,
        f"median_{name}_ms": median(values) if values else None,
        f"std_{name}_ms": pstdev(values) if values else None,
        **{f"p{p}_{name}_ms": percentile(values, p) for p in PERCENTILES},
    }
    return {key: None if value is None else round(value, 3) for key, value in found.items()}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Interpolate a percentile of sorted values, as NumPy does; None without values."""
    if not values:
        return None
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def _count(samples: Sequence[Sample], field: str) -> dict[str, int]:
    return dict(Counter(str(sample.receipt[field]) for sample in samples if field in sample.receipt).most_common())


def describe(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of 80 columns."""
    yield f"{found['completed']} answered, {found['failed']} failed in {found['duration']:.1f} s"
    yield (
        f"{found['request_throughput']:.2f} requests/s, {found['output_throughput']:.1f} tokens/s generated, "
        f"{found['total_input_tokens']} read"
    )
    yield f"({found['total_prefilled_tokens']} of them computed, the rest found in the KV cache)"
    yield ""
    columns = ("mean", *(f"p{p}" for p in PERCENTILES))
    yield f"{'milliseconds':<38}" + "".join(f"{column:>9}" for column in columns)
    for name, meaning in METRICS.items():
        values = [found[f"{column}_{name}_ms"] for column in columns]
        if values[0] is not None:
            yield f"{name.upper():<6}{meaning:<32}" + "".join(f"{value:9.1f}" for value in values)
    for title, field in (
        ("answered by", "instances"),
        ("chosen by", "routing_reasons"),
        ("cache", "cache_tiers"),
        ("failures", "errors"),
    ):
        if found[field]:
            yield ""
            yield f"{title}:"
            for name, number in found[field].items():
                yield f"  {number:>7}  {name}"
                if field == "errors":
                    yield from wrap(
                        found["error_reasons"].get(name, ""), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT
                    )
