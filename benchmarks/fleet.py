"""Starts `torchmoor up` for a benchmark, and measures the processor time and memory of its processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request

import psutil
from botocore.config import Config

from benchmarks.report import ROOT
from torchmoor.clients.local import make_opener
from torchmoor.clients.runtime import make_client
from torchmoor.config.launcher import INSTANCE_LOG
from torchmoor.proxy.http.call import Outcome

SHOWN = ("name", "state", "outstanding", "breaker", "failures_in_a_row", "last_end")  # of an instance
NUM_DECISIONS, NUM_LOG_LINES = 5, 15
CLIENT_GONE = Outcome.CLIENT_GONE.value  # of requests that still ran when the benchmark failed


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Processor time, user and system, since the processes began; for the workers also by thread."""

    proxy_s: float
    torchserve_s: float
    worker_s: float
    threads_s: dict[int, float]

    def since(self, before: "CpuTimes") -> "Spent":
        by_thread = [used - before.threads_s.get(thread, 0.0) for thread, used in self.threads_s.items()]
        engine_s = max(by_thread)
        worker_s = self.worker_s - before.worker_s
        return Spent(
            self.proxy_s - before.proxy_s, self.torchserve_s - before.torchserve_s, worker_s - engine_s, engine_s
        )


@dataclass(frozen=True, slots=True)
class Spent:
    """Processor time between two moments, with one worker.

    engine_s: of the worker's busiest thread, which runs the model; worker_s: of the rest of the worker.
    """

    proxy_s: float
    torchserve_s: float
    worker_s: float
    engine_s: float

    @property
    def total_s(self) -> float:
        return self.proxy_s + self.torchserve_s + self.worker_s + self.engine_s


class Fleet:
    """A running `torchmoor up`."""

    def __init__(self, process: subprocess.Popen[str], runtime: str, admin: str, run_dir: str = "") -> None:
        self.runtime = runtime
        self.admin = admin
        self._process = process
        self._run_dir = Path(run_dir)

    @property
    def pid(self) -> int:
        """The process id of the proxy."""
        return self._process.pid

    def instances(self) -> list[dict[str, Any]]:
        """Return the admin plane's description of each instance."""
        found: list[dict[str, Any]] = _get_json(f"{self.admin}/instances", {})["instances"]
        return found

    def processes(self, instance: str) -> tuple[int, int]:
        """Return the process ids of an instance's JVM and of its Python worker."""
        jvm = psutil.Process(int((self._run_dir / instance / "tmp" / ".model_server.pid").read_text()))
        (worker,) = jvm.children()
        return jvm.pid, worker.pid

    def has_instance_processes(self) -> bool:
        """Return whether a TorchServe process exists, even if it is starting or stopping."""
        return any(map(_is_java, psutil.Process(self.pid).children(recursive=True)))

    def status(self, instance: Mapping[str, Any]) -> dict[str, Any]:
        """Return a worker's status, which is requested from its TorchServe directly."""
        url = f"http://{instance['host']}:{instance['port']}/predictions/{instance['model']}"
        return _get_json(url, {"X-Torchmoor-Operation": "status"})

    def explain(self) -> Iterator[str]:
        """Yield lines that may explain a failure: states of instances, failed requests, and the ends of the logs."""
        try:
            for instance in self.instances():
                yield "instance " + ", ".join(f"{key} {instance[key]}" for key in SHOWN)
            decisions = _get_json(f"{self.admin}/decisions?error=any&limit=1000", {})["decisions"]
            failed = [each for each in decisions if each["outcome"] != CLIENT_GONE]
            for decision in failed[:NUM_DECISIONS]:
                yield "request " + ", ".join(f"{key} {value}" for key, value in decision.items() if value)
        except OSError as error:
            yield f"the admin plane does not answer: {error}"
        for path in sorted(self._run_dir.glob(f"*/{INSTANCE_LOG}")):
            with suppress(OSError):
                yield from (f"{path}:", *path.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:])

    def cpu_times(self) -> CpuTimes:
        """Return the times of all processes. Children of a worker, such as the process for templates, count as its."""
        proxy = torchserve = worker = 0.0
        threads: dict[int, float] = {}
        own = psutil.Process(self.pid)
        java: set[int] = set()
        workers: set[int] = set()
        for process in (own, *own.children(recursive=True)):  # parents come first
            with suppress(psutil.NoSuchProcess):  # it has ended
                used, parent = sum(process.cpu_times()[:2]), process.ppid()
                if _is_java(process):
                    torchserve += used
                    java.add(process.pid)
                elif parent in java or parent in workers:
                    worker += used
                    workers.add(process.pid)
                    if parent in java:
                        threads |= {each.id: each.user_time + each.system_time for each in process.threads()}
                else:
                    proxy += used
        return CpuTimes(proxy, torchserve, worker, threads)


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """End the block on SIGTERM and SIGHUP as on Ctrl-C, so that it stops the processes that it has started."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    own = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for each in own:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in own:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def running_fleet(
    checkpoint: Path, *, num_instances: int = 1, arguments: Sequence[str] = (), **settings: str
) -> Iterator[Fleet]:
    """Run `torchmoor up` with instances of `checkpoint`, on free ports.

    arguments: further arguments of `torchmoor up`. settings: variables of the handler's environment without their
    prefix, such as MODEL_DTYPE="float32".
    """
    environment = {f"TORCHMOOR_HANDLER_{name}": value for name, value in settings.items()}
    command = [
        *(sys.executable, "-m", "torchmoor", "up", "--port", "0", "--admin-port", "0"),
        *("--instances", str(num_instances), "--model-store", str(ROOT / "model_store")),
        *(() if "--endpoint" in arguments else ("--endpoint", "llava")),
        *arguments,
    ]
    with unwound_by_signals():
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, "TORCHMOOR_HANDLER_MODEL_PATH": str(checkpoint)},
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the instances did not start; their output is above")
            ready = json.loads(line)
            fleet = Fleet(process, ready["runtime"], ready["admin"], ready["run_dir"])
            try:
                yield fleet
            except (Exception, SystemExit):
                print("The fleet when the benchmark failed:", *fleet.explain(), sep="\n", file=sys.stderr)
                raise
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            finally:
                process.kill()


def cpu_of(pids: Iterable[int]) -> float:
    """Return the processor time of these processes since they began, in seconds."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    found: int = psutil.Process(pid).memory_info().rss
    return found


def peak_rss_bytes(pid: int) -> int:
    """Return the largest resident memory of a process so far, which psutil does not know."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def make_runtime_client(url: str) -> Any:
    """Return boto3's client of the runtime API, for many concurrent and long answers. It searches no credentials."""
    keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
    return make_client(endpoint_url=url, keys=keys, config=Config(read_timeout=600, max_pool_connections=64))


def _get_json(url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    with make_opener(url).open(Request(url, headers=dict(headers)), timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _is_java(process: psutil.Process) -> bool:
    """Return whether a process is a TorchServe; False if it has ended."""
    try:
        return bool(process.name() == "java")
    except psutil.NoSuchProcess:
        return False
