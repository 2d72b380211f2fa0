"""Settings of the instances that the proxy starts on its own host."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from torchmoor.config.group import Count, SettingsGroup


class LaunchSettings(SettingsGroup, title="launcher"):
    """Instances that `torchmoor serve` starts on its own host: the instances of variants with Autoscaling."""

    model_store: str = Field("model_store", description="The directory of the variants' archives, MODEL_NAME.mar.")
    run_dir: str = Field(
        "", description="The instances' folders and logs while they run. Empty: a temporary directory."
    )
    capacity: Count = Field(100, description="Requests that an instance is sent at a time.")
    start_timeout_s: Annotated[float, Field(ge=1)] = Field(
        180.0, description="How long an instance may take to load its model."
    )
