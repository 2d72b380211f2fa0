"""Application Auto Scaling for the variants of created endpoints: scalable targets, policies and activities.

The autoscaler (torchmoor.fleet.autoscaler) scales each variant that has a target with a policy. Its settings are those
of the configuration file's group Autoscaling.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchmoor.config.application_autoscaling import DIMENSION, NAMESPACE, read_entry, read_policy, resource_of
from torchmoor.config.scaling import ScalingSettings
from torchmoor.control.arns import Arns
from torchmoor.control.deployments import Deployments
from torchmoor.control.listing import ListedResource, list_page
from torchmoor.control.models import as_time
from torchmoor.control.protocol import Operation, Values
from torchmoor.control.resources import Change, EndpointResource, Resource, Resources
from torchmoor.errors import ConfigError, RequestInvalid, ScalableTargetMissing
from torchmoor.proxy.instances.endpoint import Variant

MAX_ACTIVITIES = 1000  # remembered
PAGE_SIZE = 50  # the service's own
_KEPT_OF_TARGET = ("MinCapacity", "MaxCapacity", "RoleARN")


class ScalableTargets:
    """The scalable targets of created endpoints."""

    def __init__(self, resources: Resources, arns: Arns, deployments: Deployments) -> None:
        self._resources = resources
        self._arns = arns
        self._deployments = deployments
        self._activities: deque[ListedResource] = deque(maxlen=MAX_ACTIVITIES)
        self._applying = asyncio.Lock()

    def operations(self) -> dict[str, Operation]:
        """Return the operations by their names."""
        return {
            "RegisterScalableTarget": self._register,
            "DescribeScalableTargets": self._describe_targets,
            "DeregisterScalableTarget": self._deregister,
            "PutScalingPolicy": self._put_policy,
            "DescribeScalingPolicies": self._describe_policies,
            "DeleteScalingPolicy": self._delete_policy,
            "DescribeScalingActivities": self._describe_activities,
        }

    async def apply(self, endpoint: str) -> None:
        """Scale the variants of an endpoint that has just been deployed, unless it is gone. Raises TorchmoorError."""
        async with self._applying:
            found = self._resources.endpoints.get(endpoint)
            for variant in () if found is None else found.variants:
                await self._apply(endpoint, variant)

    def forget(self, endpoint: str) -> None:
        """Remove the targets and policies of an endpoint that is gone."""
        prefix = resource_of(endpoint, "")
        for kept in (self._resources.targets, self._resources.policies):
            for key in [key for key in kept if key.startswith(prefix)]:
                del kept[key]

    def check_update(self, endpoint: str, old: EndpointResource, new: EndpointResource) -> None:
        """Raise RequestInvalid if a variant with a target would be removed, or get another instance type, as at AWS."""
        kept = {name: variant.get("InstanceType") for name, variant in new.variants.items()}
        refused = [
            name
            for name, variant in old.variants.items()
            if resource_of(endpoint, name) in self._resources.targets
            and (name not in kept or kept[name] != variant.get("InstanceType"))
        ]
        if refused:
            raise RequestInvalid(
                f'The variant(s) "{json.dumps(refused)}" must be deregistered as scalable targets with AWS Auto '
                "Scaling before they can be removed or have their instance type updated."
            )

    def note(self, variant: Variant, before: int) -> None:
        """Record an activity: the autoscaler has changed the desired number of instances."""
        assert variant.scale is not None
        now = time.time()
        resource = resource_of(variant.endpoint, variant.name)
        activity = str(uuid.uuid4())
        summary = {
            "ActivityId": activity,
            "ServiceNamespace": NAMESPACE,
            "ResourceId": resource,
            "ScalableDimension": DIMENSION,
            "Description": f"Setting desired instance count to {variant.scale.desired}.",
            "Cause": f"From {before} to {variant.scale.desired} instances: {variant.scale.why}",
            "StartTime": as_time(now),
            "EndTime": as_time(now),
            "StatusCode": "Successful",
        }
        self._activities.append(ListedResource(activity, now, summary=summary))

    async def _register(self, values: Values) -> Values:
        resource = _check(values)
        before = self._resources.targets.get(resource)
        self._check_variant(resource)
        if any(values.get("SuspendedState", {}).values()):
            raise RequestInvalid("SuspendedState is not supported here: deregister the target instead.")
        if before is None:
            self._resources.check_number(self._resources.targets, "scalable targets")
        given = {key: values[key] for key in _KEPT_OF_TARGET if key in values}
        target = Resource({**(before.values if before else {}), **given}, before.created if before else time.time())
        for key in ("MinCapacity", "MaxCapacity"):
            if key not in target.values:
                raise RequestInvalid(f"{key} is missing: a new scalable target needs it.")
        least, most = target.values["MinCapacity"], target.values["MaxCapacity"]
        if least < 0:
            raise RequestInvalid(f"MinCapacity must be 0 or more, not {least}.")
        if most < max(1, least):
            raise RequestInvalid("MaxCapacity must be MinCapacity or more, and 1 or more.")
        await self._change(resource, Change(self._resources.targets, resource, target))
        return {"ScalableTargetARN": self._arns.target_arn(resource)}

    def _describe_targets(self, values: Values) -> Values:
        _check_namespace(values)
        wanted = values.get("ResourceIds")
        rows = [
            ListedResource(
                resource,
                target.created,
                summary={
                    "ServiceNamespace": NAMESPACE,
                    "ResourceId": resource,
                    "ScalableDimension": DIMENSION,
                    "RoleARN": self._arns.scaling_role_arn(),
                    **target.values,
                    "CreationTime": as_time(target.created),
                    "SuspendedState": dict.fromkeys(
                        ("DynamicScalingInSuspended", "DynamicScalingOutSuspended", "ScheduledScalingSuspended"), False
                    ),
                    "ScalableTargetARN": self._arns.target_arn(resource),
                },
            )
            for resource, target in self._resources.targets.items()
            if wanted is None or resource in wanted
        ]
        return list_page(rows, {"MaxResults": PAGE_SIZE, **values}, "ScalableTargets")

    async def _deregister(self, values: Values) -> Values:
        resource = self._check_target(values, "No scalable target found")
        policies = self._resources.policies
        of_target = [key for key, policy in policies.items() if policy.values["ResourceId"] == resource]
        changes = [Change(policies, key, None) for key in of_target]
        await self._change(resource, Change(self._resources.targets, resource, None), *changes)
        return {}

    async def _put_policy(self, values: Values) -> Values:
        resource = self._check_target(values, "No scalable target registered")
        self._check_variant(resource)
        key = f"{resource}|{values['PolicyName']}"
        before = self._resources.policies.get(key)
        kept = before.values if before else {}
        if values.get("PolicyType", kept.get("PolicyType")) != kept.get("PolicyType"):
            kept = {}  # another type's configuration
        policy = Resource({**kept, **values}, before.created if before else time.time())
        with _refusing():
            read_policy(policy.values, "PutScalingPolicy", resource)
        await self._change(resource, Change(self._resources.policies, key, policy))
        return {"PolicyARN": self._arns.policy_arn(resource, values["PolicyName"]), "Alarms": []}

    def _describe_policies(self, values: Values) -> Values:
        _check_namespace(values)
        wanted, names = values.get("ResourceId"), values.get("PolicyNames")
        rows = [
            ListedResource(
                key,
                policy.created,
                summary={
                    **policy.values,
                    "PolicyARN": self._arns.policy_arn(policy.values["ResourceId"], policy.values["PolicyName"]),
                    "CreationTime": as_time(policy.created),
                    "Alarms": [],
                },
            )
            for key, policy in self._resources.policies.items()
            if wanted in (None, policy.values["ResourceId"]) and (names is None or policy.values["PolicyName"] in names)
        ]
        return list_page(rows, {"MaxResults": PAGE_SIZE, **values}, "ScalingPolicies")

    async def _delete_policy(self, values: Values) -> Values:
        resource = _check(values)
        key = f"{resource}|{values['PolicyName']}"
        if key not in self._resources.policies:
            raise _missing("No scaling policy found", resource, f", policy name: {values['PolicyName']}")
        await self._change(resource, Change(self._resources.policies, key, None))
        return {}

    def _describe_activities(self, values: Values) -> Values:
        _check_namespace(values)
        rows = [each for each in self._activities if values.get("ResourceId") in (None, each.summary["ResourceId"])]
        return list_page(rows, {"MaxResults": PAGE_SIZE, **values}, "ScalingActivities")

    async def _change(self, resource: str, *changes: Change) -> None:
        """Set or remove targets and policies of a ResourceId, and scale its variant accordingly.

        Changes nothing if that is refused or cannot be saved.
        """
        async with self._applying:
            place = self._find_variant(resource)
            for each in changes:
                if each.value is not None:
                    self._check_variant(resource)  # the endpoint may have been deleted meanwhile
                    self._resources.check_room(each.value.values)
            undo = [each.make() for each in changes]
            is_applied = False
            try:
                if place is not None:
                    await self._apply(*place)
                    is_applied = True
                await self._resources.save()
            except Exception:
                for each in undo:
                    each.make()
                if place is not None and is_applied:
                    await self._apply(*place)
                raise

    async def _apply(self, endpoint: str, variant: str) -> None:
        """Let the autoscaler scale a deployed variant. Without a policy, the variant keeps its number of instances."""
        settings, found = self._read(endpoint, variant), self._resources.endpoints.get(endpoint)
        if found is not None and found.status == "InService":
            was_scaled = self._deployments.is_scaled(endpoint, variant)
            await self._deployments.scale(endpoint, variant, settings)
            if was_scaled and settings is None:
                found.counts[variant] = self._deployments.count_of(endpoint, variant)

    def _read(self, endpoint: str, variant: str) -> ScalingSettings | None:
        """Return a variant's settings; None without a target or a policy. Raises RequestInvalid."""
        resource = resource_of(endpoint, variant)
        target = self._resources.targets.get(resource)
        policies = [each.values for each in self._resources.policies.values() if each.values["ResourceId"] == resource]
        if target is None or not policies:
            return None
        least, most = target.values["MinCapacity"], target.values["MaxCapacity"]
        count = min(max(self._deployments.count_of(endpoint, variant), least), most)
        entry = {"ResourceId": resource, "MinCapacity": least, "MaxCapacity": most, "ScalingPolicies": policies}
        with _refusing():
            return read_entry(entry, resource, count)

    def _check_variant(self, resource: str) -> None:
        """Raise RequestInvalid unless a ResourceId names a variant."""
        if self._find_variant(resource) is None:
            raise RequestInvalid(
                f"ResourceId {resource} is not a variant of a created endpoint: endpoint/NAME/variant/NAME."
            )

    def _find_variant(self, resource: str) -> tuple[str, str] | None:
        """Return the endpoint and the variant of a ResourceId; None if an update or a deletion has removed it."""
        for name, endpoint in self._resources.endpoints.items():
            for variant in endpoint.variants:
                if resource == resource_of(name, variant):
                    return name, variant
        return None

    def _check_target(self, values: Mapping[str, Any], problem: str) -> str:
        """Return a request's ResourceId. Raises ScalableTargetMissing with this problem, RequestInvalid."""
        resource = _check(values)
        if resource not in self._resources.targets:
            raise _missing(problem, resource)
        return resource


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise RequestInvalid for a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise RequestInvalid(str(error)) from error


def _missing(problem: str, resource: str, more: str = "") -> ScalableTargetMissing:
    """Make the error about a target or policy that does not exist, in the service's words, which scripts recognize."""
    return ScalableTargetMissing(
        f"{problem} for service namespace: {NAMESPACE}, resource ID: {resource}, scalable dimension: {DIMENSION}{more}"
    )


def _check(values: Mapping[str, Any]) -> str:
    """Return a request's ResourceId. Raises RequestInvalid."""
    _check_namespace(values)
    if values.get("ScalableDimension", DIMENSION) != DIMENSION:
        raise RequestInvalid(f"ScalableDimension must be {DIMENSION}, not {values['ScalableDimension']}.")
    return str(values["ResourceId"])


def _check_namespace(values: Mapping[str, Any]) -> None:
    if values["ServiceNamespace"] != NAMESPACE:
        raise RequestInvalid(f"ServiceNamespace must be {NAMESPACE}, not {values['ServiceNamespace']}.")
