"""Settings of the instances that the proxy starts on its own host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from torchmoor.config.group import Count, Positive, SettingsGroup
from torchmoor.wire.progress import INTERVAL_S

DEFAULT_CAPACITY = 100  # below the handlers' own limit
DEFAULT_HEAP_MIB = 512
DEFAULT_BODY_MIB = 64
INSTANCE_LOG = Path("logs", "torchserve.log")  # in an instance's folder, which is in the run directory
# Measured with a heap of 512 MiB: 3 bodies of 60 MiB or 28 of 5.9 MiB are served, 4 or 32 end the JVM.
INFLIGHT_BODY_SHARE = 3 / 8
MAX_BODY_EXTRA_BYTES = 5 << 19  # TorchServe collects a body in pieces, which take more than their bytes


def inflight_body_bytes(heap_mib: int) -> int:
    """Return how many bytes of heap requests' bodies may take at a time."""
    return int((heap_mib << 20) * INFLIGHT_BODY_SHARE)


def counted_body_bytes(num_bytes: int) -> int:
    """Return how many bytes of heap a body of this length takes."""
    return num_bytes + min(num_bytes, MAX_BODY_EXTRA_BYTES)


# TorchServe makes an object of each field of a form. Measured with a heap of 512 MiB: 3 MB of empty fields, or 61 MB of
# empty parts, end the JVM; 2 MB of fields occupy one of its threads for 5 s.
FORM_WEIGHT, MULTIPART_WEIGHT = 1024, 6
_BOUNDARY = re.compile(rb'(?i:boundary)[ \t]*=[ \t]*"?([^";, \t]+)')
_NESTED = re.compile(rb"(?i:multipart/mixed)")  # a part whose own parts have another boundary


def body_weight(content_type: bytes | None) -> int:
    """Return how many bytes a byte of the body counts as: 1, or more for a form."""
    kind = b"" if content_type is None else content_type.strip().lower()
    if kind.startswith(b"application/x-www-form-urlencoded"):
        return FORM_WEIGHT
    return MULTIPART_WEIGHT if kind.startswith(b"multipart/form-data") else 1  # TorchServe looks at the beginning, too


def num_form_fields(content_type: bytes | None, body: bytes) -> int:
    """Return how many fields a form has, 0 for another body. TorchServe passes each on as an object of its own."""
    weight = body_weight(content_type)
    if weight == FORM_WEIGHT:
        return body.count(b"&") + 1
    if weight != MULTIPART_WEIGHT:
        return 0
    boundary = _BOUNDARY.search(content_type or b"")
    if boundary is None or _NESTED.search(body):
        return body.count(b"\n--") + 1  # lines that may begin a part
    return body.count(b"--" + boundary[1])


DEFAULT_INFLIGHT_BODY_BYTES = inflight_body_bytes(DEFAULT_HEAP_MIB)


class LaunchSettings(SettingsGroup, title="launcher"):
    """Instances that `torchmoor serve` starts on its own host: the instances of variants with Autoscaling."""

    model_store: str = Field("model_store", description="Directory of the .mar archives, one for each model.")
    run_dir: str = Field("", description="Directory for the instances' folders and logs; empty: a temporary directory.")
    python: str = Field(
        "",
        description="Python whose TorchServe and libraries the instances use, such as one with vLLM; empty: the "
        "proxy's own.",
    )
    gpus_per_instance: Count = Field(1, description="GPUs per instance; more than 1 for a model that vLLM spreads.")
    capacity: Count = Field(DEFAULT_CAPACITY, description="Requests that an instance gets at a time.")
    start_timeout_s: Positive = Field(
        180.0,
        description="Seconds for an instance to load its model; a large checkpoint that is downloaded needs more.",
    )
    progress_interval_s: Annotated[float, Field(ge=0)] = Field(
        INTERVAL_S, description="Seconds between lines about a model that is downloading or loading; 0 for no lines."
    )
