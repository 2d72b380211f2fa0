"""Measures the processor time of the front proxy per request and token, compared with nginx and other proxies.

Each proxy runs on its own core with one thread or process; load and backends run on the other core. Figures are the
proxy's user and system time. The arms take turns; a result is the median of the rounds.

    requests    us per 1 KB JSON POST with a session header, over kept connections, to 4 backends. boto3_us: the same
                with the header lines that boto3 sends; load_us: without a session, so that load decides. Measured in
                a closed loop on 16 connections, and at the same rate for all arms (same_rate_...) on 32 connections
                that wait 8 ms between two requests: in a closed loop, a slow proxy also pays for waking the idle
                core of the load. general path: torchmoor without its fast path
    streams     us per token of 200 streams of 50 tokens, 20 ms apart; framed: as InvokeEndpointWithResponseStream
    first byte  ms to the first byte of a single stream, minus the same without a proxy
    upload      growth of the process in MB during a body of 100 MB, and MB/s; nginx without request buffering

nginx, HAProxy, Envoy and aiohttp get the same requests. sglang-router and vllm-router get chat completions, since they
have no sessions. Envoy and the routers are run if TORCHMOOR_BENCH_PEERS names the folder of their programs. Prototypes
took 24.9 us per request for nginx, 33.9 for a callback proxy in Python, 73 for Envoy, and 162 for aiohttp.

TORCHMOOR_BENCH_PYTHON may name another Python with the proxy's packages, which runs torchmoor in one more arm of
requests and streams, other-python. If dist/ has a compiled wheel of this source (make wheel COMPILED=1), both Pythons
also run that: compiled, other-python-compiled.

    make bench NAME=proxy [QUICK=1]
    python -m benchmarks.proxy [--quick] [--rounds 5] [--save]
"""

import asyncio
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fleet import unwound_by_signals
from benchmarks.proxy_arms import (
    LOAD_CORE,
    NGINX_BACKEND,
    PROXY_CORE,
    PYTHON,
    Aiohttp,
    Arm,
    CompiledWheel,
    Envoy,
    GeneralPath,
    HAProxy,
    Nginx,
    OtherPython,
    OtherPythonCompiled,
    Process,
    Router,
    Torchmoor,
    nginx_command,
    require,
    running,
)
from benchmarks.proxy_load import (
    BOTO_HEADERS,
    StreamRequest,
    first_bytes,
    open_streams,
    stream_all,
    upload,
    write_script,
    wrk,
)
from benchmarks.proxy_server import ENDPOINT, KEY, KEY_ID
from benchmarks.report import ROOT, describe_python, parse_options, print_report
from torchmoor.fleet.ports import find_free_ports
from torchmoor.wire.session_ids import compose

NUM_BACKENDS = 4
NUM_SESSIONS = 64
CONNECTIONS = 16
SAME_RATE = "same_rate_"
SAME_RATE_CONNECTIONS, SAME_RATE_PAUSE_MS = 32, 8
MEGABYTE = 1_000_000
NGINX = "nginx"

Figures = dict[str, dict[str, list[float]]]  # by arm, then by column: one value per round


def make_sessions(principal: str = "") -> list[str]:
    """Return signed session ids of a principal, spread over the backends."""
    sessions = []
    for number in range(NUM_SESSIONS):
        instance = f"{ENDPOINT}-{number % NUM_BACKENDS}"
        nonce, expiry = f"abcdefghijklmn{number // 8 + 2}{number % 8 + 2}", "7fffffff"
        sessions.append(
            compose(
                KEY,
                endpoint=ENDPOINT,
                principal=principal,
                nonce=nonce,
                expiry=expiry,
                instance=instance,
                key_id=KEY_ID,
            )
        )
    return sessions


def make_body() -> bytes:
    """Return 1,024 bytes of JSON that every arm accepts as a request."""
    question: dict[str, Any] = {"model": ENDPOINT, "messages": [{"role": "user", "content": ""}]}
    question["messages"][0]["content"] = "x" * (1024 - len(json.dumps(question)))
    return json.dumps(question).encode()


class Stage:
    """Starts backends and proxies, and stops them at the end of the context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> "Stage":
        self._stack.enter_context(unwound_by_signals())
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def start_nginx_backend(self) -> list[int]:
        """Start an nginx that answers at once, and return its ports."""
        ports = find_free_ports(NUM_BACKENDS)
        listens = " ".join(f"listen 127.0.0.1:{port} backlog=1024;" for port in ports)
        folder = self._folder("backend")
        command = nginx_command(folder, NGINX_BACKEND.format(folder=folder, listens=listens))
        self._stack.enter_context(running(command, ports[0], LOAD_CORE))
        return ports

    def start_stream_backend(self) -> list[int]:
        """Start a backend for streams and uploads, and return its ports."""
        ports = find_free_ports(NUM_BACKENDS)
        command = [sys.executable, str(ROOT / "benchmarks" / "proxy_backend.py"), ",".join(map(str, ports))]
        self._stack.enter_context(running(command, ports[0], LOAD_CORE))
        return ports

    def start(self, arm: Arm, upstreams: Sequence[int]) -> Process:
        """Start a proxy on its core."""
        [port] = find_free_ports(1)
        command = arm.command(port, upstreams, self._folder(f"{arm.name}-{port}"))
        return self._stack.enter_context(running(command, port, PROXY_CORE))


def measure_requests(stage: Stage, arms: Sequence[Arm], *, rounds: int, seconds: int) -> Figures:
    """Measure the us per request."""
    figures: Figures = defaultdict(lambda: defaultdict(list))
    upstreams = stage.start_nginx_backend()
    body, sessions = make_body(), make_sessions()
    kinds: dict[str, tuple[list[str], dict[str, str]]] = {
        "request_us": (sessions, {}),
        "boto3_us": (sessions, BOTO_HEADERS),
        "load_us": ([""], {}),
    }
    processes = {arm.name: stage.start(arm, upstreams) for arm in arms}
    script = stage.folder / "load.lua"
    for number in range(rounds + 1):
        for column, (ids, headers) in [*kinds.items()][: None if number else 1]:  # the first round warms up
            for prefix, connections, pause_ms in (
                ("", CONNECTIONS, 0),
                (SAME_RATE, SAME_RATE_CONNECTIONS, SAME_RATE_PAUSE_MS),
            ):
                for arm in arms:
                    write_script(script, target=arm.path, body=body, sessions=ids, headers=headers, pause_ms=pause_ms)
                    process = processes[arm.name]
                    before = process.cpu_s()
                    length_s = seconds if number else 1
                    answered = wrk(arm.name, process.port, script, connections=connections, seconds=length_s)
                    if number:
                        spent = process.cpu_s() - before
                        figures[arm.name][prefix + column].append(spent / answered * 1e6)
                        if column == "request_us":
                            figures[arm.name][prefix + "per_s"].append(answered / seconds)
        _say(f"requests: round {number} of {rounds}")
    return figures


async def measure_streams(stage: Stage, *, rounds: int, num_streams: int, num_tokens: int, num_alone: int) -> Figures:
    """Measure the us per token, and the ms to the first byte."""
    figures: Figures = defaultdict(lambda: defaultdict(list))
    upstreams = stage.start_stream_backend()
    sessions = make_sessions()
    nginx = Nginx(buffering="off")
    started = [arm for arm in (nginx, Torchmoor(), *further_arms()) if arm.is_installed()]
    processes = {arm.name: stage.start(arm, upstreams) for arm in started}
    arms = [(arm.name, processes[arm.name], arm.path) for arm in started]
    arms.append(("framed", processes["torchmoor"], f"{Torchmoor.path}-response-stream"))
    for number in range(rounds + 1):
        for name, process, path in arms:
            clients = await open_streams(process.port, num_streams)
            requests = [StreamRequest(path, num_tokens, session) for session in sessions]
            before = process.cpu_s()
            await stream_all(clients, requests)
            if number:
                figures[name]["token_us"].append((process.cpu_s() - before) / (num_streams * num_tokens) * 1e6)
            for client in clients:
                client.transport.close()
            await asyncio.sleep(0.1)
        alone = [StreamRequest(nginx.path, 1, session) for session in sessions]
        alone = (alone * (num_alone // len(alone) + 1))[:num_alone]
        direct = sorted(await _first_bytes(upstreams[0], alone))
        for name in (NGINX, "torchmoor"):
            found = sorted(await _first_bytes(processes[name].port, alone))
            if number:
                figures[name]["first_byte_ms"].append((median(found) - median(direct)) * 1000)
        _say(f"streams: round {number} of {rounds}")
    return figures


async def _first_bytes(port: int, requests: list[StreamRequest]) -> list[float]:
    [client] = await open_streams(port, 1)
    found = await first_bytes(client, requests)
    client.transport.close()
    return found


def measure_uploads(stage: Stage, *, rounds: int, num_bytes: int) -> Figures:
    """Measure the growth of a process in MB, and MB/s."""
    figures: Figures = defaultdict(lambda: defaultdict(list))
    upstreams = stage.start_stream_backend()
    path = f"/predictions/{ENDPOINT}"
    arms = [Nginx(request_buffering="off"), Torchmoor()]
    processes = {arm.name: stage.start(arm, upstreams) for arm in arms}
    for number in range(rounds + 1):
        for name, process in processes.items():
            before = process.rss_bytes()
            process.forget_peak()
            seconds = upload(process.port, path, num_bytes)
            if number:
                figures[name]["upload_rss_mb"].append((process.peak_rss_bytes() - before) / MEGABYTE)
                figures[name]["upload_mbs"].append(num_bytes / MEGABYTE / seconds)
    _say("uploads: done")
    return figures


def find_arms() -> list[Arm]:
    """Return nginx and torchmoor, and the other arms that are installed."""
    peers: list[Arm] = [HAProxy(), Envoy(), Router("sglang-router"), Router("vllm-router"), Aiohttp()]
    missing = [arm.name for arm in peers if not arm.is_installed()]
    if missing:
        _say(f"not installed, so not measured: {', '.join(missing)}")
    if not OtherPython().is_installed():
        _say(f"no other Python is measured: {PYTHON} is not set")
    if not CompiledWheel().is_installed():
        _say("dist/ has no compiled wheel of this source, so none is measured: make wheel COMPILED=1")
    return [arm for arm in (Nginx(), Torchmoor(), *further_arms(), GeneralPath(), *peers) if arm.is_installed()]


def further_arms() -> list[Torchmoor]:
    """Return torchmoor with another Python, and compiled."""
    return [CompiledWheel(), OtherPython(), OtherPythonCompiled()]


def run(*, quick: bool, rounds: int) -> Figures:
    """Run all scenarios and return their figures."""
    figures: Figures = defaultdict(lambda: defaultdict(list))
    os.sched_setaffinity(0, {LOAD_CORE})
    with tempfile.TemporaryDirectory(prefix="torchmoor-bench-") as folder:
        scenarios = (
            lambda stage: measure_requests(stage, find_arms(), rounds=rounds, seconds=1 if quick else 2),
            lambda stage: asyncio.run(
                measure_streams(
                    stage,
                    rounds=rounds,
                    num_streams=100 if quick else 200,
                    num_tokens=20 if quick else 50,
                    num_alone=50 if quick else 400,
                )
            ),
            lambda stage: measure_uploads(stage, rounds=rounds, num_bytes=(20 if quick else 100) * MEGABYTE),
        )
        for scenario in scenarios:
            with Stage(Path(folder)) as stage:
                for arm, columns in scenario(stage).items():
                    figures[arm].update(columns)
    return figures


REQUEST_COLUMNS = ("request_us", "boto3_us", "load_us", "per_s")
COLUMNS = (
    *REQUEST_COLUMNS,
    *(SAME_RATE + column for column in REQUEST_COLUMNS),
    *("token_us", "first_byte_ms", "upload_rss_mb", "upload_mbs"),
)

RATIOS_TO_NGINX = {
    "cpu_vs_nginx": "request_us",
    "cpu_vs_nginx_boto3": "boto3_us",
    "cpu_vs_nginx_by_load": "load_us",
    "same_rate_cpu_vs_nginx": "same_rate_request_us",
    "same_rate_cpu_vs_nginx_boto3": "same_rate_boto3_us",
    "same_rate_cpu_vs_nginx_by_load": "same_rate_load_us",
    "token_cpu_vs_nginx": "token_us",
}


def main() -> None:
    options = parse_options(__doc__, quick="short rounds, fewer streams, 20 MB", rounds=5)
    require(NGINX, "wrk")
    figures = run(quick=options.quick, rounds=options.rounds)

    def found(arm: str, column: str) -> float | None:
        values = figures.get(arm, {}).get(column)
        return median(values) if values else None

    def ratio(column: str, arm: str, other: str) -> float | None:
        """Return the median over the rounds of the ratio within a round."""
        ours, theirs = (figures.get(name, {}).get(column) for name in (arm, other))
        return median([a / b for a, b in zip(ours, theirs, strict=True)]) if ours and theirs else None

    rows = []
    for arm, columns in figures.items():
        row: dict[str, Any] = {"arm": arm, **{column: found(arm, column) for column in COLUMNS}}
        spent = columns.get("request_us")
        row |= {"least_us": min(spent) if spent else None, "most_us": max(spent) if spent else None}
        rows.append(row)
    other = OtherPython()
    ratios = {name: ratio(column, "torchmoor", NGINX) for name, column in RATIOS_TO_NGINX.items()}
    for further in further_arms():
        prefix = further.name.replace("-", "_")
        ratios |= {f"{prefix}_{name}": ratio(column, further.name, NGINX) for name, column in RATIOS_TO_NGINX.items()}
    ratios |= {
        "cpu_vs_general_path": ratio("request_us", "torchmoor", GeneralPath.name),
        "same_rate_cpu_vs_general_path": ratio("same_rate_request_us", "torchmoor", GeneralPath.name),
        "cpu_vs_haproxy": ratio("request_us", "torchmoor", "haproxy"),
        "cpu_vs_envoy": ratio("request_us", "torchmoor", "envoy"),
        "cpu_vs_aiohttp": ratio("request_us", "torchmoor", "aiohttp"),
        "cpu_vs_vllm_router": ratio("request_us", "torchmoor", "vllm-router"),
        "cpu_vs_sglang_router": ratio("request_us", "torchmoor", "sglang-router"),
        "framed_token_cpu_vs_plain": ratio("token_us", "framed", "torchmoor"),
        "ttfb_vs_nginx": ratio("first_byte_ms", "torchmoor", NGINX),
        "upload_rss_mb": found("torchmoor", "upload_rss_mb"),
        "upload_mbs_vs_nginx": ratio("upload_mbs", "torchmoor", NGINX),
    }
    print_report(
        "proxy",
        rows,
        ratios,
        options,
        connections=CONNECTIONS,
        backends=NUM_BACKENDS,
        other_python=describe_python(other.python) if other.is_installed() else None,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
