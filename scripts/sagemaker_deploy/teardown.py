"""Deletes an endpoint and all resources made for it, each before the resources that it refers to."""

from __future__ import annotations

from collections.abc import Callable

from scripts.sagemaker_deploy.account import Account
from scripts.sagemaker_deploy.errors import DeployError
from scripts.sagemaker_deploy.inventory import Inventory, take
from scripts.sagemaker_deploy.plan import SAGEMAKER, unscaling_calls
from scripts.sagemaker_deploy.progress import MOVING, Watch, log_group, wait_settled


def teardown(account: Account, name: str, watch: Watch, may: Callable[[str], bool]) -> None:
    """Delete everything, and return when nothing is left. may: asks the user a question. Raises DeployError."""
    found = take(account, name)
    if found.endpoint is not None and not found.is_ours:
        raise DeployError(f"this script has not made the endpoint {name}; delete it with what made it")
    if found.is_empty:
        watch.say(f"nothing is left of {name}")
        return
    for line in listed(found, name):
        watch.say(line)
    if not may(f"Delete all this of {name}?"):
        raise DeployError("nothing was deleted")
    for variant in found.variants:
        account.send_scaling(unscaling_calls(name, variant), skips_missing=True)
        watch.say(f"autoscaling of {variant}: removed")
    if found.endpoint is not None:
        _delete_endpoint(account, name, found, watch)
    # An endpoint needs its configuration until it is deleted: without it, SageMaker cannot account for its cost.
    for config in found.configs:
        account.find(SAGEMAKER, "delete_endpoint_config", EndpointConfigName=config)
        watch.say(f"delete_endpoint_config: {config}")
    for model in found.models:
        account.find(SAGEMAKER, "delete_model", ModelName=model)
        watch.say(f"delete_model: {model}")
    watch.say(f"left alone: images in ECR, objects in S3, the role, and the log group {log_group(name)}")


def listed(found: Inventory, name: str) -> list[str]:
    """Return a line for each existing resource."""
    lines = [] if found.endpoint is None else [f"endpoint {name}, {found.endpoint['EndpointStatus']}"]
    lines += [
        f"autoscaling of {target['ResourceId']}, {target['MinCapacity']} to {target['MaxCapacity']}"
        for target in found.targets
    ]
    lines += [f"scaling policy {policy['PolicyName']}" for policy in found.policies]
    lines += [f"endpoint configuration {config}" for config in found.configs]
    return lines + [f"model {model}" for model in found.models]


def _delete_endpoint(account: Account, name: str, found: Inventory, watch: Watch) -> None:
    state = None if found.endpoint is None else found.endpoint["EndpointStatus"]
    if state in MOVING:  # SageMaker refuses to delete an endpoint before that
        endpoint = wait_settled(account, name, watch)
        if endpoint is None:
            return
    account.find(SAGEMAKER, "delete_endpoint", EndpointName=name)
    if wait_settled(account, name, watch) is not None:
        raise DeployError(f"{name} was not deleted; see `deploy_sagemaker.py status --endpoint {name}`")
