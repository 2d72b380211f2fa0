"""Settings of the instances that the proxy starts on its own host."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from torchmoor.config.group import Count, SettingsGroup

DEFAULT_CAPACITY = 100  # below the handlers' own limit
DEFAULT_HEAP_MIB = 512
DEFAULT_BODY_MIB = 64
# Measured with a heap of 512 MiB: 3 bodies of 60 MiB or 23 of 5.9 MiB are served, 4 or 26 end the JVM.
INFLIGHT_BODY_SHARE = 3 / 8
MAX_BODY_EXTRA_BYTES = 5 << 19  # TorchServe collects a body in pieces, which take more than their bytes


def inflight_body_bytes(heap_mib: int) -> int:
    """Return how many bytes of heap requests' bodies may take at a time."""
    return int((heap_mib << 20) * INFLIGHT_BODY_SHARE)


def counted_body_bytes(num_bytes: int) -> int:
    """Return how many bytes of heap a body of this length takes."""
    return num_bytes + min(num_bytes, MAX_BODY_EXTRA_BYTES)


DEFAULT_INFLIGHT_BODY_BYTES = inflight_body_bytes(DEFAULT_HEAP_MIB)


class LaunchSettings(SettingsGroup, title="launcher"):
    """Instances that `torchmoor serve` starts on its own host: the instances of variants with Autoscaling."""

    model_store: str = Field("model_store", description="The directory of the .mar archives, one for each model.")
    run_dir: str = Field(
        "", description="The instances' folders and logs while they run; empty: a temporary directory."
    )
    capacity: Count = Field(DEFAULT_CAPACITY, description="Requests that an instance is sent at a time.")
    start_timeout_s: Annotated[float, Field(ge=1)] = Field(
        180.0,
        description="Seconds for an instance to load its model; a large checkpoint that is downloaded needs more.",
    )
