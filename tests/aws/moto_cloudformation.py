"""Add resources to moto's CloudFormation that moto's services support but its stacks do not.

Each becomes the request that CloudFormation would send, sent by boto3 to the same server. So botocore validates its
parameters, and tests inspect it with the service's own operations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from moto.cloudformation import parsing
from moto.core.common_models import CloudFormationModel
from moto.s3.models import FakeBucket
from moto.sagemaker.models import FakeEndpoint

from torchmoor.config.application_autoscaling import DIMENSION, NAMESPACE

SCALING = "application-autoscaling"


class Adapter(CloudFormationModel):
    """A resource that requests create, and create again when it changes."""

    KIND: ClassVar[str]
    account: ClassVar[Any]  # an Aws

    def __init__(self, physical_resource_id: str, properties: Mapping[str, Any]) -> None:
        self.physical_resource_id = physical_resource_id
        self.properties = properties

    @classmethod
    def put(cls, name: str, properties: dict[str, Any]) -> str:
        """Create the resource and return the value of its `Ref`."""
        raise NotImplementedError

    @classmethod
    def remove(cls, resource: str) -> None:
        raise NotImplementedError

    @classmethod
    def cloudformation_type(cls) -> str:
        return getattr(cls, "KIND", "")

    @classmethod
    def cloudformation_name_type(cls) -> str:
        return ""

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return False

    @classmethod
    def create_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Any, account_id: str, region_name: str, **more: Any
    ) -> Adapter:
        properties = cloudformation_json["Properties"]
        return cls(cls.put(resource_name, properties), properties)

    @classmethod
    def update_from_cloudformation_json(
        cls,
        original_resource: Any,
        new_resource_name: str,
        cloudformation_json: Any,
        account_id: str,
        region_name: str,
    ) -> Adapter:
        return cls.create_from_cloudformation_json(new_resource_name, cloudformation_json, account_id, region_name)

    def delete(self, account_id: str, region_name: str) -> None:
        """Delete the resource; moto calls this method if it exists."""
        self.remove(self.physical_resource_id)

    @classmethod
    def delete_from_cloudformation_json(cls, *args: Any, **options: Any) -> None:
        raise NotImplementedError

    def is_created(self) -> bool:
        return True


class BucketPolicy(Adapter):
    KIND = "AWS::S3::BucketPolicy"

    @classmethod
    def put(cls, name: str, properties: dict[str, Any]) -> str:
        bucket, policy = properties["Bucket"], json.dumps(properties["PolicyDocument"])
        cls.account.ask("s3", "put_bucket_policy", Bucket=bucket, Policy=policy)
        return f"{bucket}-policy"

    @classmethod
    def remove(cls, resource: str) -> None:
        cls.account.ask("s3", "delete_bucket_policy", Bucket=resource.removesuffix("-policy"))


class Secret(Adapter):
    KIND = "AWS::SecretsManager::Secret"

    @classmethod
    def put(cls, name: str, properties: dict[str, Any]) -> str:
        asked = dict(properties["GenerateSecretString"])
        secret, key = json.loads(asked.pop("SecretStringTemplate")), asked.pop("GenerateStringKey")
        secret[key] = cls.account.ask("secretsmanager", "get_random_password", **asked)["RandomPassword"]
        made = cls.account.ask("secretsmanager", "create_secret", Name=name, SecretString=json.dumps(secret))
        return str(made["ARN"])

    @classmethod
    def remove(cls, resource: str) -> None:
        cls.account.ask("secretsmanager", "delete_secret", SecretId=resource, ForceDeleteWithoutRecovery=True)


class ScalableTarget(Adapter):
    KIND = "AWS::ApplicationAutoScaling::ScalableTarget"

    @classmethod
    def put(cls, name: str, properties: dict[str, Any]) -> str:
        cls.account.ask(SCALING, "register_scalable_target", **properties)
        return "|".join(properties[key] for key in ("ResourceId", "ScalableDimension", "ServiceNamespace"))

    @classmethod
    def remove(cls, resource: str) -> None:
        cls.account.ask(SCALING, "deregister_scalable_target", **split_target(resource))


class ScalingPolicy(Adapter):
    KIND = "AWS::ApplicationAutoScaling::ScalingPolicy"

    @classmethod
    def put(cls, name: str, properties: dict[str, Any]) -> str:
        asked = dict(properties)
        target = split_target(asked.pop("ScalingTargetId"))
        return str(cls.account.ask(SCALING, "put_scaling_policy", **asked, **target)["PolicyARN"])

    @classmethod
    def remove(cls, resource: str) -> None:
        where, _, name = resource.partition(":policyName/")
        names = split_target(f"{where.partition(':resource/sagemaker/')[2]}|{DIMENSION}|{NAMESPACE}")
        cls.account.ask(SCALING, "delete_scaling_policy", PolicyName=name, **names)


class MetricAlarm(Adapter):
    KIND = "AWS::CloudWatch::Alarm"

    @classmethod
    def put(cls, name: str, properties: dict[str, Any]) -> str:
        cls.account.ask("cloudwatch", "put_metric_alarm", **properties)
        return str(properties["AlarmName"])

    @classmethod
    def remove(cls, resource: str) -> None:
        cls.account.ask("cloudwatch", "delete_alarms", AlarmNames=[resource])


def split_target(reference: str) -> dict[str, str]:
    """Return a scaling target's `Ref` as parameters."""
    resource, dimension, namespace = reference.split("|")
    return {"ResourceId": resource, "ScalableDimension": dimension, "ServiceNamespace": namespace}


def put_bucket_settings(account: Any, name: str, properties: Mapping[str, Any]) -> None:
    """Apply the bucket settings that moto's own stacks ignore."""
    account.ask(
        "s3",
        "put_public_access_block",
        Bucket=name,
        PublicAccessBlockConfiguration=properties["PublicAccessBlockConfiguration"],
    )
    account.ask("s3", "put_bucket_ownership_controls", Bucket=name, OwnershipControls=properties["OwnershipControls"])
    rules = []
    for given in properties["LifecycleConfiguration"]["Rules"]:
        rule = {key: value for key, value in given.items() if key not in ("Id", "Prefix", "ExpirationInDays")}
        rule |= {"ID": given["Id"], "Filter": {"Prefix": given.get("Prefix", "")}}
        if "ExpirationInDays" in given:
            rule["Expiration"] = {"Days": int(given["ExpirationInDays"])}
        rules.append(rule)
    account.ask("s3", "put_bucket_lifecycle_configuration", Bucket=name, LifecycleConfiguration={"Rules": rules})


def build_resource_diff(stack: Any, template: Any, parameters: Mapping[str, str]) -> dict[str, list[str]]:
    """Return what an update that changes only parameters must touch, in the template's order.

    CloudFormation does this and moto does not: parameters count where `Fn::Sub` names them. Resources that refer to a
    model or a configuration follow it, since those are replaced and not changed.
    """
    touched = {name for name, value in parameters.items() if stack.input_parameters.get(name) != value}
    modified: list[str] = []
    for name, resource in template["Resources"].items():
        condition = resource.get("Condition")
        is_there = condition is None or stack.lazy_condition_map[condition]
        if is_there and touched & set(re.findall(r"\w+", json.dumps(resource))):
            modified.append(name)
            touched |= {name} & {"Model", "EndpointConfig"}
    return {"Add": [], "Modify": modified, "Remove": []}


def install(monkeypatch: Any, account: Any) -> None:
    """Make stacks support these resources until the test ends."""
    create = FakeBucket.create_from_cloudformation_json.__func__

    def create_bucket(cls: Any, resource_name: str, cloudformation_json: Any, *args: Any, **more: Any) -> Any:
        bucket = create(cls, resource_name, cloudformation_json, *args, **more)
        put_bucket_settings(account, resource_name, cloudformation_json["Properties"])
        return bucket

    monkeypatch.setattr(FakeBucket, "create_from_cloudformation_json", classmethod(create_bucket))
    monkeypatch.setattr(parsing.ResourceMap, "build_resource_diff", build_resource_diff)
    # otherwise it would generate a name
    monkeypatch.setattr(FakeEndpoint, "cloudformation_name_type", staticmethod(lambda: "EndpointName"))
    monkeypatch.setattr(Adapter, "account", account, raising=False)
    adapters = {kind.KIND: kind for kind in Adapter.__subclasses__()}
    known = {**parsing.get_model_map(), **adapters}
    clean = parsing.clean_json

    def clean_json(given: Any, resources: Any) -> Any:
        """Remove AWS::NoValue entries from a list without leaving a gap."""
        cleaned = clean(given, resources)
        return [item for item in cleaned if item is not None] if isinstance(cleaned, list) else cleaned

    monkeypatch.setattr(parsing, "clean_json", clean_json)
    monkeypatch.setattr(parsing, "get_model_map", lambda: known)
