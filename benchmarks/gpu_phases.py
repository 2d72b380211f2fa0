"""Measures the phases of gpu_report.py, each with the product's engine, and returns their figures."""

import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.gpu_bench import TESTS_TIMEOUT_S, Answer, Bench
from benchmarks.gpu_model import kv_token_bytes, weight_bytes
from benchmarks.gpu_served import served
from benchmarks.report import ROOT
from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import PlacedImage
from handlers.errors import TurnTimedOut
from handlers.worker.device import driver_version

SYNCHRONIZES = "called a synchronizing CUDA operation"  # in torch's warning


def environment(bench: Bench) -> dict[str, Any]:
    """Describe the device and its software, and measure the bandwidth of a copy."""
    found: dict[str, Any] = {
        "shape": bench.shape.name,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "device": _describe(bench.device),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__},
        "sdpa": {
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        },
    }
    size = (2 << 30) if bench.device.type == "cuda" else (64 << 20)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    times = [_time(bench, lambda: target.copy_(source)) for _ in range(8)][2:]
    bench.bandwidth = 2 * size / statistics.median(times)
    return found | {"copy_bytes_per_s": bench.bandwidth}


def _describe(device: torch.device) -> dict[str, object]:
    """Return name, memory in bytes, compute capability and driver of a GPU; of a CPU its type only."""
    if device.type != "cuda":
        return {"type": device.type}
    found = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": found.name,
        "bytes": found.total_memory,
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
        "driver": driver_version(),
    }


def tests(bench: Bench) -> dict[str, Any]:
    """Run the GPU tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "--noconftest", "-o", "addopts=", "tests/gpu"]
    command += ["-W", "ignore", "-p", "no:cacheprovider", "--import-mode=importlib"]
    limit_s = min(TESTS_TIMEOUT_S, bench.left_s)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as exc:
        lines = (exc.stdout or b"").decode(errors="replace").splitlines()
        return {"passed": False, "summary": f"not done after {limit_s:.0f} s", "failures": lines[-40:]}
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    passed = done.returncode == 0 or (bench.device.type == "cpu" and done.returncode == 5)
    return {"passed": passed, "summary": lines[-1] if lines else "", "failures": [] if passed else lines[-40:]}


def decode(bench: Bench) -> dict[str, Any]:
    """Measure decoding steps: greedy, sampled, and without CUDA graphs."""
    bandwidth = bench.bandwidth or environment(bench)["copy_bytes_per_s"]
    rows = []
    for name, options, params in (
        ("greedy", {}, {}),
        ("sampled", {}, {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 1}),
        ("without graphs", {"has_graphs": False}, {}),
    ):
        engine = bench.engine(**options)
        for num_rows in bench.rows:
            step = _decode(bench, engine, num_rows, params)
            read = weight_bytes(bench.model) + num_rows * bench.context * kv_token_bytes(bench.model)
            rows.append(
                {
                    "arm": name,
                    "rows": num_rows,
                    "tokens_per_s": num_rows / step["step_s"],
                    "of_bandwidth_limit": read / bandwidth / step["step_s"],
                    **step,
                }
            )
    return {"context": bench.context, "limit_tokens_per_s": _limits(bench, bandwidth), "rows": rows}


def _limits(bench: Bench, bandwidth: float) -> dict[str, float]:
    """Return the tokens/s, by number of rows, of steps that only read the weights and the caches once."""
    weights, token = weight_bytes(bench.model), kv_token_bytes(bench.model)
    return {str(n): n * bandwidth / (weights + n * bench.context * token) for n in bench.rows}


def _decode(bench: Bench, engine: Engine, num_rows: int, params: dict[str, Any]) -> dict[str, Any]:
    num_new = (
        2 * bench.num_steps + 16 + num_rows * bench.context // 512 + num_rows
    )  # the first rows decode while others prefill
    pairs = [bench.submit(engine, bench.prompt(bench.context), num_new, **params) for _ in range(num_rows)]
    while any(sequence.is_prefilling or not answer.tokens for answer, sequence in pairs):
        engine.step()
    for _ in range(3):
        engine.step()
    times = [_time(bench, engine.step) for _ in range(bench.num_steps)]
    counts = _count_launches(bench, engine)
    errors = [answer.error for answer, _ in pairs if answer.error is not None]
    if len(engine.scheduler.running) != num_rows:
        raise RuntimeError(f"only {len(engine.scheduler.running)} of {num_rows} rows took part in all steps")
    bench.finish(engine, *(sequence.cache for _, sequence in pairs))
    if errors:
        raise errors[0]
    times.sort()
    return {"step_s": statistics.median(times), "step_p90_s": times[int(0.9 * len(times))], **counts}


def _count_launches(bench: Bench, engine: Engine) -> dict[str, int | None]:
    """Count the launches of kernels and graphs, and the waits for the device, in one step."""
    if bench.device.type != "cuda":
        return {"launches": None, "waits": None}
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        engine.step()
    names = [event.name for event in profile.events()]
    launches = sum(
        name in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
        for name in names
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        engine.step()
        torch.cuda.set_sync_debug_mode("default")
    return {"launches": launches, "waits": sum(SYNCHRONIZES in str(each.message) for each in caught)}


def uneven(bench: Bench) -> dict[str, Any]:
    """Measure a step of short contexts, and the same step with one long context among them."""
    engine, num_short = bench.engine(), bench.rows[-1] // 2
    found = {}
    for name, lengths in (
        ("short", [bench.question] * num_short),
        ("with_long", [*[bench.question] * (num_short - 1), bench.long_context]),
    ):
        pairs = [bench.submit(engine, bench.prompt(length), 2 * bench.num_steps) for length in lengths]
        while any(sequence.is_prefilling for _, sequence in pairs):
            engine.step()
        found[f"{name}_step_s"] = statistics.median([_time(bench, engine.step) for _ in range(bench.num_steps)])
        bench.finish(engine, *(sequence.cache for _, sequence in pairs))
    return {
        "rows": num_short,
        "long": bench.long_context,
        "ratio": found["with_long_step_s"] / found["short_step_s"],
        **found,
    }


def beside(bench: Bench) -> dict[str, Any]:
    """Measure the time to the first token of prompts that arrive beside streams, and the streams' longest gap."""
    engine, num_streams = bench.engine(), max(1, bench.rows[-1] // 8)
    streams = [bench.submit(engine, bench.prompt(bench.question), 40 * bench.num_steps) for _ in range(num_streams)]
    while any(sequence.is_prefilling for _, sequence in streams):
        engine.step()
    alone = statistics.median([_time(bench, engine.step) for _ in range(bench.num_steps)])
    found: dict[str, Any] = {"streams": num_streams, "gap_alone_s": alone}
    for name, length in (("short", bench.question), ("long", bench.context)):
        firsts, gaps = [], []
        for _ in range(3):
            begin = time.perf_counter()
            answer, sequence = bench.submit(engine, bench.prompt(length), 1)
            while not answer.tokens:
                gaps.append(_time(bench, engine.step))
            firsts.append(_since(answer, begin))
            sequence.cache.drop()
        found |= {f"{name}_s": statistics.median(firsts), f"gap_{name}_s": max(gaps)}
    for _, sequence in streams:
        engine.finish(sequence, TurnTimedOut("the measurement has ended"))
        sequence.cache.drop()
    return found


def ttft(bench: Bench) -> dict[str, Any]:
    """Measure the time to the first token of a new image, a follow-up, and a rebuilt session."""
    engine, size = bench.engine(), bench.shape.image_size
    figures: dict[str, list[float]] = {"encode": [], "new_picture": [], "follow_up": [], "rebuilt": []}
    for turn in range(3 if bench.device.type == "cpu" else 8):
        pixels = torch.randn(1, 3, size, size, generator=bench.generator)
        bench.wait()
        begin = time.perf_counter()
        features = engine.runner.encode_image(pixels)
        bench.wait()
        figures["encode"].append(time.perf_counter() - begin)
        images = [PlacedImage(0, features)]
        image_tokens = [-7 - turn] * len(features)
        first = image_tokens + bench.prompt(bench.question)
        answer, sequence = bench.submit(engine, first, bench.question, images)
        bench.finish(engine)
        figures["new_picture"].append(_since(answer, begin))
        second = first + answer.tokens + bench.prompt(bench.question)
        begin = time.perf_counter()
        answer, sequence = bench.submit(engine, second, 4, cache=sequence.cache)
        bench.finish(engine, sequence.cache)
        figures["follow_up"].append(_since(answer, begin))
        begin = time.perf_counter()
        answer, sequence = bench.submit(engine, second, 4, images)
        bench.finish(engine, sequence.cache)
        figures["rebuilt"].append(_since(answer, begin))
    middle = {f"{name}_s": statistics.median(values[1:]) for name, values in figures.items()}
    return {
        "image_tokens": len(features),
        "follow_up_vs_rebuilt": middle["follow_up_s"] / middle["rebuilt_s"],
        **middle,
    }


def _since(answer: Answer, begin: float) -> float:
    if answer.first_s is None:
        raise RuntimeError(f"no answer: {answer.error}")
    return answer.first_s - begin


def parked(bench: Bench) -> dict[str, Any]:
    """Measure copies of a KV cache to the host and back, and its computation."""
    engine = bench.engine()
    prompt = bench.prompt(bench.context)
    begin = time.perf_counter()
    answer, sequence = bench.submit(engine, prompt, 1)
    bench.finish(engine)
    computed_s = _since(answer, begin)
    storage, slots = engine.runner.pool.storage, sequence.cache.slots[: bench.context]
    host = torch.empty_like(storage[:, :, :, : bench.context], device="cpu", pin_memory=bench.device.type == "cuda")
    out = [_time(bench, lambda: host.copy_(storage.index_select(3, slots), non_blocking=True)) for _ in range(5)]
    back = [
        _time(bench, lambda: storage.index_copy_(3, slots, host.to(bench.device, non_blocking=True))) for _ in range(5)
    ]
    sequence.cache.drop()
    out_s, back_s = statistics.median(out), statistics.median(back)
    return {
        "bytes": host.nbytes,
        "store_s": out_s,
        "load_s": back_s,
        "compute_s": computed_s,
        "load_vs_compute": back_s / computed_s,
    }


def out_of_memory(bench: Bench) -> dict[str, Any]:
    """Check that an answer continues beside a prompt that exceeds the device's memory, and that the next one works."""
    if bench.device.type != "cuda":
        return {"skipped": "needs a GPU: exhausting a CPU's memory would harm other processes"}
    engine = bench.engine(num_tokens=4 * bench.long_context, prefill_chunk=8192, max_stretch=1e9)
    running, first = bench.submit(engine, bench.prompt(bench.question), 400)
    while not running.tokens:
        engine.step()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(bench.device)
    ballast = torch.empty(max(0, free - (96 << 20)), dtype=torch.uint8, device=bench.device)
    prompts = [bench.submit(engine, bench.prompt(bench.long_context // 2), 4) for _ in range(2)]
    bench.finish(engine, first.cache, *(sequence.cache for _, sequence in prompts))
    chunk = engine.scheduler.pace.max_chunk
    del ballast
    after, last = bench.submit(engine, bench.prompt(bench.question), 4)
    bench.finish(engine, last.cache)
    return {
        "running_answer_tokens": len(running.tokens),
        "errors": [type(answer.error).__name__ for answer, _ in prompts if answer.error],
        "chunk_after": chunk,
        "next_answer_tokens": len(after.tokens),
        "passed": len(running.tokens) == 400 and len(after.tokens) == 4,
    }


def soak(bench: Bench) -> dict[str, Any]:
    """Replace sequences as they end, for `soak_s`, and check the engine and its memory."""
    engine, seconds = bench.engine(), bench.soak_s
    end = time.monotonic() + seconds
    live: list[tuple[Answer, TokenSequence]] = []
    num_done = num_tokens = num_errors = 0
    used: list[int] = []
    while time.monotonic() < end:
        while len(live) < bench.rows[-1]:
            length, num_new = (int(torch.randint(1, n, (), generator=bench.generator)) for n in (bench.context, 128))
            is_sampled = len(live) % 2 == 0
            live.append(bench.submit(engine, bench.prompt(length), num_new, do_sample=is_sampled))
        engine.step()
        running = set(engine.scheduler.all())
        for answer, sequence in [pair for pair in live if pair[1] not in running]:
            num_done += 1
            num_tokens += len(answer.tokens)
            num_errors += answer.error is not None
            sequence.cache.drop()
        live = [pair for pair in live if pair[1] in running]
        used.append(torch.cuda.memory_reserved() if bench.device.type == "cuda" else 0)
    for _, sequence in live:
        engine.finish(sequence, TurnTimedOut("the soak has ended"))
        sequence.cache.drop()
    engine.check_integrity()
    engine.runner.pool.check_integrity([])
    middle = used[len(used) // 2] or 1
    return {
        "answers": num_done,
        "tokens_per_s": num_tokens / seconds,
        "errors": num_errors,
        "reserved_growth": used[-1] / middle,
        "passed": num_errors == 0,
    }


def _time(bench: Bench, action: Callable[[], object]) -> float:
    bench.wait()
    begin = time.perf_counter()
    action()
    bench.wait()
    return time.perf_counter() - begin


PHASES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "environment": environment,
    "tests": tests,
    "decode": decode,
    "uneven": uneven,
    "beside": beside,
    "ttft": ttft,
    "parked": parked,
    "out_of_memory": out_of_memory,
    "served": served,
    "soak": soak,
}
