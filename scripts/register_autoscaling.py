"""Register a SageMaker endpoint's scaling policies with Application Auto Scaling, or remove them.

python scripts/register_autoscaling.py --config torchmoor.yaml             all entries of the file's group Autoscaling
python scripts/register_autoscaling.py --endpoint llava --variant AllTraffic    the published policies: 0 to 1 instances
python scripts/register_autoscaling.py --endpoint llava --dry-run          print the requests and send none
python scripts/register_autoscaling.py --endpoint llava --delete           remove the alarm, the policies and the target

Credentials and region come from the AWS configuration and environment, including AWS_REGION. The script can be run
again: it overwrites policies and alarms of the same names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from torchmoor.config.application_autoscaling import (
    DIMENSION,
    NAMESPACE,
    PREDEFINED_METRICS,
    STEP_METRIC,
    read_autoscaling,
    resource_of,
)
from torchmoor.config.aws import check_constraints, input_shape
from torchmoor.config.file import load_yaml
from torchmoor.config.scaling import ScalingSettings, TargetTracking, TrackedMetric
from torchmoor.errors import ConfigError

AUTOSCALING, CLOUDWATCH = "application-autoscaling", "cloudwatch"
PERIOD_S = 60
MISSING = (
    "No scaling policy found",
    "No scalable target found",
)  # AWS's texts; emulations of AWS use other error codes
CONFIG = Config(connect_timeout=10, read_timeout=30, retries={"mode": "standard", "max_attempts": 4})


@dataclass(frozen=True, slots=True)
class Call:
    """One request to AWS."""

    service: str
    operation: str
    parameters: dict[str, Any]


def register(endpoint: str, variant: str, settings: ScalingSettings) -> Iterator[Call]:
    """Yield the requests that register a variant's limits and policies, each policy before its alarm."""
    names = target_names(endpoint, variant)
    limits = {"MinCapacity": settings.min_capacity, "MaxCapacity": settings.max_capacity}
    yield Call(AUTOSCALING, "register_scalable_target", {**names, **limits})
    tracking, step = settings.tracking, settings.step
    if tracking is not None:
        configuration = {
            "TargetValue": float(tracking.target),
            **_tracked_metric(tracking.metric, endpoint),
            "ScaleInCooldown": int(tracking.scale_in_cooldown_s),
            "ScaleOutCooldown": int(tracking.scale_out_cooldown_s),
            "DisableScaleIn": not tracking.can_scale_in,
        }
        policy = {"PolicyName": _policy_name(tracking.metric, endpoint, variant), "PolicyType": "TargetTrackingScaling"}
        yield Call(
            AUTOSCALING,
            "put_scaling_policy",
            {**policy, **names, "TargetTrackingScalingPolicyConfiguration": configuration},
        )
    if step is not None:
        configuration = {
            "AdjustmentType": "ChangeInCapacity",
            "MetricAggregationType": "Average",
            "Cooldown": int(step.cooldown_s),
            "StepAdjustments": [{"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": step.num_instances}],
        }
        policy = {"PolicyName": _policy_name(STEP_METRIC, endpoint, variant), "PolicyType": "StepScaling"}
        yield Call(
            AUTOSCALING, "put_scaling_policy", {**policy, **names, "StepScalingPolicyConfiguration": configuration}
        )
        alarm = {
            "AlarmName": _policy_name(STEP_METRIC, endpoint, variant),
            **_metric(STEP_METRIC, endpoint),
            "Statistic": "Average",
            "Period": PERIOD_S,
            "EvaluationPeriods": 2,
            "DatapointsToAlarm": 2,
            "Threshold": 1.0,
            "ComparisonOperator": "GreaterThanOrEqualToThreshold",
            "TreatMissingData": "missing",
        }
        yield Call(CLOUDWATCH, "put_metric_alarm", alarm)


def target_names(endpoint: str, variant: str) -> dict[str, str]:
    """Return the parameters that name a variant in requests to Application Auto Scaling."""
    return {
        "ServiceNamespace": NAMESPACE,
        "ResourceId": resource_of(endpoint, variant),
        "ScalableDimension": DIMENSION,
    }


def delete(endpoint: str, variant: str) -> Iterator[Call]:
    """Yield the requests that undo `register`, in reverse order."""
    names = target_names(endpoint, variant)
    yield Call(CLOUDWATCH, "delete_alarms", {"AlarmNames": [_policy_name(STEP_METRIC, endpoint, variant)]})
    for metric in (STEP_METRIC, *TrackedMetric):
        policy = {"PolicyName": _policy_name(metric, endpoint, variant), **names}
        yield Call(AUTOSCALING, "delete_scaling_policy", policy)
    yield Call(AUTOSCALING, "deregister_scalable_target", names)


def _metric(name: str, endpoint: str) -> dict[str, Any]:
    """Return the description of an endpoint's metric in CloudWatch."""
    return {
        "MetricName": name,
        "Namespace": "AWS/SageMaker",
        "Dimensions": [{"Name": "EndpointName", "Value": endpoint}],
    }


def _tracked_metric(metric: TrackedMetric, endpoint: str) -> dict[str, Any]:
    """Return the member of a target tracking policy that names its metric."""
    if metric in PREDEFINED_METRICS:
        return {"PredefinedMetricSpecification": {"PredefinedMetricType": metric.value}}
    return {"CustomizedMetricSpecification": {**_metric(metric, endpoint), "Statistic": "Average"}}


def _policy_name(metric: str, endpoint: str, variant: str) -> str:
    """Return the name of a policy and its alarm. It contains the endpoint, since alarms are unique per account."""
    return f"{metric}-{endpoint}-{variant}"


def send(calls: Iterable[Call], client_of: Callable[[str], Any], *, skips_missing: bool) -> list[str]:
    """Send the requests; return a line for each.

    client_of: returns the client of a service. skips_missing: ignore that something to delete does not exist.
    """
    done: list[str] = []
    policy_arn = ""
    for call in calls:
        parameters = call.parameters
        if call.operation == "put_metric_alarm":  # its policy's ARN is in the previous answer
            parameters = {**parameters, "AlarmActions": [policy_arn]}
        try:
            answer = getattr(client_of(call.service), call.operation)(**parameters)
        except ClientError as error:
            if not skips_missing or not error.response["Error"]["Message"].startswith(MISSING):
                raise
            done.append(f"{call.operation}: nothing was there")
            continue
        policy_arn = answer.get("PolicyARN", policy_arn)
        done.append(call.operation)
    return done


def read_file(path: Path) -> dict[tuple[str, str], ScalingSettings]:
    """Return the entries of a configuration file's group Autoscaling. Raises ConfigError."""
    try:
        content = load_yaml(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(content, dict) or "Autoscaling" not in content:
        raise ConfigError(f"{path} has no group Autoscaling")
    variants: dict[tuple[str, str], int | None] = {}
    try:
        for endpoint in content.get("Endpoints", ()):
            config = endpoint["EndpointConfig"]
            name = endpoint.get("EndpointName", config.get("EndpointConfigName"))
            for variant in config["ProductionVariants"]:
                variants[name, variant["VariantName"]] = None
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a valid configuration: `torchmoor serve --check` explains why") from error
    return read_autoscaling(content["Autoscaling"], variants)


def _check_names(endpoint: str, variant: str) -> None:
    """Raise ConfigError for names that SageMaker refuses but the model of Application Auto Scaling accepts."""
    for key, name in (("EndpointName", endpoint), ("VariantName", variant)):
        shape = input_shape("sagemaker", "DescribeEndpoint").members["EndpointName"]  # variants have the same pattern
        check_constraints(name, shape, key)


def main(arguments: list[str]) -> int:
    """Register or delete the policies; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, metavar="FILE", help="a configuration file with a group Autoscaling")
    parser.add_argument("--endpoint", help="configure this endpoint by options instead of a file")
    parser.add_argument("--variant", default="AllTraffic", help="(default: AllTraffic)")
    parser.add_argument("--min", type=int, default=0, metavar="N", help="MinCapacity (default: 0)")
    parser.add_argument("--max", type=int, default=1, metavar="N", help="MaxCapacity (default: 1)")
    parser.add_argument("--target", type=float, default=5.0, help="target backlog per instance (default: 5.0)")
    parser.add_argument("--scale-in-cooldown", type=int, default=600, metavar="SECONDS", help="(default: 600)")
    parser.add_argument("--scale-out-cooldown", type=int, default=300, metavar="SECONDS", help="(default: 300)")
    parser.add_argument("--delete", action="store_true", help="remove what was registered")
    parser.add_argument("--dry-run", action="store_true", help="print the requests and send none")
    parser.add_argument("--region", help="default: the region of the AWS configuration")
    parser.add_argument("--endpoint-url", help="URL of an emulated AWS")
    options = parser.parse_args(arguments)
    if (options.config is None) is (options.endpoint is None):
        parser.error("give either --config or --endpoint")
    # boto3 ignores AWS_REGION, which takes precedence in AWS's other tools.
    region = options.region or os.environ.get("AWS_REGION") or None
    aws = partial(boto3.client, region_name=region, endpoint_url=options.endpoint_url, config=CONFIG)
    client_of = cache(aws)
    try:
        if options.config is not None:
            targets = read_file(options.config)
        else:
            tracking = TargetTracking(
                target=options.target,
                scale_in_cooldown_s=options.scale_in_cooldown,
                scale_out_cooldown_s=options.scale_out_cooldown,
            )
            settings = ScalingSettings(
                min_capacity=options.min, max_capacity=options.max, initial_count=options.min, tracking=tracking
            )
            targets = {(options.endpoint, options.variant): settings}
        for (endpoint, variant), scaling in targets.items():
            _check_names(endpoint, variant)
            calls = delete(endpoint, variant) if options.delete else register(endpoint, variant, scaling)
            if options.dry_run:
                for call in calls:
                    print(json.dumps({"service": call.service, "operation": call.operation, **call.parameters}))
                continue
            for line in send(calls, client_of, skips_missing=options.delete):
                print(f"{resource_of(endpoint, variant)}: {line}")
    except (ConfigError, ClientError, BotoCoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
