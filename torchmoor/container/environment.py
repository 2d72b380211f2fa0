"""The container's environment variables, read and checked in one place. docs/container.md has the table.

There are three kinds of names: SageMaker's own and those of AWS's inference toolkit (SAGEMAKER_*), TorchServe's (TS_*),
and ours (TORCHMOOR_*). The handlers read TORCHMOOR_HANDLER_* themselves.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, get_args

from pydantic import Field, field_validator

from torchmoor.config.group import Count, Port, SettingsGroup, like
from torchmoor.config.instances import check_instance_name
from torchmoor.config.launcher import HeapMib, LaunchSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.observe import ObserveSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.errors import ConfigError, VariableInvalid
from torchmoor.fleet.model_sources import MULTI_MODEL, parse_flag
from torchmoor.fleet.torchserve_properties import read_config_file, read_properties

OVERRIDES = {"log_level": ("TORCHMOOR_LOG_LEVEL",)}  # further variables of a field; the last one wins
MAX_PORT = 65_535
MAX_SECONDS = 86_400
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]

_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class ContainerEnvironment(
    SettingsGroup, title="container", validate_by_name=True, validate_by_alias=True, arbitrary_types_allowed=True
):
    """The settings of a role. A field's alias is its variable; a field without an alias is read specially."""

    port: Port = like(ListenSettings, "port", alias="SAGEMAKER_BIND_TO_PORT", description="The proxy's port.")
    safe_ports: range | None = Field(
        None,
        alias="SAGEMAKER_SAFE_PORT_RANGE",
        description="`21000-21999`: the range of all other ports, 5 for each instance and one more. Unset: any ports.",
    )
    is_multi_model: bool = Field(False, alias=MULTI_MODEL, description="true: the platform loads models.")
    model_timeout_s: Seconds = like(
        TimeoutSettings,
        "model_timeout_s",
        alias="SAGEMAKER_MODEL_SERVER_TIMEOUT",
        description="Seconds to an answer's end, or to a stream's first byte.",
    )
    log_level: str = Field(
        "WARNING",
        alias="SAGEMAKER_CONTAINER_LOG_LEVEL",
        description="The proxy's log level, by name or by Python's number; TORCHMOOR_LOG_LEVEL "
        "overrides it, and sets the handlers' level too (INFO).",
    )
    model: str = Field("", alias="TORCHMOOR_MODEL", description="The archive to serve, if there are several.")
    model_dir: Path = Field(
        Path("/opt/ml/model"), alias="TORCHMOOR_MODEL_DIR", description="The directory of the model, as on SageMaker."
    )
    archives: Path = Field(
        Path("/opt/torchmoor/dist/archives"), alias="TORCHMOOR_ARCHIVES", description="The image's own archives."
    )
    num_instances: int | None = Field(
        None,
        gt=0,
        alias="TORCHMOOR_INSTANCES",
        description="Instances of `serve`, distributed over the GPUs in turn. Unset: one per GPU, or one.",
    )
    capacity: Count = like(LaunchSettings, "capacity", alias="TORCHMOOR_CAPACITY")
    start_timeout_s: Seconds = like(
        LaunchSettings,
        "start_timeout_s",
        default=1800.0,
        alias="TORCHMOOR_START_TIMEOUT_S",
        description="Seconds for a model to load.",
    )
    drain_s: Seconds = Field(
        20.0,
        alias="TORCHMOOR_DRAIN_S",
        description="Seconds after SIGTERM for running requests; SageMaker waits 30 s in all.",
    )
    settle_s: Annotated[float, Field(ge=0, le=MAX_SECONDS)] = Field(
        5.0,
        alias="TORCHMOOR_SETTLE_S",
        description="First part of these seconds, in which proxies learn that `instance` is terminating.",
    )
    heap_mib: HeapMib = like(LaunchSettings, "heap_mib", alias="TORCHMOOR_HEAP_MIB")
    access_log: str = like(ObserveSettings, "access_log", alias="TORCHMOOR_ACCESS_LOG")
    admin_port: Port = like(
        ListenSettings,
        "admin_port",
        alias="TORCHMOOR_ADMIN_PORT",
        description="Port of the admin plane of `serve`, on loopback; with a safe port range, a port of that range.",
    )
    instance_name: str = Field(
        "", alias="TORCHMOOR_INSTANCE_NAME", description="The name of `instance`. Unset: the host's name."
    )
    inference_port: Port = Field(
        8085, alias="TORCHMOOR_INFERENCE_PORT", description="The inference port of `instance`, on all addresses."
    )
    probe_port: Port = Field(
        8086, alias="TORCHMOOR_SIDE_PORT", description="The probe port of `instance`, on all addresses."
    )
    properties: dict[str, str] = Field({}, description="Lines of TorchServe's config.properties.")

    _check_name = field_validator("instance_name")(check_instance_name)


def read_environment(environ: Mapping[str, str]) -> ContainerEnvironment:
    """Read the container's variables. Raises VariableInvalid, which names the variable and says what is allowed."""
    try:
        return _read(environ)
    except ConfigError as error:
        raise VariableInvalid(str(error)) from error


def _read(environ: Mapping[str, str]) -> ContainerEnvironment:
    values: dict[str, object] = {
        "TORCHMOOR_INSTANCE_NAME": _name_of_host(),
        "properties": read_config_file(environ) | read_properties(environ),
    }
    for key, field in ContainerEnvironment.model_fields.items():
        for name in (field.alias, *OVERRIDES.get(key, ())):
            text = environ.get(name, "").strip() if name else ""
            if text:
                kind = next((each for each in get_args(field.annotation)), field.annotation)
                try:
                    values[field.alias or key] = _PARSERS[key](text) if key in _PARSERS else _convert(kind, text)
                except ValueError as error:
                    raise ConfigError(f"{name} must be {error}, not {text!r}") from None
    return ContainerEnvironment.read(values)


def _name_of_host() -> str:
    """Return the host's name as an instance's name. The name of a StatefulSet's pod stays as it is."""
    name = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:63].strip("-")
    return name or "instance"


def _convert(kind: object, text: str) -> object:
    """Return a value of a field's type. Raises ValueError, which continues "NAME must be"."""
    if kind is bool:
        return parse_flag(text)
    if kind is Path:
        return Path(text)
    if kind is str:
        return text
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ValueError("a number of seconds") from None
    if not text.isdecimal():  # int() accepts signs and underscores
        raise ValueError("a whole number")
    return int(text)


def _parse_ports(text: str) -> range:
    match = _RANGE.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MAX_PORT:
        raise ValueError("two ports such as 21000-21999")
    return range(int(match[1]), int(match[2]) + 1)


def _parse_log_level(text: str) -> str:
    """Return a level by its name, or by Python's number for it, which AWS's toolkit uses."""
    if text.isdecimal() and int(text) % 10 == 0 and 10 <= int(text) <= 50:
        return _LEVELS[int(text) // 10 - 1]
    if text.upper() not in _LEVELS:
        raise ValueError(f"one of {', '.join(_LEVELS)}, or 10 to 50")
    return text.upper()


_PARSERS: Mapping[str, Callable[[str], object]] = {"safe_ports": _parse_ports, "log_level": _parse_log_level}
