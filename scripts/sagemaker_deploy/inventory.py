"""Finds an endpoint's resources in an account, by name and by the tag of all resources that this script creates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scripts.sagemaker_deploy.account import Account
from scripts.sagemaker_deploy.plan import OWNER_TAG, SAGEMAKER, name_prefix
from scripts.sagemaker_deploy.progress import find_endpoint
from torchmoor.config.application_autoscaling import DIMENSION, NAMESPACE, resource_of

AUTOSCALING = "application-autoscaling"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The resources of an endpoint. configs, models: names, newest first."""

    endpoint: Any | None
    is_ours: bool  # whether this script has created the endpoint
    variants: list[str]
    targets: list[Any]  # of Application Auto Scaling
    policies: list[Any]
    configs: list[str]
    models: list[str]

    @property
    def is_empty(self) -> bool:
        return self.endpoint is None and not (self.targets or self.configs or self.models)


def take(account: Account, name: str) -> Inventory:
    """Return the existing resources. Raises DeployError."""
    endpoint = find_endpoint(account, name)
    configs = list(_owned(account, name, "EndpointConfig"))
    variants = {variant["VariantName"] for variant in (endpoint or {}).get("ProductionVariants", ())}
    for config in configs:  # scaling may outlive its endpoint
        found = account.find(SAGEMAKER, "describe_endpoint_config", EndpointConfigName=config)
        variants |= {variant["VariantName"] for variant in (found or {}).get("ProductionVariants", ())}
    targets, policies = [], []
    for variant in sorted(variants):
        names = {"ServiceNamespace": NAMESPACE, "ScalableDimension": DIMENSION}
        resource = resource_of(name, variant)
        found = account.ask(AUTOSCALING, "describe_scalable_targets", ResourceIds=[resource], **names)
        targets += found["ScalableTargets"]
        found = account.ask(AUTOSCALING, "describe_scaling_policies", ResourceId=resource, **names)
        policies += found["ScalingPolicies"]
    return Inventory(
        endpoint=endpoint,
        is_ours=endpoint is not None and _owner(account, endpoint["EndpointArn"]) == name,
        variants=sorted(variants),
        targets=targets,
        policies=policies,
        configs=configs,
        models=list(_owned(account, name, "Model")),
    )


def _owned(account: Account, endpoint: str, kind: str) -> Iterator[str]:
    """Return the names of an endpoint's configurations or models."""
    operation = {"EndpointConfig": "list_endpoint_configs", "Model": "list_models"}[kind]
    more: dict[str, str] = {}
    while True:
        page = account.ask(
            SAGEMAKER,
            operation,
            NameContains=name_prefix(endpoint),
            SortBy="CreationTime",
            SortOrder="Descending",
            MaxResults=100,
            **more,
        )
        for item in page[f"{kind}s"]:
            if _owner(account, item[f"{kind}Arn"]) == endpoint:
                yield str(item[f"{kind}Name"])
        if not page.get("NextToken"):
            return
        more = {"NextToken": page["NextToken"]}


def _owner(account: Account, arn: str) -> str | None:
    found = account.find(SAGEMAKER, "list_tags", ResourceArn=arn)
    return next((str(tag["Value"]) for tag in (found or {}).get("Tags", ()) if tag["Key"] == OWNER_TAG), None)
