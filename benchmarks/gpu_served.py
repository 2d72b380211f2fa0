"""Measures the phase `served` of gpu_report.py: the engine's throughput through TorchServe and the proxy."""

import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench import Answer, Bench
from benchmarks.gpu_model import save_checkpoint
from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.sequence import TokenSequence
from handlers.errors import TurnTimedOut
from torchmoor.fleet.archives import make_contents, write_archive

NUM_NEW = 900  # tokens of an answer
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
QUESTION = {
    "inputs": "Describe the image.",
    "parameters": {"max_new_tokens": NUM_NEW, **SAMPLED},
    "stream": True,
}
NUM_PROMPT = 20  # approximate tokens of QUESTION


def served(bench: Bench) -> dict[str, Any]:
    """Compare the tokens/s of streams through one TorchServe instance and the proxy with those of the engine alone.

    Both have the same random weights, number of rows, lengths and sampling. added_ms: processor time per token of
    everything except the engine's thread.
    """
    if importlib.util.find_spec("ts") is None:
        return {"skipped": "TorchServe is not installed for this Python"}
    from benchmarks.fleet import running_fleet  # late, because it needs psutil, which comes with TorchServe
    from benchmarks.stream import measure

    warm_s, seconds = (1.0, 2.0) if bench.is_quick else (5.0, 8.0)
    alone = {num_rows: _run_alone(bench, bench.engine(), num_rows, warm_s, seconds) for num_rows in bench.rows}
    bench.release()
    rows = []
    with tempfile.TemporaryDirectory(prefix="torchmoor-gpu-") as folder:
        checkpoint, store = Path(folder, "checkpoint"), Path(folder, "store")
        save_checkpoint(bench.shape, bench.device, bench.dtype, checkpoint)
        bench.release()
        write_archive(make_contents("chat_entry.py", "chat.yaml"), "llava", store / "llava.mar")
        began = time.monotonic()
        with running_fleet(checkpoint, arguments=("--journal", "off", "--model-store", str(store))) as fleet:
            start_s = time.monotonic() - began
            for num_rows in bench.rows:
                row = measure(fleet, num_rows, warm_s, seconds, QUESTION)
                of_engine = row["tokens_per_s"] / alone[num_rows]
                rows.append({**row, "alone_tokens_per_s": alone[num_rows], "of_engine": of_engine})
    return {"start_s": start_s, "rows": rows}


def _run_alone(bench: Bench, engine: Engine, num_rows: int, warm_s: float, seconds: float) -> float:
    """Return the tokens/s of this number of sampled rows, each of which is replaced when it ends."""
    live: list[tuple[Answer, TokenSequence]] = []
    num_done = 0
    begin_s, count_at_begin = 0.0, 0
    end_s = time.monotonic() + warm_s + seconds
    while (now := time.monotonic()) < end_s:
        if not begin_s and now >= end_s - seconds:
            begin_s, count_at_begin = now, num_done + sum(len(answer.tokens) for answer, _ in live)
        while len(live) < num_rows:
            live.append(bench.submit(engine, bench.prompt(NUM_PROMPT), NUM_NEW, **SAMPLED))
        engine.step()
        running = set(engine.scheduler.all())
        for answer, sequence in [pair for pair in live if pair[1] not in running]:
            num_done += len(answer.tokens)
            sequence.cache.drop()
        live = [pair for pair in live if pair[1] in running]
    num_tokens = num_done + sum(len(answer.tokens) for answer, _ in live)
    for _, sequence in live:
        engine.finish(sequence, TurnTimedOut("the measurement has ended"))
        sequence.cache.drop()
    return (num_tokens - count_at_begin) / (now - begin_s)
