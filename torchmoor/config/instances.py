"""Settings of the instances that run already, and of the DNS names that lead to instances."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from torchmoor.config.group import Count, OptionalPort, Port, Positive, SettingsGroup, Texts, refusal
from torchmoor.config.launcher import DEFAULT_INFLIGHT_BODY_BYTES

INSTANCE_NAME = re.compile(r"(?=.{1,63}$)[a-z0-9]+(?:-[a-z0-9]+)*", re.ASCII)
DNS_PORT = 53
_DNS_NAME = re.compile(
    r"(?=.{3,254}$)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.?"
)


def check_instance_name(name: str) -> str:
    """Return a name that session ids can carry. Raises ValueError."""
    if not INSTANCE_NAME.fullmatch(name):
        raise ValueError(f"must be of a-z, 0-9 and single hyphens, 63 at most, not {name!r}")
    return name


class PlacedSettings(SettingsGroup):
    """What is known of an instance before it is asked. An `Instance` has each of these as a fact of the same name."""

    endpoint: str = Field("", description="May be left out where there is one endpoint.")
    variant: str = Field("", description="May be left out where the endpoint has one variant.")
    management_port: OptionalPort = Field(
        0, description="0: the instance is probed by /ping only, which answers before its model is loaded."
    )
    metrics_port: OptionalPort = Field(0, description="0: the instance's metrics are not shown.")
    capacity: Count = Field(64, description="Requests that the instance is sent at a time.")
    takes_operations: bool = Field(
        True, description="false: the handler is another maker's, and gets no status probes and cancellations."
    )
    max_inflight_body_bytes: Count = Field(
        DEFAULT_INFLIGHT_BODY_BYTES,
        description="Heap that the bodies of the instance's requests may take at a time: three eighths of its -Xmx.",
    )

    def facts(self) -> dict[str, Any]:
        """Return the values that an `Instance` takes over."""
        facts = {name: getattr(self, name) for name in PlacedSettings.model_fields}
        ports = {name: facts[name] or None for name in ("management_port", "metrics_port")}
        return {**facts, **ports}


class InstanceSettings(PlacedSettings, title="Instances"):
    """A TorchServe that runs already."""

    name: str = Field(description="Letters a-z, digits and single hyphens, 63 at most. Session ids carry it.")
    port: Port = Field(description="TorchServe's inference port.")
    host: str = Field("127.0.0.1", description="The instance's address.")

    _check_name = field_validator("name")(check_instance_name)


class DiscoverySettings(PlacedSettings, title="Discovery"):
    """A DNS name whose answers are the instances of a variant, how often it is asked, and what DNS does not say."""

    dns_name: str = Field(description="The complete name, with or without a dot at its end. Search domains are unused.")
    record: Literal["SRV", "A", "AAAA"] = Field(
        "SRV", description="The record's type. A and AAAA records have addresses only, and need `port`."
    )
    port: OptionalPort = Field(0, description="The inference port, where the record does not have it.")
    interval_s: Positive = Field(5.0, description="Longest time between questions; the answer's TTL may shorten it.")
    min_interval_s: Positive = Field(1.0, description="Shortest time between questions.")
    timeout_s: Positive = Field(2.0, description="Timeout of a question, over all servers and attempts.")
    max_instances: Count = Field(1024, description="Instances taken from an answer; further ones are left out.")
    nameservers: Texts = Field((), description="10.0.0.2, 10.0.0.2:5353, fd00::2, [fd00::2]:5353; none: the system's.")

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
