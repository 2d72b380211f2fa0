"""Settings of object stores and of notices. Checked when they are made; nothing here reads a file or asks a host."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from torchmoor.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
LEAST_PART_BYTES = 5 * MIB  # S3's own limit, for all parts but the last
MOST_COPIED_BYTES = 5 * GIB  # S3 gives an object another name in one request up to this size
TOPIC = re.compile(r"arn:aws[a-z\-]*:sns:([a-z0-9\-]*):[0-9]{12}:[a-zA-Z0-9_.-]+")
_HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[?[0-9a-f:.]+\]?")
_PREFIX = re.compile(r"s3://[a-z0-9][a-z0-9.-]+/.*")
_SECRET_BYTES = range(24, 65)  # what the Standard Webhooks specification allows


def _require_positive(group: object, prefix: str) -> None:
    for item in fields(group):  # type: ignore[arg-type]
        value = getattr(group, item.name)
        if isinstance(value, int | float) and value <= 0:
            raise ConfigError(f"{prefix}.{item.name} must be positive, not {value}")


def _require_networks(name: str, networks: tuple[str, ...]) -> None:
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as exc:
            raise ConfigError(f"{name} must have networks like 10.0.0.0/8: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """What may be read and written, how large it may be, and how long a store may take."""

    input_directories: tuple[str, ...] = ()  # absolute; inputs as file:// are read below these only
    output_directories: tuple[str, ...] = ()  # absolute; results as file:// are written below these only
    input_prefixes: tuple[str, ...] = ()  # s3://bucket/ or s3://bucket/prefix/; none: all that our credentials may read
    https_hosts: tuple[str, ...] = ()  # name.example or *.name.example, from which inputs may come; none: no https
    private_networks: tuple[str, ...] = ()  # in which those hosts may be; none: on the public internet only
    s3_endpoint_url: str = ""  # "": as AWS_ENDPOINT_URL_S3 and the configuration files say, else AWS
    s3_region: str = ""  # "": as AWS_REGION and the configuration files say
    max_input_bytes: int = GIB
    max_output_bytes: int = GIB
    part_bytes: int = LEAST_PART_BYTES  # of a multipart upload; what is smaller is sent in one request
    parallel_parts: int = 2  # of one upload, each in memory
    max_in_flight: int = 16  # requests to S3, and calls of the file system, at once
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0  # without a byte: S3 may take long to put an object's parts together
    max_attempts: int = 3  # of a request, and of the rest of a body whose connection broke

    def __post_init__(self) -> None:
        _require_positive(self, "objects")
        for name in ("input_directories", "output_directories"):
            for folder in getattr(self, name):
                if not folder.startswith("/") or ".." in folder.split("/"):
                    raise ConfigError(f"objects.{name} must have absolute paths without .., not {folder!r}")
        for prefix in self.input_prefixes:
            if not _PREFIX.fullmatch(prefix):
                raise ConfigError(f"objects.input_prefixes must have s3://bucket/prefix/, not {prefix!r}")
        for host in self.https_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"objects.https_hosts must have names.in.lower.case or *.names, not {host!r}")
        _require_networks("objects.private_networks", self.private_networks)
        if self.part_bytes < LEAST_PART_BYTES:
            raise ConfigError(f"objects.part_bytes must be {LEAST_PART_BYTES} or more, not {self.part_bytes}")
        if self.max_output_bytes > MOST_COPIED_BYTES:
            raise ConfigError(f"objects.max_output_bytes must be {MOST_COPIED_BYTES} or less")


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """An address that hears of every request's end. secret: whsec_ and base64 of 24 to 64 bytes."""

    url: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_sound = parts.scheme in ("https", "http") and parts.hostname and parts.port != 0
        except ValueError:
            is_sound = False
        if not is_sound or parts.username is not None or parts.password is not None:
            raise ConfigError("a webhook's url must be https://host/path, without a user name or password in it")
        if len(self.key) not in _SECRET_BYTES:
            raise ConfigError(
                "a webhook's secret must be whsec_ followed by the base64 of 24 to 64 bytes: "
                "echo whsec_$(openssl rand -base64 32)"
            )

    @property
    def key(self) -> bytes:
        """The secret's bytes."""
        try:
            return base64.b64decode(self.secret.removeprefix("whsec_"), validate=True)
        except binascii.Error:
            return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSettings:
    """Who is told beside an endpoint's SNS topics, and how often that is tried."""

    webhooks: tuple[Webhook, ...] = ()
    private_networks: tuple[str, ...] = ()  # in which webhooks may be, then by plain http too
    aws_region: str = "us-east-1"  # awsRegion of a message that goes to no topic
    max_attempts: int = 5
    first_delay_s: float = 0.5  # before the second try; doubled each time
    max_delay_s: float = 30.0
    max_in_flight: int = 16  # tries at once
    connect_timeout_s: float = 5.0
    timeout_s: float = 15.0  # of one try

    def __post_init__(self) -> None:
        _require_positive(self, "notices")
        _require_networks("notices.private_networks", self.private_networks)
