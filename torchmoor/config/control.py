"""Settings of the control plane, through which AWS's clients create and delete endpoints of this host."""

from __future__ import annotations

from pydantic import Field

from torchmoor.config.group import GIB, MIB, Count, Positive, SettingsGroup, Texts


class ControlSettings(SettingsGroup, title="control"):
    """SageMaker's operations on models, endpoint configurations and endpoints (control-plane.md)."""

    is_on: bool = Field(
        False,
        description="Serve the operations that create, change and delete endpoints. A caller that may invoke an "
        "endpoint may then run code on this machine. Only for torchmoor up. Without it, endpoints can be listed and "
        "described.",
    )
    model_directories: Texts = Field(
        (),
        description="A directory below which ModelDataUrl may name files, as file:///a/path, besides the model store. "
        "Repeatable.",
    )
    own_images: Texts = Field(
        (), description="A further repository name of this project's own image, as Image may name it. Repeatable."
    )
    max_resources: Count = Field(1000, description="Models, endpoint configurations and endpoints, of each at most.")
    max_resource_bytes: Count = Field(
        8 * MIB, description="All of them with their tags, which are written at each change; then none are added."
    )
    max_instances: Count = Field(8, description="Instances of all created endpoints, those that leave included.")
    max_model_bytes: Count = Field(64 * GIB, description="Largest model that is downloaded.")
    max_body_bytes: Count = Field(MIB, description="Longest request.")
    max_requests: Count = Field(64, description="Requests that are answered at a time; further ones get 503.")
    metric_minutes: Count = Field(180, description="Minutes of metrics that are kept.")
    drain_timeout_s: Positive = Field(
        120.0, description="Time for the running requests of an instance that leaves; then it is stopped."
    )
