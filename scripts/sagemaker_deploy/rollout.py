"""Rolls a deployment out: creates missing resources, creates or updates the endpoint, and waits until it serves.

An update that fails leaves the endpoint unchanged: SageMaker keeps the old instances until the new ones are healthy,
and this script keeps the previous configuration and model.
"""

from __future__ import annotations

from typing import Any

from scripts.register_autoscaling import Call
from scripts.sagemaker_deploy.account import Account
from scripts.sagemaker_deploy.errors import DeployError
from scripts.sagemaker_deploy.inventory import Inventory, take
from scripts.sagemaker_deploy.plan import (
    SAGEMAKER,
    config_call,
    create_call,
    model_call,
    scaling_calls,
    unscaling_calls,
    update_call,
)
from scripts.sagemaker_deploy.preflight import look
from scripts.sagemaker_deploy.progress import MOVING, Watch, failure, find_endpoint, wait_settled
from scripts.sagemaker_deploy.settings import Deployment
from scripts.sagemaker_deploy.shapes import check


def planned(deployment: Deployment) -> list[Call]:
    """Return all requests that a deployment may send, after checking each. Raises SettingsError."""
    calls = [model_call(deployment), config_call(deployment), create_call(deployment), update_call(deployment)]
    calls += scaling_calls(deployment)
    for call in sorted(calls, key=lambda call: call.operation != "create_endpoint"):  # reports a bad name first
        check(call)
    return calls


def deploy(account: Account, deployment: Deployment, watch: Watch) -> None:
    """Roll a deployment out; return when the endpoint serves it. Raises DeployError."""
    planned(deployment)
    deployment = look(account, deployment, watch.say)
    name = deployment.endpoint
    if (endpoint := find_endpoint(account, name)) and endpoint["EndpointStatus"] in MOVING:
        watch.say(f"{name} is {endpoint['EndpointStatus']}; waiting for that to end")
        wait_settled(account, name, watch)
    before = take(account, name)
    _check_may_change(before, name)
    config = _ensure(account, deployment, watch)
    if before.endpoint is not None and before.endpoint["EndpointStatus"] == "Failed":
        watch.say(
            f"{name} has failed before ({before.endpoint.get('FailureReason', 'no reason given')}); creating it again"
        )
        _delete_failed(account, name, watch)
        before = take(account, name)
    if before.endpoint is None:
        _send(account, create_call(deployment), watch)
    elif before.endpoint["EndpointConfigName"] == config:
        watch.say(f"{name} has this configuration already")
    else:
        _unscale(account, before, name, watch)
        _update(account, deployment, before, watch)
    endpoint = wait_settled(account, name, watch)
    is_serving = endpoint is not None and endpoint["EndpointStatus"] == "InService"
    if is_serving:
        _scale(account, deployment, before, watch)
    if endpoint is None or not is_serving or endpoint["EndpointConfigName"] != config:
        raise failure(account, name, _why(endpoint, name, config))
    if before.endpoint is None or before.endpoint["EndpointConfigName"] != config:
        _prune(account, name, before.endpoint, config, watch)


def _check_may_change(before: Inventory, name: str) -> None:
    if before.endpoint is None:
        return
    if not before.is_ours:
        raise DeployError(
            f"there is an endpoint {name} that this script has not made; it is left alone. Take another name, "
            "or change it with what made it"
        )
    if before.endpoint["EndpointStatus"] == "UpdateRollbackFailed":
        raise DeployError(
            f"{name} could neither be updated nor taken back ({before.endpoint.get('FailureReason', 'no reason given')}"
            "): it must be deleted. `teardown`, then deploy again"
        )


def _ensure(account: Account, deployment: Deployment, watch: Watch) -> str:
    """Create model and configuration unless they exist. Return the configuration's name."""
    model, config = model_call(deployment), config_call(deployment)
    for call, key, operation in (
        (model, "ModelName", "describe_model"),
        (config, "EndpointConfigName", "describe_endpoint_config"),
    ):
        name = {key: call.parameters[key]}
        if account.find(SAGEMAKER, operation, **name) is None:
            _send(account, call, watch)
    return str(config.parameters["EndpointConfigName"])


def _send(account: Account, call: Call, watch: Watch) -> None:
    names = [str(value) for key, value in call.parameters.items() if key in ("ModelName", "EndpointConfigName")]
    account.send(call)
    watch.say(f"{call.operation}: {', '.join(names)}")


def _update(account: Account, deployment: Deployment, before: Inventory, watch: Watch) -> None:
    """Update the endpoint. If AWS refuses that, the endpoint keeps serving, so its scaling is registered again."""
    try:
        _send(account, update_call(deployment), watch)
    except DeployError as error:
        try:
            _scale(account, deployment, before, watch)
        except DeployError as unscaled:
            raise DeployError(f"{error}\nand autoscaling is off, deploy again to have it: {unscaled}") from error
        raise


def _delete_failed(account: Account, name: str, watch: Watch) -> None:
    """Delete an endpoint whose creation has failed, since it allows nothing else."""
    account.ask(SAGEMAKER, "delete_endpoint", EndpointName=name)
    wait_settled(account, name, watch)


def _unscale(account: Account, before: Inventory, name: str, watch: Watch) -> None:
    """Remove autoscaling before an update, because it would forbid a change of the instance type."""
    for variant in before.variants if before.targets else ():
        account.send_scaling(unscaling_calls(name, variant), skips_missing=True)
        watch.say(f"autoscaling of {variant} is off while the endpoint is updated")


def _scale(account: Account, deployment: Deployment, before: Inventory, watch: Watch) -> None:
    """Register autoscaling, or remove it if the deployment has none. Also runs after an update was rolled back."""
    if deployment.scaling is None:
        for target in before.targets:
            variant = str(target["ResourceId"].rpartition("/")[2])
            account.send_scaling(unscaling_calls(deployment.endpoint, variant), skips_missing=True)
        return
    for call in (calls := list(scaling_calls(deployment))):
        check(call)
    for line in account.send_scaling(calls):
        watch.say(f"autoscaling: {line}")


def _why(endpoint: Any | None, name: str, config: str) -> str:
    if endpoint is None:
        return f"{name} is gone: it was deleted meanwhile"
    reason = endpoint.get("FailureReason", "no reason given")
    if endpoint["EndpointStatus"] == "InService":
        return f"the update of {name} was taken back, it serves {endpoint['EndpointConfigName']} as before: {reason}"
    return f"{name} is {endpoint['EndpointStatus']}, not serving {config}: {reason}"


def _prune(account: Account, name: str, previous: Any | None, config: str, watch: Watch) -> None:
    """Delete configurations and models, except the current and the previous ones."""
    kept = {config} | ({previous["EndpointConfigName"]} if previous is not None else set())
    now = take(account, name)
    models = set()
    for each in now.configs:
        if each not in kept:
            account.ask(SAGEMAKER, "delete_endpoint_config", EndpointConfigName=each)
            watch.say(f"delete_endpoint_config: {each}")
            continue
        found = account.ask(SAGEMAKER, "describe_endpoint_config", EndpointConfigName=each)
        models |= {variant["ModelName"] for variant in found["ProductionVariants"]}
    for each in now.models:
        if each not in models:
            account.ask(SAGEMAKER, "delete_model", ModelName=each)
            watch.say(f"delete_model: {each}")
