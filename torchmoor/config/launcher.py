"""Settings of the instances that the proxy starts on its own host."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from torchmoor.config.group import Count, SettingsGroup

DEFAULT_CAPACITY = 100  # below the handlers' own limit
DEFAULT_HEAP_MIB = 512
DEFAULT_BODY_MIB = 64


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
