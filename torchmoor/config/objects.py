"""Settings of object stores: what may be read and written, how large it may be, how long it may take."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import Field, field_validator

from torchmoor.config.group import GIB, MIB, Count, Positive, SettingsGroup, Size, Texts

LEAST_PART_BYTES = 5 * MIB  # S3's own limit, for all parts but the last
MOST_COPIED_BYTES = 5 * GIB  # S3 copies an object in one request up to this size
_HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[?[0-9a-f:.]+\]?")
_PREFIX = re.compile(r"s3://[a-z0-9][a-z0-9.-]+/.*")


def check_networks(networks: tuple[str, ...]) -> tuple[str, ...]:
    """Return networks that are valid CIDR blocks. Raises ValueError."""
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as exc:
            raise ValueError(f"must have networks like 10.0.0.0/8: {exc}") from exc
    return networks


class ObjectSettings(SettingsGroup, title="objects"):
    """Allowed locations of inputs and results, their size limits, and time-outs of stores."""

    input_directories: Texts = Field((), description="Absolute directories that file:// inputs are read from.")
    output_directories: Texts = Field((), description="Absolute directories that file:// results are written to.")
    input_prefixes: Texts = Field(
        (), description="s3://bucket/ or s3://bucket/prefix/; none: all that the proxy's credentials may read."
    )
    https_hosts: Texts = Field(
        (), description="Hosts from which https inputs may be read: name.example or *.name.example; none: no https."
    )
    private_networks: Texts = Field(
        (), description="Private networks in which those hosts may be; none: public addresses only."
    )
    s3_endpoint_url: str = Field(
        "", description="Address of the S3 store. Empty: AWS_ENDPOINT_URL_S3, AWS's configuration files, then AWS."
    )
    s3_region: str = Field(
        "", description="Region of the S3 store. Empty: AWS_DEFAULT_REGION, then AWS's configuration files."
    )
    max_input_bytes: Count = Field(GIB, description="Size limit of an input.")
    max_output_bytes: Annotated[int, Field(gt=0, le=MOST_COPIED_BYTES)] = Field(
        GIB, description="Size limit of a result."
    )
    max_bytes: Count = Field(
        50 * GIB, description="Size limit of each output directory. When it is full, new requests are refused with 503."
    )
    min_free_bytes: Size = Field(
        256 * MIB,
        description="Free space that must stay on a directory's file system; below it new requests are refused with "
        "503.",
    )
    unfinished_ttl_s: Positive = Field(
        7200.0, description="Age at which the unfinished file of a killed process is deleted."
    )
    part_bytes: Annotated[int, Field(ge=LEAST_PART_BYTES)] = Field(
        LEAST_PART_BYTES, description="Size of a part of a multipart upload; a smaller object is sent in one request."
    )
    parallel_parts: Count = Field(2, description="Parts of one upload at a time, each in memory.")
    max_in_flight: Count = Field(16, description="Requests to S3 and file system calls at a time.")
    connect_timeout_s: Positive = Field(5.0, description="Time-out of a connection to a store.")
    read_timeout_s: Positive = Field(
        60.0, description="Longest time without a byte. S3 may join an object's parts slowly."
    )
    max_attempts: Count = Field(3, description="Attempts of a request, and of reading the rest of an interrupted body.")

    @field_validator("input_directories", "output_directories")
    @classmethod
    def _check_directories(cls, folders: tuple[str, ...]) -> tuple[str, ...]:
        for folder in folders:
            if not folder.startswith("/") or ".." in folder.split("/"):
                raise ValueError(f"must have absolute paths without .., not {folder!r}")
        return folders

    @field_validator("input_prefixes")
    @classmethod
    def _check_prefixes(cls, prefixes: tuple[str, ...]) -> tuple[str, ...]:
        for prefix in prefixes:
            if not _PREFIX.fullmatch(prefix):
                raise ValueError(f"must have s3://bucket/prefix/, not {prefix!r}")
        return prefixes

    @field_validator("https_hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"must have names.in.lower.case or *.names, not {host!r}")
        return hosts

    _check_networks = field_validator("private_networks")(check_networks)
