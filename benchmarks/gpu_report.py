"""Measures and tests the built-in engine on this machine's GPU, in one command of limited duration.

It needs no network, only a checkout, torch and transformers; one phase needs TorchServe. Without a GPU it runs a tiny
model on the CPU, as a test of itself.

    environment  GPU, driver, versions, SDPA backends, copy bandwidth
    tests        pytest -m gpu
    decode       tokens/s with 1, 8 and 64 rows of 1,000 positions, relative to the limit of the memory bandwidth;
                 launches and waits for the device per step; greedy, sampled, and without CUDA graphs
    uneven       a step with one long context among short ones, relative to short ones only
    beside       time to the first token of a prompt beside streams, and the streams' longest gap
    ttft         time to the first token of a new image, a follow-up, and a rebuilt session
    parked       time to copy a session's KV cache to the host and back, relative to computing it
    out_of_memory  a prompt that exceeds the device's memory, an answer beside it, and the prompt after it
    served       tokens/s of streams through TorchServe and the proxy, relative to the engine alone; skipped without
                 TorchServe
    soak         sequences that replace each other for the rest of the time

    make gpu-report [ARGS="--minutes 9 --shape llava-1.5-7b --only decode,ttft"]
    python -m benchmarks.gpu_report --help

Prints one line of JSON per phase. A phase that exceeds the time limit is recorded as failed and ends the program.
"""

import argparse
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

import torch

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_model import SHAPES
from benchmarks.gpu_phases import PHASES
from handlers.worker.device import choose_device

SPARE_S = 10.0  # of the time limit, for the last step of the soak


class Report:
    """Prints the results."""

    def __init__(self) -> None:
        self._results: list[dict[str, Any]] = []
        self._phase, self._begin = "", 0.0
        self._lock = threading.Lock()

    def begin(self, phase: str) -> None:
        self._phase, self._begin = phase, time.monotonic()

    def end(self, result: dict[str, Any]) -> None:
        """Add the result of the phase that has begun."""
        with self._lock:
            seconds = round(time.monotonic() - self._begin, 2)
            self._results.append({"phase": self._phase, "seconds": seconds, **result})
            print(json.dumps(self._results[-1]), flush=True)

    def has_failed(self) -> bool:
        return any("failed" in each or each.get("passed") is False for each in self._results)

    def abort(self) -> None:
        """Record the phase as failed and end the program, even while a call waits for the device."""
        self.end({"failed": "not done when the time was over"})
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit; default: 9")
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="llava-1.5-7b" if has_gpu else "tiny",
        help="model to measure; default: llava-1.5-7b, without a GPU tiny",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the weights on a GPU; default: bfloat16. A CPU uses float32.",
    )
    parser.add_argument(
        "--soak",
        type=float,
        default=None if has_gpu else 2.0,
        help="seconds of the phase soak; default: the rest of the time, without a GPU 2",
    )
    parser.add_argument("--only", help=f"run only these phases, separated by commas: {', '.join(PHASES)}")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(PHASES)
    if unknown := set(chosen) - set(PHASES):
        parser.error(f"there is no phase {', '.join(sorted(unknown))}")
    dtype = getattr(torch, options.dtype) if has_gpu else torch.float32
    report = Report()
    limit = threading.Timer(60 * options.minutes, report.abort)
    limit.daemon = True
    end = time.monotonic() + 60 * options.minutes
    report.begin(chosen[0])
    limit.start()
    torch.set_num_threads(1)  # as in a worker
    device = choose_device(0 if has_gpu else None)
    bench = Bench(SHAPES[options.shape], device, dtype, is_quick=not has_gpu)
    for name in chosen:
        report.begin(name)
        bench.left_s = max(1.0, end - SPARE_S - time.monotonic())
        bench.soak_s = options.soak or bench.left_s
        try:
            result = PHASES[name](bench)
        except (Exception, SystemExit) as exc:  # a failed phase does not stop the others
            traceback.print_exc()
            result = {"failed": f"{type(exc).__name__}: {exc}"}
        report.end(result)
    limit.cancel()
    sys.exit(report.has_failed())


if __name__ == "__main__":
    main()
