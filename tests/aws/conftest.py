"""Provide an AWS account to tests: moto's server over HTTP, which is emptied before each test."""

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
        """Return a client; one with other credentials is another caller."""
        return _client(self.url, service, **credentials)

    def ask(self, service: str, operation: str, **parameters: Any) -> Any:
        return getattr(self.client(service), operation)(**parameters)

    def make_role(self, name: str = "torchmoor", trust: Any = TRUST) -> str:
        role = self.ask("iam", "create_role", RoleName=name, AssumeRolePolicyDocument=json.dumps(trust))
        return str(role["Role"]["Arn"])

    def push_image(self, content: str = "one") -> str:
        """Push an image; the same tag with other content is another image."""
        repository, tag = "torchmoor", "1"
        ecr = self.client("ecr")
        if repository not in [each["repositoryName"] for each in ecr.describe_repositories()["repositories"]]:
            ecr.create_repository(repositoryName=repository)
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        layers = [{"digest": content}]  # without layers, moto draws the image's digest from 101 values
        manifest = {"schemaVersion": 2, "mediaType": kind, "config": {"digest": content}, "layers": layers}
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
        """Return the resources of a deployment by kind; kinds without resources are absent."""
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
    """Return a cached client, because creating one takes longer than using it."""
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
    """Provide an empty account, with its credentials in the environment instead of the developer's."""

    def empty() -> None:
        requests.post(f"{moto_url}/moto-api/reset", timeout=60).raise_for_status()

    for name in ("PROFILE", "SESSION_TOKEN", "REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", REGION)):
        monkeypatch.setenv(f"AWS_{name}", value)
    empty()
    yield Aws(moto_url)
    empty()  # moto's state belongs to the process, so a server of another test would share it


@pytest.fixture
def sagemaker(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> SlowSageMaker:
    """Provide the states of the account's endpoints."""
    return SlowSageMaker(monkeypatch)


@pytest.fixture
def stack(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """Provide a stack of the template that is not yet created."""
    from tests.aws.moto_cloudformation import install  # takes a second, which each run's processes would need

    install(monkeypatch, aws)
    return Stack(aws)


@pytest.fixture
def operator(sagemaker: SlowSageMaker, aws: Aws, capsys: pytest.CaptureFixture[str]) -> Operator:
    return Operator(aws, capsys)


@pytest.fixture
def flags(aws: Aws) -> list[str]:
    """Return the flags of a real-time endpoint that uses the account's image and model."""
    return [
        *("--endpoint", NAME, "--role", aws.make_role(), "--image", aws.push_image()),
        *("--model-data", aws.put_model(), "--instance-type", "ml.g4dn.xlarge"),
    ]


@pytest.fixture
def file(aws: Aws, tmp_path: Path) -> Path:
    """Write a file with every setting for an asynchronous endpoint."""
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
