"""Runs the baseline of many_models.py: one TorchServe instance with a worker process for each model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

from benchmarks.report import ROOT
from torchmoor.clients.local import make_opener
from torchmoor.fleet.ports import find_free_ports
from torchmoor.fleet.torchserve import PORTS_PER_INSTANCE, InstanceSpec, TorchServeSettings, environment, prepare

HANDLER = ROOT / "benchmarks" / "many_models_handler.py"
START_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class ProcessAModel:
    """A running instance. workers: process ids, in the order of the checkpoints."""

    port: int
    jvm: int
    workers: Sequence[int]

    def url(self, number: int) -> str:
        """Return the URL of a checkpoint's model."""
        return f"http://127.0.0.1:{self.port}/predictions/alone-{number}"


@contextmanager
def running_process_a_model(checkpoints: Sequence[Path], folder: Path) -> Iterator[ProcessAModel]:
    """Serve each checkpoint as a model of its own with one worker. folder: does not exist yet, and its path is short.

    A short path is necessary because the workers' sockets lie below it.
    """
    store = folder / "store"
    store.mkdir(parents=True)
    for number, checkpoint in enumerate(checkpoints):
        _build_archive(f"alone-{number}", checkpoint, store)
    spec = InstanceSpec(
        name="alone",
        endpoint="alone",
        archive="all",  # TorchServe loads every archive of the store
        folder=folder / "instance",
        ports=tuple(find_free_ports(PORTS_PER_INSTANCE)),
        environment={},
    )
    settings = TorchServeSettings(model_store=store)
    command = prepare(spec, settings)
    with (folder / "console.log").open("wb") as console:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            cwd=spec.folder / "work",
            env=environment(spec, settings),
            start_new_session=True,  # so that killpg also ends the JVM and the workers
        )
    try:
        management = f"http://127.0.0.1:{spec.ports[1]}/models"
        urls = [f"{management}/alone-{number}" for number in range(len(checkpoints))]
        workers = [_wait_for_worker(url, process) for url in urls]
        jvm = int(spec.pid_file.read_text())
        yield ProcessAModel(spec.ports[0], jvm, workers)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)


def _build_archive(name: str, checkpoint: Path, store: Path) -> None:
    config = store / f"{name}.yaml"
    config.write_text(f"minWorkers: 1\nmaxWorkers: 1\npath: {json.dumps(str(checkpoint))}\n")
    command = [
        *(str(Path(sys.executable).with_name("torch-model-archiver")), "--model-name", name, "--version", "1.0"),
        *("--handler", str(HANDLER), "--config-file", str(config), "--export-path", str(store)),
    ]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)


def _wait_for_worker(url: str, process: "subprocess.Popen[bytes]") -> int:
    """Wait until a model's worker is ready, and return its process id."""
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until and process.poll() is None:
        workers = _describe(url)
        if workers and workers[0]["status"] == "READY":
            return int(workers[0]["pid"])
        time.sleep(0.2)
    raise SystemExit(f"TorchServe did not start a worker for {url}")


def _describe(url: str) -> list[dict[str, Any]]:
    try:
        with make_opener(url).open(url, timeout=10) as answer:
            workers: list[dict[str, Any]] = json.load(answer)[0]["workers"]
            return workers
    except (URLError, ConnectionError):
        return []  # it does not listen yet, or has not registered the model yet
