"""An account of AWS for a test: moto's server over HTTP, emptied before each test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
import yaml

from tests.aws.moto_cloudformation import install
from tests.aws.operator import NAME, Operator
from tests.aws.slow_sagemaker import SlowSageMaker
from tests.aws.stack import Stack

REGION = "us-east-1"
ACCOUNT = "123456789012"  # moto's
TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}


@dataclass
class Aws:
    """The account as its owner sees it."""

    url: str

    def client(self, service: str, **credentials: str) -> Any:
        """One with credentials of its own is a caller of its own."""
        return _client(self.url, service, **credentials)

    def ask(self, service: str, operation: str, **parameters: Any) -> Any:
        return getattr(self.client(service), operation)(**parameters)

    def make_role(self, name: str = "torchmoor", trust: Any = TRUST) -> str:
        role = self.ask("iam", "create_role", RoleName=name, AssumeRolePolicyDocument=json.dumps(trust))
        return str(role["Role"]["Arn"])

    def push_image(self, repository: str = "torchmoor", tag: str = "1", content: str = "one") -> str:
        """As a push does; the same tag with other content becomes another image."""
        ecr = self.client("ecr")
        if repository not in [each["repositoryName"] for each in ecr.describe_repositories()["repositories"]]:
            ecr.create_repository(repositoryName=repository)
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        manifest = {"schemaVersion": 2, "mediaType": kind, "config": {"digest": content}}
        ecr.put_image(repositoryName=repository, imageManifest=json.dumps(manifest), imageTag=tag)
        return f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/{repository}:{tag}"

    def put_model(self, bucket: str = "models", key: str = "llava.tar.gz") -> str:
        s3 = self.client("s3")
        s3.create_bucket(Bucket=bucket)
        s3.put_object(Bucket=bucket, Key=key, Body=b"archive")
        return f"s3://{bucket}/{key}"

    def names(self, service: str, operation: str, items: str, name: str, **parameters: Any) -> list[str]:
        return [each[name] for each in self.ask(service, operation, **parameters)[items]]

    def left(self) -> dict[str, list[str]]:
        """All that a deployment makes, by name; what there is none of is not there."""
        of_sagemaker = {"ServiceNamespace": "sagemaker"}
        found = {
            "endpoints": self.names("sagemaker", "list_endpoints", "Endpoints", "EndpointName"),
            "configs": self.names("sagemaker", "list_endpoint_configs", "EndpointConfigs", "EndpointConfigName"),
            "models": self.names("sagemaker", "list_models", "Models", "ModelName"),
            "targets": self.names(
                "application-autoscaling", "describe_scalable_targets", "ScalableTargets", "ResourceId", **of_sagemaker
            ),
            "policies": self.names(
                "application-autoscaling", "describe_scaling_policies", "ScalingPolicies", "PolicyName", **of_sagemaker
            ),
            "alarms": self.names("cloudwatch", "describe_alarms", "MetricAlarms", "AlarmName"),
        }
        return {key: value for key, value in found.items() if value}


@cache
def _client(url: str, service: str, **credentials: str) -> Any:
    """Kept, because to make one takes longer than to ask it."""
    owner = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    return boto3.client(service, endpoint_url=url, region_name=REGION, **{**owner, **credentials})


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def aws(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """Empty, with credentials in the environment and none of the developer's own."""

    def empty() -> None:
        requests.post(f"{moto_url}/moto-api/reset", timeout=10).raise_for_status()

    for name in ("PROFILE", "SESSION_TOKEN", "REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", REGION)):
        monkeypatch.setenv(f"AWS_{name}", value)
    empty()
    yield Aws(moto_url)
    empty()  # what moto knows is the process's, so a server of another test would have it too


@pytest.fixture
def sagemaker(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> SlowSageMaker:
    """What the account's endpoints go through."""
    return SlowSageMaker(monkeypatch)


@pytest.fixture
def stack(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """One stack of the template, not yet made."""
    install(monkeypatch, aws)
    return Stack(aws)


@pytest.fixture
def operator(sagemaker: SlowSageMaker, aws: Aws, capsys: pytest.CaptureFixture[str]) -> Operator:
    return Operator(aws, capsys)


@pytest.fixture
def flags(aws: Aws) -> list[str]:
    """A real-time endpoint of what lies in the account."""
    return [
        *("--endpoint", NAME, "--role", aws.make_role(), "--image", aws.push_image()),
        *("--model-data", aws.put_model(), "--instance-type", "ml.g4dn.xlarge"),
    ]


@pytest.fixture
def file(aws: Aws, tmp_path: Path) -> Path:
    """An asynchronous endpoint with everything that there is to say, as a file."""
    topics = [aws.ask("sns", "create_topic", Name=name)["TopicArn"] for name in ("done", "failed")]
    path = tmp_path / "endpoint.yaml"
    settings = {
        "EndpointName": NAME,
        "ExecutionRoleArn": aws.make_role(),
        "PrimaryContainer": {
            "Image": aws.push_image(),
            "ModelDataSource": {
                "S3DataSource": {
                    "S3Uri": aws.put_model(key="llava/config.json").removesuffix("config.json"),
                    "S3DataType": "S3Prefix",
                    "CompressionType": "None",
                }
            },
            "Environment": {"TORCHMOOR_HANDLER_JOURNAL_URL": "s3://models/sessions"},
        },
        "VpcConfig": {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1", "subnet-2"]},
        "ProductionVariant": {"InstanceType": "ml.g4dn.xlarge", "InitialInstanceCount": 1},
        "AsyncInferenceConfig": {
            "OutputConfig": {
                "S3OutputPath": "s3://models/results",
                "S3FailurePath": "s3://models/failures",
                "NotificationConfig": {"SuccessTopic": topics[0], "ErrorTopic": topics[1]},
            },
            "ClientConfig": {"MaxConcurrentInvocationsPerInstance": 4},
        },
        "Autoscaling": {"MinCapacity": 0, "MaxCapacity": 2},
        "Tags": {"team": "vision"},
    }
    path.write_text(yaml.safe_dump(settings))
    return path
