"""How fast and how correct is the built-in engine on this machine's GPU?

One command for a GPU machine that is available for a short time and has no network. It needs a checkout and the
installed torch and transformers, not TorchServe. Without a GPU it runs a tiny model on the CPU, to test itself.

    environment  GPU, driver, versions, SDPA backends, copy bandwidth
    tests        pytest -m gpu
    decode       tokens/s at 1, 8 and 64 rows of 1,000 positions, against the limit that memory bandwidth sets,
                 with launches and waits for the device per step; greedy, sampled, and without CUDA graphs
    uneven       one long context beside short ones, against the short ones alone
    ttft         time to the first token of a new picture, a follow-up, and a rebuilt session
    parked       a session's KV cache copied to the host and back, against computing it again
    out_of_memory  a prompt for which the device has no room, and what comes after it
    soak         sequences that come and go, for the rest of the time

    make gpu-report [ARGS="--minutes 9 --shape llava-1.5-7b --only decode,ttft"]
    python -m benchmarks.gpu_report --help

Prints one line of JSON per phase. With --out it also writes them and a page to that folder.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_model import SHAPES
from benchmarks.gpu_page import as_page
from benchmarks.gpu_phases import PHASES, Bench, soak
from handlers.device import choose_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--minutes", type=float, default=9.0 if has_gpu else 0.1, help="for everything; default: 9")
    parser.add_argument("--shape", choices=SHAPES, default="llava-1.5-7b" if has_gpu else "tiny")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--soak", type=float, help="seconds of the soak; default: what is left of the time")
    parser.add_argument("--only", help=f"phases separated by commas, of {', '.join((*PHASES, 'soak'))}")
    parser.add_argument("--out", type=Path, help="folder for gpu-report.json and gpu-report.md")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else [*PHASES, "soak"]
    if unknown := set(chosen) - {*PHASES, "soak"}:
        parser.error(f"there is no phase {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)  # as in a worker
    device = choose_device(0 if has_gpu else None)
    dtype = torch.float32 if not has_gpu else getattr(torch, options.dtype)
    bench = Bench(SHAPES[options.shape], device, dtype, is_quick=not has_gpu)
    end = time.monotonic() + 60 * options.minutes
    found: list[dict[str, Any]] = []
    for name in chosen:
        begin = time.monotonic()
        if begin > end and name != "soak":
            result: dict[str, Any] = {"skipped": "no time is left"}
        else:
            try:
                left = max(1.0, end - begin)
                result = soak(bench, options.soak or left) if name == "soak" else PHASES[name](bench)
            except Exception as exc:  # the other phases still have something to say
                traceback.print_exc()
                result = {"failed": f"{type(exc).__name__}: {exc}"}
        found.append({"phase": name, "seconds": round(time.monotonic() - begin, 2), **result})
        print(json.dumps(found[-1]), flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "gpu-report.json").write_text("".join(json.dumps(each) + "\n" for each in found))
            (options.out / "gpu-report.md").write_text(as_page(found, options.shape, options.dtype))
    sys.exit(any("failed" in each or each.get("passed") is False for each in found))


if __name__ == "__main__":
    main()
