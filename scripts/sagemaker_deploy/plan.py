"""Converts a deployment to requests to AWS, without sending them.

Models and endpoint configurations are immutable, so each name contains a hash of its content: `llava-3f9c21d0ab54`. The
same settings give the same names, so deploying them twice does nothing. Other settings give other names, and the
endpoint is updated to them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from scripts.register_autoscaling import AUTOSCALING, Call, delete, register, target_names
from scripts.sagemaker_deploy.settings import Concurrency, Deployment

SAGEMAKER = "sagemaker"
OWNER_TAG = "torchmoor:endpoint"  # on every created resource, with the endpoint's name: teardown deletes only these
_DIGITS = 12
_MAX_NAME = 63


def model_call(deployment: Deployment) -> Call:
    """Return the request CreateModel."""
    container = {key: value for key, value in deployment.container.items() if value is not None}
    content = {"ExecutionRoleArn": deployment.role, "PrimaryContainer": container, **deployment.network}
    name = _name(deployment.endpoint, content)
    return Call(SAGEMAKER, "create_model", {"ModelName": name, **content, "Tags": _tags(deployment)})


def config_call(deployment: Deployment) -> Call:
    """Return the request CreateEndpointConfig, which names the model of `model_call`."""
    model = model_call(deployment).parameters["ModelName"]
    content: dict[str, Any] = {"ProductionVariants": [{**deployment.variant, "ModelName": model}]}
    if deployment.asynchronous is not None:
        content["AsyncInferenceConfig"] = deployment.asynchronous
    if deployment.kms_key is not None:
        content["KmsKeyId"] = deployment.kms_key
    name = _name(deployment.endpoint, content)
    return Call(SAGEMAKER, "create_endpoint_config", {"EndpointConfigName": name, **content, "Tags": _tags(deployment)})


def create_call(deployment: Deployment) -> Call:
    """Return the request CreateEndpoint."""
    names = _endpoint_names(deployment)
    return Call(SAGEMAKER, "create_endpoint", {**names, "Tags": _tags(deployment)})


def update_call(deployment: Deployment) -> Call:
    """Return the request UpdateEndpoint.

    SageMaker starts new instances, moves the traffic, and keeps the old instances if the new ones fail. An endpoint
    with autoscaling keeps its current number of instances.
    """
    parameters: dict[str, Any] = _endpoint_names(deployment)
    if deployment.scaling is not None:
        parameters["RetainAllVariantProperties"] = True
    if deployment.update is not None:
        parameters["DeploymentConfig"] = deployment.update
    return Call(SAGEMAKER, "update_endpoint", parameters)


def scaling_calls(deployment: Deployment) -> Iterator[Call]:
    """Yield the requests that register the variant with Application Auto Scaling."""
    variant, scaling = str(deployment.variant["VariantName"]), deployment.scaling
    if isinstance(scaling, Concurrency):
        names = target_names(deployment.endpoint, variant)
        limits = {"MinCapacity": scaling.min_capacity, "MaxCapacity": scaling.max_capacity}
        yield Call(AUTOSCALING, "register_scalable_target", {**names, **limits})
        # This metric has a value every 10 s, so it shows a burst within half a minute.
        metric = {"PredefinedMetricType": "SageMakerVariantConcurrentRequestsPerModelHighResolution"}
        policy = {
            "PolicyName": f"ConcurrentRequests-{deployment.endpoint}-{variant}",
            "PolicyType": "TargetTrackingScaling",
            **names,
            "TargetTrackingScalingPolicyConfiguration": {
                "TargetValue": scaling.target,
                "PredefinedMetricSpecification": metric,
            },
        }
        yield Call(AUTOSCALING, "put_scaling_policy", policy)
    elif scaling is not None:
        yield from register(deployment.endpoint, variant, scaling)


def unscaling_calls(endpoint: str, variant: str) -> Iterator[Call]:
    """Yield the requests that undo `scaling_calls`, whatever policies the variant has."""
    alarm, *policies, target = delete(endpoint, variant)
    yield alarm
    yield from policies
    name = f"ConcurrentRequests-{endpoint}-{variant}"
    yield Call(AUTOSCALING, "delete_scaling_policy", {"PolicyName": name, **target.parameters})
    yield target


def _endpoint_names(deployment: Deployment) -> dict[str, Any]:
    config = config_call(deployment).parameters["EndpointConfigName"]
    return {"EndpointName": deployment.endpoint, "EndpointConfigName": config}


def _name(endpoint: str, content: Mapping[str, Any]) -> str:
    # The hash includes the endpoint, since two long names may have the same prefix.
    digest = hashlib.sha256(json.dumps([endpoint, content], sort_keys=True).encode()).hexdigest()[:_DIGITS]
    return f"{name_prefix(endpoint)}{digest}"


def name_prefix(endpoint: str) -> str:
    """Return the prefix of the names of an endpoint's models and configurations. Long names are cut."""
    return endpoint[: _MAX_NAME - _DIGITS - 1].rstrip("-") + "-"


def _tags(deployment: Deployment) -> list[dict[str, str]]:
    tags = {**deployment.tags, OWNER_TAG: deployment.endpoint}
    return [{"Key": key, "Value": value} for key, value in tags.items()]
