"""Measures the processor time of a streamed token beside the engine, in each process. `make bench NAME=stream`

One instance serves long sampled answers in TGI's event stream, to 8 and 64 streams in closed loops. Processor time is
user and system time per token:

    demo       the demo model with the default settings
    at once    the same, but each token is sent immediately (handler.pump.stream_interval_s 0)
    32 rows    as demo, with handler.engine.max_rows 32: 64 streams run in two waves
    free       a table instead of the model, which returns tokens as fast as they are read

The busiest thread of the worker counts as the engine's.

    cpu_ms_a_token_8, cpu_ms_a_token_64   of everything except the engine's thread, arm demo
    cpu_8_vs_at_once                      the first of these, relative to arm `at once`
    tokens_per_s_demo_64                  tokens per second of 64 streams, arm demo
    tokens_vs_32_rows                     the same, relative to arm `32 rows`
    tokens_per_s_64                       tokens per second of 64 streams, arm free
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fleet import Fleet, Spent, running_fleet
from benchmarks.report import ROOT, parse_options, percentile, print_report
from benchmarks.stream_load import Counted, run_load
from torchmoor.fleet.archives import make_contents, write_archive

CHECKPOINT = ROOT / "models" / "tiny-llava"
STREAMS = (8, 64)
QUESTION = {
    "inputs": "Describe the image.",
    "parameters": {"max_new_tokens": 900, "do_sample": True, "temperature": 9.0, "top_k": 500},  # rarely ends early
    "stream": True,
}
DEMO, AT_ONCE, FEW_ROWS, FREE = "demo", "at once", "32 rows", "free"
ARMS: dict[str, dict[str, str]] = {
    DEMO: {},
    AT_ONCE: {"PUMP_STREAM_INTERVAL_S": "0"},
    FEW_ROWS: {"ENGINE_MAX_ROWS": "32"},
    FREE: {},
}


def main() -> None:
    options = parse_options(__doc__, quick="one short measurement of each arm", rounds=3)
    warm_s, seconds = (1.0, 1.0) if options.quick else (8.0, 8.0)  # the JVM compiles meanwhile
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="torchmoor-stream-") as folder:
        store = Path(folder)
        contents = make_contents("../benchmarks/stream_handler.py", "chat.yaml", CHECKPOINT)
        write_archive(contents, "llava", store / "llava.mar")
        for arm, settings in ARMS.items():
            arguments = ("--journal", "off", *(("--model-store", str(store)) if arm == FREE else ()))
            with running_fleet(CHECKPOINT, arguments=arguments, **settings) as fleet:
                for _ in range(options.rounds):
                    for num_streams in STREAMS:
                        rows.append({"arm": arm, **measure(fleet, num_streams, warm_s, seconds)})
                        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print_report("stream", rows, ratios(rows), options)


def measure(
    fleet: Fleet, num_streams: int, warm_s: float, seconds: float, question: dict[str, Any] = QUESTION
) -> dict[str, Any]:
    """Load the fleet with streams; return times in ms, and processor time in ms per token."""
    counted, before, after = run_load(
        fleet.runtime, question, num_streams=num_streams, warm_s=warm_s, seconds=seconds, mark=fleet.cpu_times
    )
    spent: Spent = after.since(before)
    added_s = spent.worker_s + spent.torchserve_s + spent.proxy_s
    by_token = {
        "engine_ms": spent.engine_s,
        "worker_ms": spent.worker_s,
        "torchserve_ms": spent.torchserve_s,
        "proxy_ms": spent.proxy_s,
        "added_ms": added_s,
    }
    return {
        "streams": num_streams,
        "tokens_per_s": round(counted.num_tokens / counted.seconds),
        **{name: round(used_s / max(counted.num_tokens, 1) * 1e3, 4) for name, used_s in by_token.items()},
        "tokens_per_part": round(counted.num_tokens / max(counted.num_parts, 1), 2),
        **times(counted),
    }


def times(counted: Counted) -> dict[str, float]:
    """Return the times to the first part and between parts, in ms."""
    gaps = counted.gaps_s
    return {
        "ttft_p50_ms": round(median(counted.firsts_s) * 1e3, 1) if counted.firsts_s else 0.0,
        "gap_p50_ms": round(percentile(gaps, 0.5) * 1e3, 1) if gaps else 0.0,
        "gap_p99_ms": round(percentile(gaps, 0.99) * 1e3, 1) if gaps else 0.0,
    }


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    def of(arm: str, streams: int, column: str) -> float:
        return median([float(row[column]) for row in rows if (row["arm"], row["streams"]) == (arm, streams)])

    return {
        "cpu_ms_a_token_8": of(DEMO, 8, "added_ms"),
        "cpu_ms_a_token_64": of(DEMO, 64, "added_ms"),
        "cpu_8_vs_at_once": of(DEMO, 8, "added_ms") / of(AT_ONCE, 8, "added_ms"),
        "tokens_per_s_demo_64": of(DEMO, 64, "tokens_per_s"),
        "tokens_vs_32_rows": of(DEMO, 64, "tokens_per_s") / of(FEW_ROWS, 64, "tokens_per_s"),
        "tokens_per_s_64": of(FREE, 64, "tokens_per_s"),
    }


if __name__ == "__main__":
    main()
