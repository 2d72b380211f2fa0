"""Settings of instances that already run, and of DNS names by which instances are found."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from torchmoor.config.body_heap import DEFAULT_INFLIGHT_BODY_BYTES
from torchmoor.config.group import Count, OptionalPort, Port, Positive, SettingsGroup, Texts, refusal
from torchmoor.wire.session_ids import is_instance_name

DNS_PORT = 53
_DNS_NAME = re.compile(
    r"(?=.{3,254}$)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.?"
)


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


class DiscoverySettings(PlacedSettings, title="Discovery"):
    """A DNS name that lists the instances of a variant, its query intervals, and the instances' settings."""

    dns_name: str = Field(description="Absolute name, with or without a final dot. Search domains are not tried.")
    record: Literal["SRV", "A", "AAAA"] = Field(
        "SRV", description="Type of record. A and AAAA records have only addresses and need `port`."
    )
    port: OptionalPort = Field(0, description="Inference port, if the record does not have it.")
    interval_s: Positive = Field(5.0, description="Longest time between queries; the answer's TTL may shorten it.")
    min_interval_s: Positive = Field(1.0, description="Shortest time between queries.")
    timeout_s: Positive = Field(2.0, description="Time-out of a query, over all servers and attempts.")
    max_instances: Count = Field(1024, description="Instances taken from an answer; further ones are ignored.")
    nameservers: Texts = Field(
        (), description="Name servers, such as 10.0.0.2, 10.0.0.2:5353, fd00::2 or [fd00::2]:5353; empty: the system's."
    )

    @field_validator("dns_name")
    @classmethod
    def _check_dns_name(cls, name: str) -> str:
        if not _DNS_NAME.fullmatch(name):
            raise ValueError(
                "must be a whole name in lower case, such as _inference._tcp.llava.default.svc.cluster.local, "
                f"not {name!r}"
            )
        return name

    @field_validator("nameservers")
    @classmethod
    def _check_nameservers(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        for server in servers:
            parse_nameserver(server)
        return servers

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.record == "SRV" and self.port:
            raise refusal("port", f"must be left out, an SRV record has it, not {self.port}")
        if self.record != "SRV" and not self.port:
            raise refusal("port", "must be from 1 to 65535, not 0")
        if self.interval_s < self.min_interval_s:
            raise refusal("interval_s", f"must be min_interval_s or more, not {self.interval_s}")
        return self


def parse_nameserver(text: str) -> tuple[str, int]:
    """Return a name server's address and port. Raises ValueError."""
    match = re.fullmatch(r"\[(?P<v6>[^\]]+)\](?::(?P<port6>\d{1,5}))?|(?P<v4>[\d.]+):(?P<port4>\d{1,5})", text)
    found = match.groupdict() if match else {}
    address = found.get("v6") or found.get("v4") or text
    port = int(found.get("port6") or found.get("port4") or DNS_PORT)
    try:
        ip_address(address)
    except ValueError as error:
        raise ValueError(f"must be addresses, not {text!r}") from error
    if not 1 <= port <= 65_535:
        raise ValueError(f"must be addresses: {text!r} has no valid port")
    return address, port
