"""The groups Instances and Discovery of the configuration file: which instances run, or where to ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from torchmoor.config.discovery import DiscoverySettings
from torchmoor.config.groups import read_group, read_list, read_mapping
from torchmoor.config.settings import EndpointSettings
from torchmoor.errors import ConfigError
from torchmoor.proxy.instances.instance import INSTANCE_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSettings:
    """One entry of Instances: a TorchServe that runs already."""

    name: str
    port: int
    host: str = "127.0.0.1"
    endpoint: str = ""  # may be left out where there is one
    variant: str = ""  # may be left out where the endpoint has one
    management_port: int = 0  # 0: the instance is probed by /ping only, which says yes before its model is loaded
    metrics_port: int = 0  # 0: its metrics are not shown
    capacity: int = 64

    def __post_init__(self) -> None:
        if len(self.name) > 63 or not INSTANCE_NAME.fullmatch(self.name):
            raise ConfigError(f"Instances: name {self.name!r} must be of a-z, 0-9 and single hyphens, 63 at most")
        for key, least in (("port", 1), ("management_port", 0), ("metrics_port", 0)):
            if not least <= getattr(self, key) <= 65_535:
                raise ConfigError(f"Instances: {key} of {self.name} must be a port, not {getattr(self, key)}")
        if self.capacity < 1:
            raise ConfigError(f"Instances: capacity of {self.name} must be positive, not {self.capacity}")


T = TypeVar("T", InstanceSettings, DiscoverySettings)


def read_instances(content: object, endpoints: Sequence[EndpointSettings]) -> tuple[InstanceSettings, ...]:
    """The group Instances. Raises ConfigError."""
    found: dict[str, InstanceSettings] = {}
    for number, entry in enumerate(read_list(content, "Instances")):
        instance = _read_placed(InstanceSettings, entry, f"Instances[{number}]", endpoints)
        if instance.name in found:
            raise ConfigError(f"Instances[{number}].name {instance.name!r} is given twice")
        found[instance.name] = instance
    return tuple(found.values())


def read_discovery(content: object, endpoints: Sequence[EndpointSettings]) -> tuple[DiscoverySettings, ...]:
    """The group Discovery. Raises ConfigError."""
    found: dict[str, DiscoverySettings] = {}
    for number, entry in enumerate(read_list(content, "Discovery")):
        settings = _read_placed(DiscoverySettings, entry, f"Discovery[{number}]", endpoints)
        if settings.dns_name.rstrip(".") in found:
            raise ConfigError(f"Discovery[{number}].dns_name {settings.dns_name!r} is given twice")
        found[settings.dns_name.rstrip(".")] = settings
    return tuple(found.values())


def _read_placed(kind: type[T], entry: object, where: str, endpoints: Sequence[EndpointSettings]) -> T:
    """A group with `endpoint` and `variant`, which may be left out where there is one."""
    values = dict(read_mapping(entry, where, {item.name for item in fields(kind)}))
    if len(endpoints) == 1:
        values.setdefault("endpoint", endpoints[0].name)
    variants = {endpoint.name: [variant.name for variant in endpoint.variants] for endpoint in endpoints}
    scaled = {(e.name, variant.name) for e in endpoints for variant in e.variants if variant.scaling is not None}
    name = values.get("endpoint")
    if not isinstance(name, str) or name not in variants:
        raise ConfigError(f"{where}.endpoint must be one of {', '.join(variants)}, not {name!r}")
    if len(variants[name]) == 1:
        values.setdefault("variant", variants[name][0])
    if values.get("variant") not in variants[name]:
        known = ", ".join(variants[name])
        raise ConfigError(f"{where}.variant must be one of {known}, not {values.get('variant')!r}")
    if (name, values["variant"]) in scaled:
        raise ConfigError(f"{where}: variant {values['variant']} of {name} has Autoscaling, which starts its instances")
    return read_group(kind, values, where)
