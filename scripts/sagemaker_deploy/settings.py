"""Reads and checks the settings of a deployment, from options and a file.

The file's groups are the parameters of boto3's operations, so AWS's documentation describes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.sagemaker_deploy.errors import SettingsError
from torchmoor.config.application_autoscaling import read_autoscaling, resource_of
from torchmoor.config.file import load_yaml
from torchmoor.config.scaling import ScalingSettings
from torchmoor.errors import ConfigError

VARIANT = "AllTraffic"
CONCURRENCY = "TargetConcurrentRequests"  # key of the group Autoscaling, for real-time endpoints
DEFAULT_CONCURRENCY = 4.0  # concurrent requests per model and instance; scale out above it
# A checkpoint of 15 GB takes less time to download and load; AWS allows up to an hour.
DOWNLOAD_TIMEOUT_S, STARTUP_TIMEOUT_S = 1200, 900
_KEYS = {
    *("EndpointName", "ExecutionRoleArn", "PrimaryContainer", "VpcConfig", "EnableNetworkIsolation"),
    *("ProductionVariant", "AsyncInferenceConfig", "KmsKeyId", "DeploymentConfig", "Autoscaling", "Tags"),
}
_CONCURRENCY_KEYS = {"MinCapacity", "MaxCapacity", CONCURRENCY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """Scaling of a real-time endpoint to a target number of concurrent requests per model and instance."""

    min_capacity: int
    max_capacity: int
    target: float = DEFAULT_CONCURRENCY

    def __post_init__(self) -> None:
        if not 1 <= self.min_capacity <= self.max_capacity:
            raise SettingsError(
                f"Autoscaling: 1 <= MinCapacity <= MaxCapacity must hold, not {self.min_capacity} and "
                f"{self.max_capacity}; only an asynchronous endpoint can have no instance"
            )
        if self.target <= 0:
            raise SettingsError(f"Autoscaling.{CONCURRENCY} must be positive, not {self.target}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One endpoint with one variant of one model."""

    endpoint: str
    role: str
    container: Mapping[str, Any]  # as CreateModel's PrimaryContainer
    variant: Mapping[str, Any]  # as CreateEndpointConfig's ProductionVariants, without the model's name
    network: Mapping[str, Any] = field(default_factory=dict)  # VpcConfig, EnableNetworkIsolation
    asynchronous: Mapping[str, Any] | None = None  # AsyncInferenceConfig
    kms_key: str | None = None  # of the instances' disks
    update: Mapping[str, Any] | None = None  # DeploymentConfig
    scaling: ScalingSettings | Concurrency | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def image(self) -> str:
        return str(self.container["Image"])

    @property
    def model_data(self) -> str | None:
        """The model's location in S3; None for an image that contains the model."""
        source = self.container.get("ModelDataSource", {}).get("S3DataSource", {})
        found = self.container.get("ModelDataUrl", source.get("S3Uri"))
        return None if found is None else str(found)


def read_file(path: Path) -> dict[str, Any]:
    """Return a file's groups; checks only their names. Raises SettingsError."""
    try:
        content = load_yaml(path.read_bytes(), path)
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except ConfigError as error:
        raise SettingsError(str(error)) from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path} must be keys and values")
    for key in content:
        if key not in _KEYS:
            raise SettingsError(f"{path}: unknown key {key!r}; known are {', '.join(sorted(_KEYS))}")
    return content


def read_deployment(values: Mapping[str, Any]) -> Deployment:
    """Return the deployment of a file's groups, which options have overridden already. Raises SettingsError."""
    endpoint = values.get("EndpointName")
    if not endpoint:
        raise SettingsError("no endpoint: give --endpoint NAME, or EndpointName in the file")
    if not values.get("ExecutionRoleArn"):
        raise SettingsError(
            "no role: give --role ARN, or ExecutionRoleArn in the file; SageMaker's instances act as that role. "
            "deploy/sagemaker/template.yaml has one with the least rights"
        )
    container = _mapping(values, "PrimaryContainer")
    if not container.get("Image"):
        raise SettingsError(
            "no image: give --image URI, or PrimaryContainer.Image in the file; "
            "scripts/build_and_push.sh prints the URI of what it has pushed"
        )
    variant = {
        "VariantName": VARIANT,
        "InitialInstanceCount": 1,
        "ModelDataDownloadTimeoutInSeconds": DOWNLOAD_TIMEOUT_S,
        "ContainerStartupHealthCheckTimeoutInSeconds": STARTUP_TIMEOUT_S,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
        **_mapping(values, "ProductionVariant"),
    }
    if "InstanceType" not in variant:
        raise SettingsError("no instance type: give --instance-type ml.g5.xlarge, or ProductionVariant.InstanceType")
    if "ModelName" in variant:
        raise SettingsError("ProductionVariant.ModelName is not given: the script names the model after its content")
    asynchronous = values.get("AsyncInferenceConfig")
    return Deployment(
        endpoint=str(endpoint),
        role=str(values["ExecutionRoleArn"]),
        container=_complete(container),
        variant=variant,
        network={key: values[key] for key in ("VpcConfig", "EnableNetworkIsolation") if values.get(key)},
        asynchronous=asynchronous,
        kms_key=values.get("KmsKeyId"),
        update=values.get("DeploymentConfig"),
        scaling=_read_scaling(values, str(endpoint), variant, is_asynchronous=asynchronous is not None),
        tags={str(key): str(value) for key, value in _mapping(values, "Tags").items()},
    )


def _complete(container: dict[str, Any]) -> dict[str, Any]:
    """Return the container with its mode, which SageMaker reads, and the variable by which the container knows it."""
    for name, value in _mapping(container, "Environment").items():
        if not isinstance(value, str):  # botocore's error would show the value, which may be a password
            raise SettingsError(f"PrimaryContainer.Environment.{name} must be text: put it into quotes")
    completed = {"Mode": "SingleModel", **container}
    if completed["Mode"] == "MultiModel":
        completed["Environment"] = {"SAGEMAKER_MULTI_MODEL": "true", **_mapping(container, "Environment")}
    return completed


def _read_scaling(
    values: Mapping[str, Any], endpoint: str, variant: Mapping[str, Any], *, is_asynchronous: bool
) -> ScalingSettings | Concurrency | None:
    """Read the scaling: an asynchronous endpoint scales by backlog, a real-time endpoint by concurrent requests.

    AWS has only this one metric for each kind of endpoint.
    """
    given = _mapping(values, "Autoscaling")
    if not given:
        return None
    if is_asynchronous:
        if CONCURRENCY in given:
            raise SettingsError(
                f"Autoscaling.{CONCURRENCY} is for real-time endpoints; an asynchronous one scales by its backlog: "
                "remove it, or replace it with ScalingPolicies"
            )
        name = str(variant["VariantName"])
        entry = {"ResourceId": resource_of(endpoint, name), **given}
        try:
            return read_autoscaling([entry], {(endpoint, name): variant["InitialInstanceCount"]})[endpoint, name]
        except ConfigError as error:
            raise SettingsError(str(error).replace("Autoscaling[0]", "Autoscaling")) from error
    for key in given:
        if key not in _CONCURRENCY_KEYS:
            raise SettingsError(
                f"Autoscaling.{key}: a real-time endpoint has only {', '.join(sorted(_CONCURRENCY_KEYS))}; "
                "policies on the backlog need AsyncInferenceConfig"
            )
    try:
        least, most = int(given["MinCapacity"]), int(given["MaxCapacity"])
        return Concurrency(
            min_capacity=least, max_capacity=most, target=float(given.get(CONCURRENCY, DEFAULT_CONCURRENCY))
        )
    except KeyError as error:
        raise SettingsError(f"Autoscaling.{error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise SettingsError(f"Autoscaling: {error}") from error


def _mapping(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise SettingsError(f"{key} must be keys and values, not {value!r}")
    return value
