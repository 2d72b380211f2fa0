"""Settings of instances that already run."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Any

from pydantic import Field, field_validator

from torchmoor.config.body_heap import DEFAULT_INFLIGHT_BODY_BYTES
from torchmoor.config.group import Count, OptionalPort, Port, SettingsGroup
from torchmoor.wire.session_ids import is_instance_name

_HOST_NAME = re.compile(r"(?=.{1,254}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?", re.ASCII | re.IGNORECASE)


def check_host(host: str) -> str:
    """Return a host to which connections can be opened. Raises ValueError."""
    if not _HOST_NAME.fullmatch(host):
        try:
            ip_address(host)
        except ValueError:
            raise ValueError(f"must be a host name or an address, without scheme and port, not {host!r}") from None
    return host


def check_instance_name(name: str) -> str:
    """Return a name that session ids can carry. Raises ValueError."""
    if not is_instance_name(name):
        raise ValueError(f"must be of a-z, 0-9 and single hyphens, 63 at most, not {name!r}")
    return name


class PlacedSettings(SettingsGroup):
    """The configured facts of an instance. An `Instance` has each of them as an attribute of the same name."""

    endpoint: str = Field("", description="The instance's endpoint; optional if there is only one.")
    variant: str = Field("", description="The instance's variant; optional if the endpoint has only one.")
    management_port: OptionalPort = Field(
        0,
        description="Port of TorchServe's management API. 0: the instance is probed by /ping only, which answers "
        "before its model is loaded.",
    )
    metrics_port: OptionalPort = Field(
        0, description="Port of TorchServe's metrics. 0: the instance's metrics are not shown."
    )
    capacity: Count = Field(64, description="Requests that the instance gets at a time.")
    takes_operations: bool = Field(
        True, description="false: the handler is not from this project and gets no status probes and cancellations."
    )
    max_inflight_body_bytes: Count = Field(
        DEFAULT_INFLIGHT_BODY_BYTES,
        description="Heap for the bodies of the instance's requests: three eighths of its -Xmx.",
    )

    def facts(self) -> dict[str, Any]:
        """Return the values that an `Instance` takes over."""
        facts = {name: getattr(self, name) for name in PlacedSettings.model_fields}
        ports = {name: facts[name] or None for name in ("management_port", "metrics_port")}
        return {**facts, **ports}


class InstanceSettings(PlacedSettings, title="Instances"):
    """A TorchServe that already runs."""

    name: str = Field(description="The name in session ids: at most 63 lower-case letters, digits and single hyphens.")
    port: Port = Field(description="TorchServe's inference port.")
    host: str = Field("127.0.0.1", description="The instance's address.")

    _check_name = field_validator("name")(check_instance_name)
    _check_host = field_validator("host")(check_host)
