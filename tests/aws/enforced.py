"""Enforce IAM: check moto's users and policies against the resources that a request really names.

moto enforces actions, but for most services it assumes "*" as the resource, and it evaluates conditions only in trust
policies. Here a request's resources come from its parameters, as in AWS's service authorization reference, and
conditions are evaluated.
"""

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import pytest
from moto import settings
from moto.core.authorization import ActionAuthenticatorMixin
from moto.iam.access_control import IAMPolicyStatement, IAMRequest, PermissionResult

from tests.aws.conftest import ACCOUNT, REGION

# Attributes of a request besides its resources.
CONTEXT = {"application-autoscaling:service-namespace": "sagemaker", "iam:PassedToService": "sagemaker.amazonaws.com"}


def is_allowed(policies: list[Any], action: str, resource: str, context: Mapping[str, str] = CONTEXT) -> bool:
    """Return whether documents allow an action on a resource: one allows it, and none denies it."""
    found = set()
    for policy in policies:
        for statement in policy["Statement"]:
            if _holds(statement.get("Condition", {}), context):
                bare = {key: value for key, value in statement.items() if key != "Condition"}
                found.add(IAMPolicyStatement(bare).is_action_permitted(action, resource))
    return PermissionResult.PERMITTED in found and PermissionResult.DENIED not in found


def _holds(condition: Mapping[str, Mapping[str, Any]], context: Mapping[str, str]) -> bool:
    for operator, wanted in condition.items():
        assert operator in ("StringEquals", "StringLike", "Bool"), operator
        for key, values in wanted.items():
            patterns = [values] if isinstance(values, str) else values
            actual = context.get(key)
            if actual is None or not any(fnmatchcase(actual, pattern) for pattern in patterns):
                return False
    return True


def resources(service: str, action: str, request: Any) -> Iterator[str]:
    """Return the ARNs that a request to moto names."""
    get = request._get_param
    arn = f"arn:aws:{service}:{REGION}:{ACCOUNT}:"
    match service, action:
        case "sagemaker", "CreateEndpoint" | "UpdateEndpoint":
            yield f"{arn}endpoint/{get('EndpointName')}"
            yield f"{arn}endpoint-config/{get('EndpointConfigName')}"
        case "sagemaker", "DescribeEndpoint" | "DeleteEndpoint":
            yield f"{arn}endpoint/{get('EndpointName')}"
        case "sagemaker", "CreateEndpointConfig" | "DescribeEndpointConfig" | "DeleteEndpointConfig":
            yield f"{arn}endpoint-config/{get('EndpointConfigName')}"
        case "sagemaker", "CreateModel" | "DescribeModel" | "DeleteModel":
            yield f"{arn}model/{get('ModelName')}"
        case "sagemaker", "ListTags":
            yield get("ResourceArn")
        case "iam", "GetRole":
            yield f"arn:aws:iam::{ACCOUNT}:role/{get('RoleName')}"
        case "ecr", "DescribeImages":
            yield f"{arn}repository/{get('repositoryName')}"
        case "logs", "DescribeLogStreams" | "GetLogEvents":
            yield f"{arn}log-group:{get('logGroupName')}:log-stream:one"
        case "cloudwatch", "PutMetricAlarm":
            yield f"{arn}alarm:{get('AlarmName')}"
        case "cloudwatch", "DeleteAlarms":
            yield from (f"{arn}alarm:{name}" for name in get("AlarmNames"))
        case "application-autoscaling", _ if not action.startswith("Describe"):
            yield f"{arn}scalable-target/0"
        case _:
            yield "*"


def enforce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, accept only callers with a user's keys, and only what their policies allow."""

    def authorize(request: Any, resource: str = "*") -> None:
        told = IAMRequest(
            account_id=request.current_account,
            method=request.method,
            path=request.raw_path,
            data=request.data,
            body=request.raw_body,
            headers=request.headers,
            action=request._get_action(),
        )
        service, _, action = told._action.partition(":")
        service = {"monitoring": "cloudwatch"}.get(service, service)
        if told._action == "sts:GetCallerIdentity":  # no policy can forbid GetCallerIdentity
            return
        policies = [_document(policy) for policy in told._access_key.collect_policies()]
        for named in resources(service, action, request):
            if not is_allowed(policies, f"{service}:{action}", named):
                told._raise_access_denied()

    monkeypatch.setattr(ActionAuthenticatorMixin, "_authenticate_and_authorize_normal_action", authorize)
    monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)  # for S3, moto does know the resources


def _document(policy: Any) -> Any:
    found = policy["policy_document"] if isinstance(policy, dict) else policy
    return json.loads(found) if isinstance(found, str) else json.loads(found.document)
