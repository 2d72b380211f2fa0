"""Settings of DNS names by which instances are found."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from torchmoor.config.group import Count, OptionalPort, Positive, Texts, refusal
from torchmoor.config.instances import PlacedSettings

DNS_PORT = 53
_DNS_NAME = re.compile(
    r"(?=.{3,254}$)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.?"
)


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
