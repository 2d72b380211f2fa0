"""The group Autoscaling of the configuration file: one entry a variant, spelt as Application Auto Scaling spells it.

An entry is what register_scalable_target takes, with what put_scaling_policy takes in ScalingPolicies; both are checked
against botocore's own service model. docs/autoscaling.md has an example. scripts/register_autoscaling.py gives the same
entries to AWS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import botocore.session
from botocore.model import ServiceModel
from botocore.validate import ParamValidator

from torchmoor.config.scaling import ScalingSettings, StepScaling, TargetTracking
from torchmoor.errors import ConfigError

NAMESPACE = "sagemaker"
DIMENSION = "sagemaker:variant:DesiredInstanceCount"
TRACKED_METRIC = "ApproximateBacklogSizePerInstance"
STEP_METRIC = "HasBacklogWithoutCapacity"

_RESOURCE = re.compile(r"endpoint/([^/]+)/variant/([^/]+)")
_FIXED = {"ServiceNamespace": NAMESPACE, "ScalableDimension": DIMENSION}
_OF_TARGET = {"ResourceId", "MinCapacity", "MaxCapacity", *_FIXED}
_OF_ENTRY = {*_OF_TARGET, "ScalingPolicies", "max_hold_s", "max_held"}
_OF_POLICY = {
    *("PolicyName", "PolicyType", "ResourceId", *_FIXED),
    *("TargetTrackingScalingPolicyConfiguration", "StepScalingPolicyConfiguration"),
}
_OF_TRACKING = {"TargetValue", "ScaleInCooldown", "ScaleOutCooldown", "DisableScaleIn", "CustomizedMetricSpecification"}
_OF_STEP = {"AdjustmentType", "StepAdjustments", "Cooldown", "MetricAggregationType"}


def resource_of(endpoint: str, variant: str) -> str:
    """A variant's ResourceId."""
    return f"endpoint/{endpoint}/variant/{variant}"


def read_autoscaling(
    entries: object, initial_counts: Mapping[tuple[str, str], int | None]
) -> dict[tuple[str, str], ScalingSettings]:
    """The settings of endpoints' variants. initial_counts: every variant's InitialInstanceCount. Raises ConfigError."""
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"Autoscaling must be a list of one or more, not {entries!r}")
    found: dict[tuple[str, str], ScalingSettings] = {}
    for number, entry in enumerate(entries):
        where = f"Autoscaling[{number}]"
        values = _mapping(entry, where, _OF_ENTRY)
        match = _RESOURCE.fullmatch(str(values.get("ResourceId")))
        variant = None if match is None else (match[1], match[2])
        if variant is None or variant not in initial_counts:
            known = ", ".join(resource_of(*each) for each in initial_counts)
            raise ConfigError(f"{where}.ResourceId must be one of {known}, not {values.get('ResourceId')!r}")
        if variant in found:
            raise ConfigError(f"{where}.ResourceId {values['ResourceId']} is given twice")
        found[variant] = _read_entry(values, where, initial_counts[variant])
    return found


def _read_entry(values: Mapping[str, Any], where: str, initial_count: int | None) -> ScalingSettings:
    for key in ("MinCapacity", "MaxCapacity"):
        if key not in values:
            raise ConfigError(f"{where}.{key} is missing")
    _check_fixed(values, where)
    _check("RegisterScalableTarget", {**_FIXED, **{k: v for k, v in values.items() if k in _OF_TARGET}}, where)
    more: dict[str, Any] = {}
    for key in ("max_hold_s", "max_held"):
        if key in values:
            if not isinstance(values[key], (int, float)) or isinstance(values[key], bool):
                raise ConfigError(f"{where}.{key} must be a number, not {values[key]!r}")
            more[key] = values[key]
    if "ScalingPolicies" in values:
        more |= _read_policies(values, where)
    least = values["MinCapacity"]
    try:
        return ScalingSettings(
            min_capacity=least,
            max_capacity=values["MaxCapacity"],
            initial_count=least if initial_count is None else initial_count,
            **more,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _read_policies(entry: Mapping[str, Any], where: str) -> dict[str, TargetTracking | StepScaling | None]:
    """At most one of each kind; a kind that is not there is not applied."""
    policies = entry["ScalingPolicies"]
    if not isinstance(policies, list):
        raise ConfigError(f"{where}.ScalingPolicies must be a list, not {policies!r}")
    found: dict[str, TargetTracking | StepScaling | None] = {"tracking": None, "step": None}
    for number, policy in enumerate(policies):
        here = f"{where}.ScalingPolicies[{number}]"
        values = _mapping(policy, here, _OF_POLICY)
        _check_fixed(values, here)
        _check(
            "PutScalingPolicy", {"PolicyName": "policy", "ResourceId": entry["ResourceId"], **_FIXED, **values}, here
        )
        tracking, step = (values.get(f"{kind}ScalingPolicyConfiguration") for kind in ("TargetTracking", "Step"))
        kind = {"TargetTrackingScaling": "tracking", "StepScaling": "step"}.get(str(values.get("PolicyType")))
        if kind is None or (tracking is None) is (kind == "tracking") or (step is None) is (kind == "step"):
            raise ConfigError(
                f"{here} must have PolicyType TargetTrackingScaling or StepScaling, and the configuration of that name"
            )
        if found[kind] is not None:
            raise ConfigError(f"{here}: there is a {values['PolicyType']} policy already")
        try:
            found[kind] = _read_step(step, here) if tracking is None else _read_tracking(tracking, here)
        except ConfigError as error:
            raise ConfigError(f"{here}: {error}") from error
    return found


def _read_tracking(given: object, where: str) -> TargetTracking:
    values = _mapping(given, f"{where}.TargetTrackingScalingPolicyConfiguration", _OF_TRACKING)
    metric = values.get("CustomizedMetricSpecification", {}).get("MetricName", TRACKED_METRIC)
    if metric != TRACKED_METRIC:
        raise ConfigError(f"the metric must be {TRACKED_METRIC}, not {metric!r}")
    return TargetTracking(
        target=values["TargetValue"],
        scale_in_cooldown_s=values.get("ScaleInCooldown", 300),  # the service's own default for SageMaker's variants
        scale_out_cooldown_s=values.get("ScaleOutCooldown", 300),
        can_scale_in=not values.get("DisableScaleIn", False),
    )


def _read_step(given: object, where: str) -> StepScaling:
    """The step that a metric of exactly 1, the threshold of its alarm, leads to."""
    values = _mapping(given, f"{where}.StepScalingPolicyConfiguration", _OF_STEP)
    kind = values.get("AdjustmentType")
    if kind not in ("ChangeInCapacity", "ExactCapacity"):
        raise ConfigError(f"AdjustmentType must be ChangeInCapacity or ExactCapacity (from none), not {kind!r}")
    for step in values.get("StepAdjustments", ()):
        if step.get("MetricIntervalLowerBound", 0) <= 0 < step.get("MetricIntervalUpperBound", 1):
            return StepScaling(num_instances=step["ScalingAdjustment"], cooldown_s=values.get("Cooldown", 300))
    raise ConfigError(f"StepAdjustments must have one for the interval from 0: {STEP_METRIC} is never more than 1")


def _check_fixed(values: Mapping[str, Any], where: str) -> None:
    for key, fixed in _FIXED.items():
        if values.get(key, fixed) != fixed:
            raise ConfigError(f"{where}.{key} must be {fixed}, not {values[key]!r}")


def _check(operation: str, values: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError unless the types and names are those of the operation's input."""
    shape = _service().operation_model(operation).input_shape
    report = ParamValidator().validate(values, shape)
    if report.has_errors():
        raise ConfigError(f"{where}: {'; '.join(report.generate_report().splitlines())}")


@cache
def _service() -> ServiceModel:
    return botocore.session.Session().get_service_model("application-autoscaling")


def _mapping(value: object, where: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be keys and values, not {value!r}")
    for key in value:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; known are {', '.join(sorted(known))}")
    return value
