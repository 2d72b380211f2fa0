"""Settings of the control plane, through which AWS's clients create and delete endpoints of this host."""

from __future__ import annotations

from pydantic import Field

from torchmoor.config.group import GIB, MIB, Count, Positive, SettingsGroup, Texts


class ControlSettings(SettingsGroup, title="control"):
    """SageMaker's operations on models, endpoint configurations and endpoints (control-plane.md)."""

    is_on: bool = Field(
        False,
        description="Serve the operations that create, change and delete endpoints, in torchmoor up. A caller that "
        "may invoke an endpoint can then run code on this machine. Without it, endpoints can only be "
        "listed and described.",
    )
    model_directories: Texts = Field(
        (),
        description="Directories below which ModelDataUrl may name files (file:///a/path), in addition to the model "
        "store. Repeatable.",
    )
    own_images: Texts = Field(
        (), description="Further repository names of this project's image that Image may have. Repeatable."
    )
    max_resources: Count = Field(
        1000, description="Maximum number of models, of endpoint configurations and of endpoints."
    )
    max_resource_bytes: Count = Field(
        8 * MIB, description="Size limit of all resources with their tags, which are written at each change."
    )
    max_instances: Count = Field(
        8, description="Maximum number of instances of all created endpoints, stopping ones included."
    )
    max_model_bytes: Count = Field(64 * GIB, description="Size limit of a created endpoint's downloaded model.")
    download_timeout_s: Positive = Field(
        3600.0,
        description="Time to download and unpack a variant's model, if the variant has no "
        "ModelDataDownloadTimeoutInSeconds.",
    )
    max_body_bytes: Count = Field(MIB, description="Longest request.")
    max_requests: Count = Field(64, description="Requests that are answered at a time; further ones get 503.")
    metric_minutes: Count = Field(180, description="Minutes for which metrics are kept.")
    drain_timeout_s: Positive = Field(
        120.0,
        description="Time that running requests have to end when an instance of a created endpoint is stopped.",
    )
    removal_timeout_s: Positive = Field(
        900.0,
        description="Time in which a deleted endpoint's asynchronous results must be written; those that cannot be "
        "written by then are abandoned, so that the deletion ends. boto3 waits for a deletion for half an hour.",
    )
