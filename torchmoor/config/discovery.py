"""One entry of the configuration file's group Discovery: a DNS name whose answers say which instances there are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from torchmoor.errors import ConfigError

RECORDS = ("SRV", "A", "AAAA")
DNS_PORT = 53
_DNS_NAME = re.compile(
    r"(?=.{3,254}$)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """Whom to ask for what, how often, and what the instances have in common that DNS does not say."""

    dns_name: str  # the whole of it, with or without a dot at its end: no search domain is tried
    endpoint: str = ""  # may be left out where there is one
    variant: str = ""  # may be left out where the endpoint has one
    record: str = "SRV"  # A or AAAA: the answers are addresses; then `port` is needed
    port: int = 0  # the inference port, where the record does not have it
    management_port: int = 0  # as of an entry of Instances, all three
    metrics_port: int = 0
    capacity: int = 64
    interval_s: float = 5.0  # between questions, at most; the answer's TTL may make it less
    min_interval_s: float = 1.0  # and at least
    timeout_s: float = 2.0  # of a question, over all servers and tries
    max_instances: int = 1024  # what an answer names beyond them is left out
    nameservers: tuple[str, ...] = ()  # 10.0.0.2, 10.0.0.2:5353, fd00::2, [fd00::2]:5353; none: those of the system

    def __post_init__(self) -> None:
        where = f"Discovery: {self.dns_name}"
        if not _DNS_NAME.fullmatch(self.dns_name):
            raise ConfigError(
                f"Discovery: dns_name {self.dns_name!r} must be a whole name in lower case, such as "
                "_inference._tcp.llava.default.svc.cluster.local"
            )
        if self.record not in RECORDS:
            raise ConfigError(f"{where}: record must be one of {', '.join(RECORDS)}, not {self.record!r}")
        if self.record == "SRV" and self.port:
            raise ConfigError(f"{where}: port must be left out, an SRV record has it")
        for key, least in (("port", int(self.record != "SRV")), ("management_port", 0), ("metrics_port", 0)):
            if not least <= getattr(self, key) <= 65_535:
                raise ConfigError(f"{where}: {key} must be a port, not {getattr(self, key)}")
        for key in ("capacity", "interval_s", "min_interval_s", "timeout_s", "max_instances"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"{where}: {key} must be positive, not {getattr(self, key)}")
        if self.interval_s < self.min_interval_s:
            raise ConfigError(f"{where}: interval_s must be min_interval_s or more, not {self.interval_s}")
        for server in self.nameservers:
            parse_nameserver(server)


def parse_nameserver(text: str) -> tuple[str, int]:
    """An address and its port. Raises ConfigError."""
    match = re.fullmatch(r"\[(?P<v6>[^\]]+)\](?::(?P<port6>\d{1,5}))?|(?P<v4>[\d.]+):(?P<port4>\d{1,5})", text)
    found = match.groupdict() if match else {}
    address = found.get("v6") or found.get("v4") or text
    port = int(found.get("port6") or found.get("port4") or DNS_PORT)
    try:
        ip_address(address)
    except ValueError as error:
        raise ConfigError(f"Discovery: nameservers must be addresses, not {text!r}") from error
    if not 1 <= port <= 65_535:
        raise ConfigError(f"Discovery: nameservers: {text!r} has no valid port")
    return address, port
