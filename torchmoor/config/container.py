"""Settings of the operations that SageMaker expects of a container."""

from __future__ import annotations

from pydantic import Field

from torchmoor.config.group import Count, Positive, SettingsGroup


class ContainerSettings(SettingsGroup, title="container"):
    """SageMaker's container API: operations on models, for the first endpoint, and metrics."""

    serves_models: bool = Field(
        False, description="Serve /models, through which the platform loads models, as with SAGEMAKER_MULTI_MODEL."
    )
    shows_metrics: bool = Field(False, description="Serve the admin plane's /metrics on the data plane's port as well.")
    load_timeout_s: Positive = Field(360.0, description="Time-out of loading or unloading a model.")
    max_models: Count = Field(10_000, description="Models that may be loaded at a time.")
