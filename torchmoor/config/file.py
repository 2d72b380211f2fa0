"""The proxy's configuration file: YAML that becomes checked settings.

AWS's structures keep AWS's names; all other keys are the fields of the settings groups. docs/routing.md has an example.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from torchmoor.config.application_autoscaling import read_autoscaling
from torchmoor.config.async_inference import AsyncInferenceSettings
from torchmoor.config.discovery import DiscoverySettings
from torchmoor.config.endpoint_config import check_endpoint, read_endpoint
from torchmoor.config.group import read_list, read_mapping
from torchmoor.config.instances import InstanceSettings
from torchmoor.config.launcher import LaunchSettings
from torchmoor.config.routing import EndpointSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.config.settings import GROUPS, Configuration, ProxySettings
from torchmoor.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
_VALUES = {*GROUPS, "account_id"}
_KEYS = {"Endpoints", "Instances", "Discovery", "Autoscaling", "launcher", "sessions", *_VALUES}

T = TypeVar("T", InstanceSettings, DiscoverySettings)


def read_file(path: Path, *, session_keys: str, queue: str = "") -> Configuration:
    """Read and check a file. session_keys: the form of TORCHMOOR_SESSION_KEYS. queue: replaces async_inference.queue,
    because a file that others may read must not contain a password. Raises ConfigError.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_FILE_BYTES} bytes")
    content = load_yaml(text, path)
    try:
        return parse(content, session_keys=session_keys, queue=queue)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_yaml(text: bytes, path: Path) -> Any:
    """Return the content of a YAML file. Raises ConfigError, also for a repeated key."""
    try:
        return yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error


def parse(content: object, *, session_keys: str = "", queue: str = "") -> Configuration:
    """Check a file's content; see read_file. Raises ConfigError."""
    root = read_mapping(content, "the file", _KEYS)
    endpoints = _read_endpoints(root)
    sessions = read_mapping(root.get("sessions", {}), "sessions", {"are_journaled"})
    values = {key: root[key] for key in _VALUES & root.keys()}
    if queue:
        given = AsyncInferenceSettings.read(root.get("async_inference", {}), "async_inference")
        values["async_inference"] = given.replace(queue=queue)
    proxy = ProxySettings.read(
        {
            **values,
            "endpoints": endpoints,
            "sessions": SessionIdSettings.read(
                {**sessions, "keys": SessionIdSettings.parse(session_keys).keys}, "sessions"
            ),
        }
    )
    instances: tuple[InstanceSettings, ...] = ()
    if "Instances" in root or not ("Autoscaling" in root or "Discovery" in root):
        instances = _read_placed(InstanceSettings, root.get("Instances"), "Instances", "name", endpoints)
    discovery: tuple[DiscoverySettings, ...] = ()
    if "Discovery" in root:
        discovery = _read_placed(DiscoverySettings, root["Discovery"], "Discovery", "dns_name", endpoints)
    launch = LaunchSettings.read(root.get("launcher", {}), "launcher")
    return Configuration(proxy=proxy, instances=instances, discovery=discovery, launch=launch)


def _read_endpoints(root: Mapping[str, Any]) -> tuple[EndpointSettings, ...]:
    """Return the endpoints of the group Endpoints, with their variants' settings from the group Autoscaling."""
    entries = read_list(root.get("Endpoints"), "Endpoints")
    checked = [check_endpoint(entry, f"Endpoints[{number}]") for number, entry in enumerate(entries)]
    counts: dict[tuple[str, str], int | None] = {
        (name, variant["VariantName"]): variant.get("InitialInstanceCount")
        for name, config in checked
        for variant in config["ProductionVariants"]
    }
    scaling = read_autoscaling(root["Autoscaling"], counts) if root.get("Autoscaling") is not None else {}
    for (name, variant_name), count in counts.items():
        if count is not None and (name, variant_name) not in scaling:
            logger.warning(
                "without effect here, as there is no Autoscaling key=InitialInstanceCount endpoint=%s variant=%s",
                name,
                variant_name,
            )
    return tuple(
        read_endpoint(entries[number], name, f"Endpoints[{number}]", scaling)
        for number, (name, _) in enumerate(checked)
    )


def _read_placed(
    kind: type[T], content: object, group: str, key: str, endpoints: Sequence[EndpointSettings]
) -> tuple[T, ...]:
    """Read a list of instances or DNS names. key: the field by which each entry is unique. Raises ConfigError."""
    found: dict[str, T] = {}
    for number, entry in enumerate(read_list(content, group)):
        where = f"{group}[{number}]"
        settings = kind.read(_with_variant(entry, where, set(kind.model_fields), endpoints), where)
        name = getattr(settings, key)
        if name.rstrip(".") in found:
            raise ConfigError(f"{where}.{key} {name!r} is given twice")
        found[name.rstrip(".")] = settings
    return tuple(found.values())


def _with_variant(
    entry: object, where: str, known: set[str], endpoints: Sequence[EndpointSettings]
) -> Mapping[str, Any]:
    """Return an entry with its `endpoint` and `variant`, which are optional if there is only one."""
    values = dict(read_mapping(entry, where, known))
    by_name = {endpoint.name: {variant.name: variant for variant in endpoint.variants} for endpoint in endpoints}
    if len(by_name) == 1:
        values.setdefault("endpoint", endpoints[0].name)
    name = values.get("endpoint")
    if not isinstance(name, str) or name not in by_name:
        raise ConfigError(f"{where}.endpoint must be one of {', '.join(by_name)}, not {name!r}")
    variants = by_name[name]
    if len(variants) == 1:
        values.setdefault("variant", next(iter(variants)))
    variant = values.get("variant")
    if not isinstance(variant, str) or variant not in variants:
        raise ConfigError(f"{where}.variant must be one of {', '.join(variants)}, not {variant!r}")
    if variants[variant].scaling is not None:
        raise ConfigError(f"{where}: variant {variant} of {name} has Autoscaling, which starts its instances")
    return values


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a repeated key, where YAML uses the last one, and names the place of a wrong value."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:  # of PyYAML's numbers and dates
            problem = f"{node.value!r} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)
