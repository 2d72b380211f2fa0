"""What the environment tells a container, read and checked in one place. docs/container.md has the table.

Names of three kinds: SageMaker's own and those of AWS's inference toolkit (SAGEMAKER_*), TorchServe's (TS_*), ours
(TORCHMOOR_*). The handlers read theirs, TORCHMOOR_HANDLER_*, by themselves.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchmoor.config.instances import INSTANCE_NAME
from torchmoor.errors import ConfigError
from torchmoor.fleet.launcher import DEFAULT_CAPACITY
from torchmoor.fleet.torchserve import DEFAULT_HEAP_MIB

MODEL_DIR = "/opt/ml/model"  # where SageMaker puts the model
ARCHIVES = "/opt/torchmoor/dist/archives"  # those that the image brings
TORCHSERVE_PREFIX = "TS_"
# What TorchServe's config.properties may be told; addresses, ports, models and tokens are the container's own business.
TORCHSERVE_KEYS: Mapping[str, type] = {
    "allowed_urls": str,
    "default_response_timeout": int,
    "default_startup_timeout": int,
    "default_workers_per_model": int,
    "install_py_dep_per_model": bool,
    "job_queue_size": int,
    "limit_max_image_pixels": bool,
    "max_request_size": int,
    "max_response_size": int,
    "netty_client_threads": int,
    "number_of_netty_threads": int,
    "prefer_direct_buffer": bool,
    "unregister_model_timeout": int,
}
# What is so in any case (torchmoor.fleet.torchserve). Images say it, too: AWS's deep learning containers for GPUs have
# TS_DISABLE_SYSTEM_METRICS, and whatever is built on one inherits it.
AS_IT_IS = {"disable_system_metrics": "true", "disable_token_authorization": "true", "metrics_mode": "prometheus"}
# The same by the names of AWS's toolkit.
TOOLKIT = {
    "SAGEMAKER_MODEL_SERVER_WORKERS": "default_workers_per_model",
    "SAGEMAKER_TS_RESPONSE_TIMEOUT": "default_response_timeout",
}
# A model of somebody else's is told by its own model-config how many rows it takes; these would have to rewrite it.
UNSERVED = {
    "SAGEMAKER_PROGRAM": "there is no inference.py here: make an archive of the handler with torch-model-archiver",
    "SAGEMAKER_TS_BATCH_SIZE": "set batchSize in the archive's model-config",
    "SAGEMAKER_TS_MAX_BATCH_DELAY": "set maxBatchDelay in the archive's model-config",
    "SAGEMAKER_TS_MIN_WORKERS": "set minWorkers in the archive's model-config",
    "SAGEMAKER_TS_MAX_WORKERS": "set maxWorkers in the archive's model-config",
}
MAX_PORT = 65_535

_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEnvironment:
    """Everything that a role is told."""

    port: int = 8080
    admin_port: int = 9080
    safe_ports: range | None = None  # from which all ports but the first are to be taken; None: any free one
    model_dir: Path = Path(MODEL_DIR)
    archives: Path = Path(ARCHIVES)
    model: str = ""  # an archive's name, where model_dir does not say it
    is_multi_model: bool = False
    num_instances: int | None = None  # None: one an accelerator, or one
    model_timeout_s: float = 60.0
    start_timeout_s: float = 1800.0
    settle_s: float = 5.0  # after SIGTERM, until those who send requests know of it
    drain_s: float = 20.0  # after SIGTERM, for running requests; SageMaker waits for 30 s in all
    capacity: int = DEFAULT_CAPACITY
    heap_mib: int = DEFAULT_HEAP_MIB
    properties: Mapping[str, str] = field(default_factory=dict)  # of TorchServe: lines of its config.properties
    log_level: str = "WARNING"
    access_log: str = ""
    instance_name: str = ""
    inference_port: int = 8085
    side_port: int = 8086


def read_environment(environ: Mapping[str, str]) -> ContainerEnvironment:
    """Raises ConfigError, which names the variable and says what it may be."""
    for name, advice in UNSERVED.items():
        if environ.get(name, "").strip():
            raise ConfigError(f"{name} is set, and has no effect here: {advice}, and leave {name} out")
    values: dict[str, object] = {}

    def take(key: str, name: str, parse: Callable[[str], object]) -> None:
        text = environ.get(name, "").strip()
        if text:
            try:
                values[key] = parse(text)
            except ValueError as error:
                raise ConfigError(f"{name} must be {error}, not {text!r}") from None

    take("port", "SAGEMAKER_BIND_TO_PORT", _port)
    take("safe_ports", "SAGEMAKER_SAFE_PORT_RANGE", _ports)
    take("is_multi_model", "SAGEMAKER_MULTI_MODEL", _flag)
    take("model_timeout_s", "SAGEMAKER_MODEL_SERVER_TIMEOUT", _seconds)
    take("log_level", "SAGEMAKER_CONTAINER_LOG_LEVEL", _log_level)
    take("log_level", "TORCHMOOR_LOG_LEVEL", _log_level)
    take("admin_port", "TORCHMOOR_ADMIN_PORT", _port)
    take("model_dir", "TORCHMOOR_MODEL_DIR", Path)
    take("archives", "TORCHMOOR_ARCHIVES", Path)
    take("model", "TORCHMOOR_MODEL", str)
    take("num_instances", "TORCHMOOR_INSTANCES", _count)
    take("start_timeout_s", "TORCHMOOR_START_TIMEOUT_S", _seconds)
    take("settle_s", "TORCHMOOR_SETTLE_S", _seconds_or_none)
    take("drain_s", "TORCHMOOR_DRAIN_S", _seconds)
    take("capacity", "TORCHMOOR_CAPACITY", _count)
    take("heap_mib", "TORCHMOOR_HEAP_MIB", _count)
    take("access_log", "TORCHMOOR_ACCESS_LOG", str)
    take("instance_name", "TORCHMOOR_INSTANCE_NAME", _instance_name)
    take("inference_port", "TORCHMOOR_INFERENCE_PORT", _port)
    take("side_port", "TORCHMOOR_SIDE_PORT", _port)
    values.setdefault("instance_name", _name_of_host())
    values["properties"] = _read_properties(environ)
    return ContainerEnvironment(**values)  # type: ignore[arg-type]


def _read_properties(environ: Mapping[str, str]) -> dict[str, str]:
    """Lines of TorchServe's config.properties; TS_* beat the toolkit's names for the same."""
    found: dict[str, str] = {}
    for name, key in TOOLKIT.items():
        text = environ.get(name, "").strip()
        if text:
            found[key] = _property(name, key, text)
    for name, value in environ.items():
        if name.startswith(TORCHSERVE_PREFIX):
            key = name.removeprefix(TORCHSERVE_PREFIX).lower()
            if AS_IT_IS.get(key) == value.strip().lower():
                continue
            if key not in TORCHSERVE_KEYS:
                known = ", ".join(f"{TORCHSERVE_PREFIX}{each.upper()}" for each in sorted(TORCHSERVE_KEYS))
                raise ConfigError(f"{name} cannot be set here: leave it out; what can be is {known}")
            found[key] = _property(name, key, value.strip())
    return found


def _property(name: str, key: str, text: str) -> str:
    if TORCHSERVE_KEYS[key] is int and (not text.isdecimal() or int(text) == 0):
        raise ConfigError(f"{name} must be a number above 0, not {text!r}")
    if TORCHSERVE_KEYS[key] is bool and text not in ("true", "false"):
        raise ConfigError(f"{name} must be true or false, not {text!r}")
    if not text or not text.isprintable():
        raise ConfigError(f"{name} must be one line of text, not {text!r}")
    return text


def _name_of_host() -> str:
    """The host's name as an instance's: a pod's is its own in a StatefulSet, and fits as it is."""
    name = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:63].strip("-")
    return name or "instance"


# What values may be: each raises ValueError with the end of "NAME must be ...".


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PORT:
        raise ValueError(f"a port from 1 to {MAX_PORT}")
    return int(text)


def _ports(text: str) -> range:
    match = _RANGE.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MAX_PORT:
        raise ValueError("two ports such as 21000-21999")
    return range(int(match[1]), int(match[2]) + 1)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("a number above 0")
    return int(text)


def _seconds(text: str) -> float:
    if (value := _seconds_or_none(text)) == 0:
        raise ValueError("a number of seconds above 0")
    return value


def _seconds_or_none(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86_400:
        raise ValueError("a number of seconds")
    return value


def _log_level(text: str) -> str:
    """By name, or by Python's number for it, as AWS's toolkit has it."""
    if text.isdecimal() and int(text) % 10 == 0 and 10 <= int(text) <= 50:
        return _LEVELS[int(text) // 10 - 1]
    if text.upper() not in _LEVELS:
        raise ValueError(f"one of {', '.join(_LEVELS)}, or 10 to 50")
    return text.upper()


def _instance_name(text: str) -> str:
    if len(text) > 63 or not INSTANCE_NAME.fullmatch(text):
        raise ValueError("of a-z, 0-9 and single hyphens, 63 at most")
    return text
