"""Describes an endpoint's state and resources as one record, printed as text or JSON."""

from __future__ import annotations

from typing import Any

from scripts.sagemaker_deploy.account import Account
from scripts.sagemaker_deploy.inventory import take
from scripts.sagemaker_deploy.plan import SAGEMAKER
from scripts.sagemaker_deploy.progress import describe, log_group

NO_ENDPOINT = "there is none"


def status(account: Account, name: str) -> dict[str, Any] | None:
    """Return an endpoint's state and resources; None if there are none. Raises DeployError."""
    found = take(account, name)
    if found.is_empty:
        return None
    endpoint = found.endpoint or {}
    config = endpoint.get("EndpointConfigName")
    described = config and account.find(SAGEMAKER, "describe_endpoint_config", EndpointConfigName=config)
    return {
        "endpoint": name,
        "state": describe(endpoint) if endpoint else NO_ENDPOINT,
        "failure": endpoint.get("FailureReason"),
        "made_by_this_script": found.is_ours,
        "configuration": config,
        "variants": [_variant(each, described or {}) for each in endpoint.get("ProductionVariants", ())],
        "asynchronous": bool((described or {}).get("AsyncInferenceConfig")),
        "autoscaling": [
            {"resource": each["ResourceId"], "min": each["MinCapacity"], "max": each["MaxCapacity"]}
            for each in found.targets
        ],
        "policies": [policy["PolicyName"] for policy in found.policies],
        "configurations": found.configs,
        "models": found.models,
        "log_group": log_group(name),
    }


def _variant(variant: Any, config: Any) -> dict[str, Any]:
    configured = next(
        (each for each in config.get("ProductionVariants", ()) if each["VariantName"] == variant["VariantName"]), {}
    )
    return {
        "name": variant["VariantName"],
        "instances": variant.get("CurrentInstanceCount"),
        "desired": variant.get("DesiredInstanceCount"),
        "instance_type": configured.get("InstanceType"),
        "model": configured.get("ModelName"),
        "routing": configured.get("RoutingConfig", {}).get("RoutingStrategy"),
    }


def as_lines(record: dict[str, Any]) -> list[str]:
    """Return the record as lines of text, without empty values."""
    lines = []
    for key, value in record.items():
        if value in (None, [], ""):
            continue
        items = value if isinstance(value, list) else [value]
        for item in items:
            text = ", ".join(f"{k} {v}" for k, v in item.items() if v is not None) if isinstance(item, dict) else item
            lines.append(f"{key.replace('_', ' ')}: {text}")
    return lines
