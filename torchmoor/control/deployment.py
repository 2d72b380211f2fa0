"""One endpoint's deployment: its instances, the progress of its start, and what its configuration says about both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchmoor.config.endpoint_config import read_endpoint
from torchmoor.config.routing import EndpointSettings
from torchmoor.control.artifacts import ServedModel
from torchmoor.control.downloads import DownloadState
from torchmoor.control.models import DOWNLOAD_TIMEOUT, NOT_FOR_MANY, START_TIMEOUT
from torchmoor.control.resources import EndpointResource
from torchmoor.errors import RequestInvalid
from torchmoor.fleet.scaled_variant import ScaledVariant
from torchmoor.fleet.torchserve import Launch
from torchmoor.proxy.api.describe import describe_starting
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.wire.checkpoint_places import S3
from torchmoor.wire.handler_variables import MODEL_PATH


@dataclass(slots=True)
class Deployment:
    """An endpoint's instances, by name.

    served, start_timeouts_s: by variant. num_named: the number of names given so far. work: the endpoint's own folder.
    scaled: variants whose instances the autoscaler starts and stops; `launches` has all that it may start.
    """

    endpoint: Endpoint
    served: Mapping[str, ServedModel]
    stem: str
    work: Path
    start_timeouts_s: Mapping[str, float]
    launches: dict[str, Launch] = field(default_factory=dict)
    num_named: int = 0
    scaled: dict[str, ScaledVariant] = field(default_factory=dict)

    def launches_of(self, variant: str) -> list[Launch]:
        return [launch for launch in self.launches.values() if launch.variant == variant]


@dataclass(slots=True)
class Start:
    """The start of a created or updated endpoint. endpoint: None until all models are downloaded."""

    downloads: Mapping[str, DownloadState]  # by variant
    endpoint: Endpoint | None = None

    def describe(self, variant: str) -> list[str]:
        """Return the progress of a variant, such as its download."""
        found = None if self.endpoint is None else self.endpoint.find_variant(variant)
        if found is not None:
            return describe_starting(found) or ["waiting for instances to start"]
        download = self.downloads.get(variant)
        return [] if download is None else [download.describe() or "preparing the model"]


def start_timeout_s(variant: Mapping[str, Any], served: ServedModel) -> float:
    """Return the time that a variant gives to the start of an instance; 0 if it names none."""
    is_downloaded_by_handler = served.environment.get(MODEL_PATH, "").startswith(S3)
    return float(variant.get(START_TIMEOUT, 0) + (variant.get(DOWNLOAD_TIMEOUT, 0) if is_downloaded_by_handler else 0))


def settings_of(name: str, resource: EndpointResource, served: Mapping[str, ServedModel]) -> EndpointSettings:
    """Return an endpoint's settings, with the models' names in TorchServe. Raises RequestInvalid, ConfigError."""
    values: dict[str, Any] = {"EndpointConfig": resource.config}
    settings = read_endpoint(values, name, "EndpointConfig", {})
    many = [model.multi_model for model in served.values()]
    if any(each != many[0] for each in many):
        raise RequestInvalid("All variants of an endpoint must have models of the same Mode and cache setting.")
    if many[0] is not None and settings.async_inference is not None:
        raise RequestInvalid(NOT_FOR_MANY)
    given = resource.variants
    return settings.replace(
        multi_model=many[0],
        variants=tuple(
            variant.replace(model=served[variant.name].model, weight=resource.weight_of(given[variant.name]))
            for variant in settings.variants
        ),
    )
