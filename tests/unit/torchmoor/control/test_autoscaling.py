"""Scalable targets whose endpoint is deleted while a request waits, and those that cannot be saved."""

import asyncio
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator

from scripts.register_autoscaling import AUTOSCALING, MISSING, delete
from torchmoor.config.application_autoscaling import DIMENSION, NAMESPACE, PREDEFINED_METRICS
from torchmoor.config.control import ControlSettings
from torchmoor.config.scaling import TrackedMetric
from torchmoor.control.arns import Arns
from torchmoor.control.autoscaling import ScalableTargets
from torchmoor.control.resources import FILE, EndpointResource, Resource, Resources
from torchmoor.errors import RequestInvalid, ScalableTargetMissing

POLICY = {
    "PolicyName": "p",
    "PolicyType": "TargetTrackingScaling",
    "TargetTrackingScalingPolicyConfiguration": {"TargetValue": 2.0},
}

STEPS = {
    "PolicyType": "StepScaling",
    "StepScalingPolicyConfiguration": {
        "AdjustmentType": "ChangeInCapacity",
        "StepAdjustments": [{"MetricIntervalLowerBound": 0, "ScalingAdjustment": 1}],
    },
}


class SlowDeployments:
    """Deployments whose autoscaler returns instances slowly."""

    def __init__(self) -> None:
        self.is_scaling, self.may_scale = asyncio.Event(), asyncio.Event()

    def count_of(self, endpoint: str, variant: str) -> int:
        return 1

    def is_scaled(self, endpoint: str, variant: str) -> bool:
        return False

    async def scale(self, endpoint: str, variant: str, settings: Any) -> None:
        self.is_scaling.set()
        await self.may_scale.wait()


class ScaledDeployments:
    """Deployments whose autoscaler has started three instances."""

    def __init__(self) -> None:
        self.scaled = True

    def count_of(self, endpoint: str, variant: str) -> int:
        return 3

    def is_scaled(self, endpoint: str, variant: str) -> bool:
        return self.scaled

    async def scale(self, endpoint: str, variant: str, settings: Any) -> None:
        self.scaled = settings is not None


def register(endpoint: str) -> dict[str, Any]:
    return {
        "ServiceNamespace": NAMESPACE,
        "ScalableDimension": DIMENSION,
        "ResourceId": f"endpoint/{endpoint}/variant/v",
        "MinCapacity": 1,
        "MaxCapacity": 2,
    }


async def test_a_target_of_an_endpoint_that_is_deleted_meanwhile_is_refused(tmp_path: Path) -> None:
    """A target is refused if its endpoint is deleted while the request waits for another endpoint's change."""
    resources, deployments = Resources(tmp_path, ControlSettings()), SlowDeployments()
    for name in ("first", "second"):
        config = {"ProductionVariants": [{"VariantName": "v", "ModelName": "m"}]}
        resources.endpoints[name] = EndpointResource("c", config, {}, 1, 0.0, 0.0, status="InService")
    unused: Any = deployments
    targets = ScalableTargets(resources, Arns("us-east-1", "123456789012"), unused)
    call: Any = targets.operations()["RegisterScalableTarget"]
    first = asyncio.create_task(call(register("first")))
    await deployments.is_scaling.wait()
    second, applying = asyncio.create_task(call(register("second"))), asyncio.create_task(targets.apply("second"))
    await asyncio.sleep(0)  # both wait now
    del resources.endpoints["second"]
    targets.forget("second")
    deployments.may_scale.set()
    await first
    with pytest.raises(RequestInvalid, match="endpoint/second/variant/v is not a variant of a created endpoint"):
        await second
    await applying
    assert list(resources.targets) == ["endpoint/first/variant/v"]


@pytest.mark.parametrize("metric", PREDEFINED_METRICS)
async def test_a_policy_of_a_real_time_endpoint_scales_it(tmp_path: Path, metric: str) -> None:
    """AWS's policies of real-time endpoints, such as that of scripts/deploy_sagemaker.py, scale a created endpoint."""
    resources = Resources(tmp_path, ControlSettings())
    config = {"ProductionVariants": [{"VariantName": "v", "ModelName": "m"}]}
    resources.endpoints["e"] = EndpointResource("c", config, {}, 1, 0.0, 0.0, status="InService")
    deployments: Any = ScaledDeployments()
    deployments.scaled = False
    targets = ScalableTargets(resources, Arns("us-east-1", "123456789012"), deployments)
    call: Any = targets.operations()
    await call["RegisterScalableTarget"](register("e"))
    names = {key: value for key, value in register("e").items() if not key.endswith("Capacity")}
    tracking = {"TargetValue": 4.0, "PredefinedMetricSpecification": {"PredefinedMetricType": str(metric)}}

    await call["PutScalingPolicy"]({**POLICY, **names, "TargetTrackingScalingPolicyConfiguration": tracking})

    assert deployments.scaled
    [policy] = call["DescribeScalingPolicies"](names)["ScalingPolicies"]
    assert policy["TargetTrackingScalingPolicyConfiguration"] == tracking


@pytest.mark.parametrize(
    ("operation", "changed", "problem"),
    [
        ("RegisterScalableTarget", {"MinCapacity": -1}, "MinCapacity must be 0 or more, not -1."),
        ("RegisterScalableTarget", {"MinCapacity": 3}, "MaxCapacity must be MinCapacity or more, and 1 or more."),
        (
            "PutScalingPolicy",
            {**POLICY, "TargetTrackingScalingPolicyConfiguration": {"TargetValue": -1.0}},
            "PutScalingPolicy.TargetTrackingScalingPolicyConfiguration.TargetValue must be positive, not -1.0",
        ),
        (
            "PutScalingPolicy",
            {"PolicyName": "q"},
            "PutScalingPolicy must have PolicyType TargetTrackingScaling or StepScaling, and the configuration of that "
            "name",
        ),
        (
            "PutScalingPolicy",
            {**POLICY, "PolicyName": "q"},
            "endpoint/e/variant/v.ScalingPolicies[1]: there is a TargetTrackingScaling policy already",
        ),
    ],
)
async def test_a_wrong_target_or_policy_is_refused(
    tmp_path: Path, operation: str, changed: dict[str, Any], problem: str
) -> None:
    """The error names the request's own members, and nothing changes."""
    resources = Resources(tmp_path, ControlSettings())
    config = {"ProductionVariants": [{"VariantName": "v", "ModelName": "m"}]}
    resources.endpoints["e"] = EndpointResource("c", config, {}, 1, 0.0, 0.0, status="InService")
    unused: Any = ScaledDeployments()
    call: Any = ScalableTargets(resources, Arns("us-east-1", "123456789012"), unused).operations()
    names = {key: value for key, value in register("e").items() if not key.endswith("Capacity")}
    await call["RegisterScalableTarget"](register("e"))
    await call["PutScalingPolicy"]({**names, **POLICY})
    before = [resources.targets.copy(), resources.policies.copy()]
    with pytest.raises(RequestInvalid) as refused:
        await call[operation]({**names, **changed})

    assert refused.value.message == problem
    assert [resources.targets, resources.policies] == before


async def test_a_script_removes_what_is_there(tmp_path: Path) -> None:
    """scripts/register_autoscaling.py knows by AWS's words that one of its policies does not exist."""
    resources = Resources(tmp_path, ControlSettings())
    config = {"ProductionVariants": [{"VariantName": "v", "ModelName": "m"}]}
    resources.endpoints["e"] = EndpointResource("c", config, {}, 1, 0.0, 0.0, status="InService")
    deployments: Any = ScaledDeployments()
    targets = ScalableTargets(resources, Arns("us-east-1", "123456789012"), deployments)
    operations: Any = targets.operations()
    names = {key: value for key, value in register("e").items() if not key.endswith("Capacity")}
    policy, problems = f"{TrackedMetric.BACKLOG}-e-v", list[str]()
    await operations["RegisterScalableTarget"](register("e"))
    await operations["PutScalingPolicy"]({**POLICY, **names, "PolicyName": policy})

    for _ in range(2):
        for call in delete("e", "v"):
            if call.service == AUTOSCALING:
                try:
                    await operations["".join(map(str.capitalize, call.operation.split("_")))](call.parameters)
                except ScalableTargetMissing as error:
                    problems.append(error.message)

    assert (resources.targets, resources.policies) == ({}, {})
    assert problems
    assert all(problem.startswith(MISSING) for problem in problems)


@pytest.mark.parametrize("role", ["", "arn:aws:iam::123456789012:role/own"])
def test_a_target_has_a_role(tmp_path: Path, role: str) -> None:
    """A target has its client's role or the service's own, as at AWS: RoleARN is required there and not empty."""
    resources = Resources(tmp_path, ControlSettings())
    given = {**register("e"), "RoleARN": role} if role else register("e")
    resources.targets[given["ResourceId"]] = Resource(given, 0.0)
    unused: Any = None
    targets = ScalableTargets(resources, Arns("us-east-1", "123456789012"), unused)
    described: Any = targets.operations()["DescribeScalableTargets"]({"ServiceNamespace": NAMESPACE})

    [target] = described["ScalableTargets"]

    shape: Any = botocore.session.get_session().get_service_model("application-autoscaling").shape_for("ScalableTarget")
    assert ParamValidator().validate(target, shape).generate_report() == ""
    assert target["RoleARN"] == (
        role
        or "arn:aws:iam::123456789012:role/aws-service-role/sagemaker.application-autoscaling.amazonaws.com/"
        "AWSServiceRoleForApplicationAutoScaling_SageMakerEndpoint"
    )


async def test_a_policy_of_another_type_replaces_the_one_of_its_name(tmp_path: Path) -> None:
    """The configuration of the earlier type would make the policy invalid. One of the same type keeps the rest."""
    resources = Resources(tmp_path, ControlSettings())
    config = {"ProductionVariants": [{"VariantName": "v", "ModelName": "m"}]}
    resources.endpoints["e"] = EndpointResource("c", config, {}, 1, 0.0, 0.0, status="InService")
    resources.targets[register("e")["ResourceId"]] = Resource(register("e"), 0.0)
    unused: Any = ScaledDeployments()
    operations: Any = ScalableTargets(resources, Arns("us-east-1", "123456789012"), unused).operations()
    given = {key: value for key, value in register("e").items() if "Capacity" not in key}
    await operations["PutScalingPolicy"]({**given, **POLICY})
    await operations["PutScalingPolicy"]({**given, "PolicyName": "p", **STEPS})
    await operations["PutScalingPolicy"]({**given, "PolicyName": "p", "PolicyType": "StepScaling"})

    [policy] = resources.policies.values()
    assert {key: value for key, value in policy.values.items() if key.startswith(("Policy", "Step", "Target"))} == {
        "PolicyName": "p",
        **STEPS,
    }


async def test_a_variant_keeps_its_number_of_instances_when_scaling_ends(tmp_path: Path) -> None:
    """DesiredInstanceCount becomes the number of running instances, and a restart starts as many."""
    resources = Resources(tmp_path, ControlSettings())
    variant = {"VariantName": "v", "ModelName": "m", "InitialInstanceCount": 1}
    resources.endpoints["e"] = EndpointResource(
        "c", {"ProductionVariants": [variant]}, {}, 1, 0.0, 0.0, status="InService"
    )
    resource = register("e")["ResourceId"]
    resources.targets[resource] = Resource(register("e"), 0.0)
    unused: Any = ScaledDeployments()
    targets = ScalableTargets(resources, Arns("us-east-1", "123456789012"), unused)
    call: Any = targets.operations()["DeregisterScalableTarget"]
    await call({"ServiceNamespace": NAMESPACE, "ScalableDimension": DIMENSION, "ResourceId": resource})
    again = Resources(tmp_path, ControlSettings())
    assert again.endpoints["e"].count_of({"VariantName": "v", "InitialInstanceCount": 1}) == 3


async def test_a_target_of_a_variant_that_an_update_has_removed_can_be_deregistered(tmp_path: Path) -> None:
    """It would stay as long as the endpoint, which infrastructure as code takes for an error of its own."""
    resources = Resources(tmp_path, ControlSettings())
    config = {"ProductionVariants": [{"VariantName": "new", "ModelName": "m"}]}
    resources.endpoints["e"] = EndpointResource("c", config, {}, 2, 0.0, 0.0, status="InService")
    resource = register("e")["ResourceId"]
    given = {"ServiceNamespace": NAMESPACE, "ScalableDimension": DIMENSION, "ResourceId": resource}
    resources.targets[resource] = Resource(register("e"), 0.0)
    for name in ("p", "q"):
        resources.policies[f"{resource}|{name}"] = Resource({**given, **POLICY, "PolicyName": name}, 0.0)
    unused: Any = None
    operations: Any = ScalableTargets(resources, Arns("us-east-1", "123456789012"), unused).operations()
    with pytest.raises(RequestInvalid, match="is not a variant of a created endpoint"):
        await operations["PutScalingPolicy"]({**given, **POLICY})
    await operations["DeleteScalingPolicy"]({**given, "PolicyName": "p"})
    await operations["DeregisterScalableTarget"](given)

    assert (resources.targets, resources.policies) == ({}, {})


@pytest.mark.parametrize("operation", ["DeregisterScalableTarget", "DeleteScalingPolicy"])
async def test_a_change_that_cannot_be_saved_is_taken_back(tmp_path: Path, operation: str) -> None:
    """The variant is scaled as before, and target and policy are still there, as after a restart."""
    resources, deployments = Resources(tmp_path, ControlSettings()), ScaledDeployments()
    config = {"ProductionVariants": [{"VariantName": "v", "ModelName": "m"}]}
    resources.endpoints["e"] = EndpointResource("c", config, {}, 1, 0.0, 0.0, status="InService")
    resource = register("e")["ResourceId"]
    unused: Any = deployments
    operations: Any = ScalableTargets(resources, Arns("us-east-1", "123456789012"), unused).operations()
    await operations["RegisterScalableTarget"](register("e"))
    given = {"ServiceNamespace": NAMESPACE, "ScalableDimension": DIMENSION, "ResourceId": resource}
    await operations["PutScalingPolicy"]({**given, **POLICY})
    assert deployments.scaled
    (tmp_path / FILE).with_suffix(".partial").mkdir()
    with pytest.raises(IsADirectoryError):
        await operations[operation]({**given, "PolicyName": "p"})

    assert deployments.scaled
    assert (len(resources.targets), len(resources.policies)) == (1, 1)
