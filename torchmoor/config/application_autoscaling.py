"""The group Autoscaling of the configuration file: one entry per variant, in Application Auto Scaling's form.

An entry is what register_scalable_target takes, with what put_scaling_policy takes in ScalingPolicies. Both are checked
against botocore's own service model. docs/autoscaling.md has an example. scripts/register_autoscaling.py gives the same
entries to AWS.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from torchmoor.config.aws import check_input, input_shape
from torchmoor.config.group import read_list, read_mapping
from torchmoor.config.scaling import ScalingSettings, StepScaling, TargetTracking, TrackedMetric
from torchmoor.errors import ConfigError

logger = logging.getLogger(__name__)

SERVICE = "application-autoscaling"
NAMESPACE = "sagemaker"
DIMENSION = "sagemaker:variant:DesiredInstanceCount"
STEP_METRIC = "HasBacklogWithoutCapacity"
PREDEFINED_METRICS = (TrackedMetric.CONCURRENCY, TrackedMetric.INVOCATIONS)
DEFAULT_COOLDOWN_S = 300  # the service's own, for SageMaker's variants

_RESOURCE = re.compile(r"endpoint/([^/]+)/variant/([^/]+)")
_FIXED = {"ServiceNamespace": NAMESPACE, "ScalableDimension": DIMENSION}
_OF_TARGET = {"ResourceId", "MinCapacity", "MaxCapacity", *_FIXED}
_POLICIES = {"tracking", "step"}
_OWN = {name for name, field in ScalingSettings.model_fields.items() if field.alias is None} - _POLICIES
_OF_ENTRY = {*_OF_TARGET, "ScalingPolicies", *_OWN}
_OF_POLICY = {
    *("PolicyName", "PolicyType", "ResourceId", *_FIXED),
    *("TargetTrackingScalingPolicyConfiguration", "StepScalingPolicyConfiguration"),
}
_CUSTOMIZED, _PREDEFINED = "CustomizedMetricSpecification", "PredefinedMetricSpecification"
_OF_TRACKING = {"TargetValue", "ScaleInCooldown", "ScaleOutCooldown", "DisableScaleIn", _CUSTOMIZED, _PREDEFINED}
_OF_STEP = {"AdjustmentType", "StepAdjustments", "Cooldown", "MetricAggregationType"}


def resource_of(endpoint: str, variant: str) -> str:
    """Return a variant's ResourceId."""
    return f"endpoint/{endpoint}/variant/{variant}"


def read_autoscaling(
    entries: object, initial_counts: Mapping[tuple[str, str], int | None]
) -> dict[tuple[str, str], ScalingSettings]:
    """Return variants' settings. initial_counts: each variant's InitialInstanceCount. Raises ConfigError."""
    found: dict[tuple[str, str], ScalingSettings] = {}
    for number, entry in enumerate(read_list(entries, "Autoscaling")):
        where = f"Autoscaling[{number}]"
        values = read_mapping(entry, where, _OF_ENTRY)
        match = _RESOURCE.fullmatch(str(values.get("ResourceId")))
        variant = None if match is None else (match[1], match[2])
        if variant is None or variant not in initial_counts:
            known = ", ".join(resource_of(*each) for each in initial_counts)
            raise ConfigError(f"{where}.ResourceId must be one of {known}, not {values.get('ResourceId')!r}")
        if variant in found:
            raise ConfigError(f"{where}.ResourceId {values['ResourceId']} is given twice")
        found[variant] = read_entry(values, where, initial_counts[variant])
    return found


def read_entry(values: Mapping[str, Any], where: str, initial_count: int | None) -> ScalingSettings:
    """Return a variant's settings. initial_count: its InitialInstanceCount. Raises ConfigError."""
    for key in ("MinCapacity", "MaxCapacity"):
        if key not in values:
            raise ConfigError(f"{where}.{key} is missing")
    _check_fixed(values, where)
    target = {**_FIXED, **{key: value for key, value in values.items() if key in _OF_TARGET}}
    check_input(target, input_shape(SERVICE, "RegisterScalableTarget"), where)
    own = {key: values[key] for key in ("MinCapacity", "MaxCapacity", *_OWN) if key in values}
    own["InitialInstanceCount"] = values["MinCapacity"] if initial_count is None else initial_count
    if "ScalingPolicies" in values:
        own |= _read_policies(values, where)
        if own["MinCapacity"] == 0 and own["tracking"] is not None and own["step"] is None:
            own["step"] = StepScaling()
            logger.info(
                "%s: MinCapacity 0 has no StepScaling policy on %s; one that starts an instance is assumed, because "
                "target tracking has no metric while there is no instance",
                where,
                STEP_METRIC,
            )
    return ScalingSettings.read(own, where)


def _read_policies(entry: Mapping[str, Any], where: str) -> dict[str, TargetTracking | StepScaling | None]:
    """Return at most one policy of each kind. A kind that is absent is not applied."""
    policies = entry["ScalingPolicies"]
    if not isinstance(policies, list):
        raise ConfigError(f"{where}.ScalingPolicies must be a list, not {policies!r}")
    found: dict[str, TargetTracking | StepScaling | None] = dict.fromkeys(_POLICIES)
    for number, policy in enumerate(policies):
        here = f"{where}.ScalingPolicies[{number}]"
        settings = read_policy(policy, here, entry["ResourceId"])
        kind = "tracking" if isinstance(settings, TargetTracking) else "step"
        if found[kind] is not None:
            raise ConfigError(f"{here}: there is a {policy['PolicyType']} policy already")
        found[kind] = settings
    return found


def read_policy(policy: object, where: str, resource: str) -> TargetTracking | StepScaling:
    """Return a policy's settings. Raises ConfigError."""
    values = read_mapping(policy, where, _OF_POLICY)
    _check_fixed(values, where)
    complete = {"PolicyName": "policy", "ResourceId": resource, **_FIXED, **values}
    check_input(complete, input_shape(SERVICE, "PutScalingPolicy"), where)
    tracking, step = (values.get(f"{kind}ScalingPolicyConfiguration") for kind in ("TargetTracking", "Step"))
    kind = {"TargetTrackingScaling": "tracking", "StepScaling": "step"}.get(str(values.get("PolicyType")))
    if kind is None or (tracking is None) is (kind == "tracking") or (step is None) is (kind == "step"):
        raise ConfigError(
            f"{where} must have PolicyType TargetTrackingScaling or StepScaling, and the configuration of that name"
        )
    return _read_step(step, where) if tracking is None else _read_tracking(tracking, where)


def _read_tracking(given: object, where: str) -> TargetTracking:
    where += ".TargetTrackingScalingPolicyConfiguration"
    values = read_mapping(given, where, _OF_TRACKING)
    metric = _read_metric(values, where)
    cooldowns = {key: values.get(key, DEFAULT_COOLDOWN_S) for key in ("ScaleInCooldown", "ScaleOutCooldown")}
    can_scale_in = not values.get("DisableScaleIn", False)
    own = {"metric": metric, "TargetValue": values["TargetValue"], "can_scale_in": can_scale_in}
    return TargetTracking.read({**own, **cooldowns}, where)


def _read_metric(values: Mapping[str, Any], where: str) -> TrackedMetric:
    """Return the metric that a target tracking policy names."""
    if _CUSTOMIZED in values and _PREDEFINED in values:
        raise ConfigError(f"{where}: give {_CUSTOMIZED} or {_PREDEFINED}, not both")
    key, known = _CUSTOMIZED, [TrackedMetric.BACKLOG]
    name = values.get(_CUSTOMIZED, {}).get("MetricName", TrackedMetric.BACKLOG)
    if _PREDEFINED in values:
        key, known, name = _PREDEFINED, [*PREDEFINED_METRICS], values[_PREDEFINED]["PredefinedMetricType"]
    if name not in known:
        raise ConfigError(f"{where}.{key}: the metric must be {' or '.join(known)}, not {name!r}")
    return TrackedMetric(name)


def _read_step(given: object, where: str) -> StepScaling:
    """Return the step that applies to a metric of exactly 1, the threshold of its alarm."""
    where += ".StepScalingPolicyConfiguration"
    values = read_mapping(given, where, _OF_STEP)
    kind = values.get("AdjustmentType")
    if kind not in ("ChangeInCapacity", "ExactCapacity"):
        raise ConfigError(f"{where}.AdjustmentType must be ChangeInCapacity or ExactCapacity, not {kind!r}")
    for step in values.get("StepAdjustments", ()):
        if step.get("MetricIntervalLowerBound", 0) <= 0 < step.get("MetricIntervalUpperBound", 1):
            cooldown_s = values.get("Cooldown", DEFAULT_COOLDOWN_S)
            return StepScaling.read({"ScalingAdjustment": step["ScalingAdjustment"], "Cooldown": cooldown_s}, where)
    raise ConfigError(
        f"{where}.StepAdjustments must have one for the interval from 0: {STEP_METRIC} is never more than 1"
    )


def _check_fixed(values: Mapping[str, Any], where: str) -> None:
    for key, fixed in _FIXED.items():
        if values.get(key, fixed) != fixed:
            raise ConfigError(f"{where}.{key} must be {fixed}, not {values[key]!r}")
