"""Lint deploy/sagemaker/template.yaml with cfn-lint; create, update and delete it as a stack of moto's over HTTP."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.aws.conftest import ACCOUNT, REGION, Aws
from tests.aws.stack import ASYNCHRONOUS, ROLE, TEMPLATE, Stack, read_document
from torchmoor.config.sessions import SessionIdSettings

pytestmark = pytest.mark.slow
ALARM = "HasBacklogWithoutCapacity-llava-AllTraffic"


@pytest.mark.parametrize("template", [TEMPLATE, ROLE], ids=["stack", "role"])
def test_template_is_sound(template: Path) -> None:
    """The template passes AWS's own linter without warnings."""
    lint = Path(sys.executable).with_name("cfn-lint")
    done = subprocess.run([lint, template, "--non-zero-exit-code", "warning"], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_asynchronous_stack_has_all_its_parts(stack: Stack, aws: Aws) -> None:
    """Model, configuration, endpoint, topics, and scaling with its alarm follow the parameters."""
    stack.put("create", **ASYNCHRONOUS)

    outputs, config, model = stack.outputs(), stack.config(), stack.model()
    bucket = outputs["Bucket"]
    assert model["ExecutionRoleArn"] == outputs["RoleArn"]
    container = model["PrimaryContainer"]
    assert container["Image"] == f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/torchmoor:1"
    assert container["ModelDataUrl"] == "s3://models/llava.tar.gz"
    assert container["Environment"]["TORCHMOOR_HANDLER_JOURNAL_URL"] == f"s3://{bucket}/sessions"
    [variant] = config["ProductionVariants"]
    assert variant["RoutingConfig"] == {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}
    output = config["AsyncInferenceConfig"]["OutputConfig"]
    assert output["S3OutputPath"] == f"s3://{bucket}/async/results"
    assert output["NotificationConfig"] == {
        "SuccessTopic": outputs["SuccessTopic"],
        "ErrorTopic": outputs["ErrorTopic"],
    }
    left = aws.left()
    assert left["targets"] == ["endpoint/llava/variant/AllTraffic"]
    assert set(left["policies"]) == {ALARM, "ApproximateBacklogSizePerInstance-llava-AllTraffic"}
    [alarm] = aws.ask("cloudwatch", "describe_alarms", AlarmNames=[ALARM])["MetricAlarms"]
    assert [arn.rpartition("policyName/")[2] for arn in alarm["AlarmActions"]] == [ALARM]
    assert (alarm["MetricName"], alarm["Threshold"]) == ("HasBacklogWithoutCapacity", 1.0)


def test_role_alone_may_do_what_the_stacks_role_may(stack: Stack, aws: Aws) -> None:
    """A stack with only the role has the same statements, without those for topics and networks."""
    stack.put("create")
    given = {"ModelBucket": "models", "ModelPrefix": "llava/", "DataBucket": "data"}
    aws.ask(
        "cloudformation",
        "create_stack",
        StackName="role",
        TemplateBody=ROLE.read_text(),
        Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in given.items()],
        Capabilities=["CAPABILITY_IAM"],
    )

    [made] = aws.ask("cloudformation", "describe_stacks", StackName="role")["Stacks"]
    [output] = made["Outputs"]
    alone, whole = (_statements(aws, arn) for arn in (output["OutputValue"], stack.outputs()["RoleArn"]))
    assert {sid: each["Action"] for sid, each in alone.items()} == {sid: each["Action"] for sid, each in whole.items()}
    assert alone["ReadModel"]["Resource"] == "arn:aws:s3:::models/llava/*"
    assert alone["KeepSessions"]["Resource"] == "arn:aws:s3:::data/sessions/*"
    assert {sid for sid, each in alone.items() if each["Resource"] == "*"} == {"EcrLogin", "WriteMetrics"}
    resources = aws.ask("cloudformation", "list_stack_resources", StackName="role")["StackResourceSummaries"]
    assert [each["ResourceType"] for each in resources] == ["AWS::IAM::Role"]


def _statements(aws: Aws, role_arn: str) -> dict[str, Any]:
    """Return the statements of a role's policies by their names."""
    role = role_arn.rpartition("/")[2]
    names = aws.ask("iam", "list_role_policies", RoleName=role)["PolicyNames"]
    found = [aws.ask("iam", "get_role_policy", RoleName=role, PolicyName=name)["PolicyDocument"] for name in names]
    policies = [read_document(document) for document in found]
    return {each["Sid"]: each for policy in policies for each in policy["Statement"]}


def test_session_keys_are_in_secrets_manager_alone(stack: Stack, aws: Aws) -> None:
    """The container's environment refers to a secret, whose value the container can read."""
    stack.put("create")

    given = stack.model()["PrimaryContainer"]["Environment"]["TORCHMOOR_SESSION_KEYS"]
    match = re.fullmatch(r"(k0:)\{\{resolve:secretsmanager:(arn:[^{}]+):SecretString:(\w+)\}\}", given)
    assert match, given
    assert match[2] == stack.outputs()["SessionKeysSecret"]
    secret = json.loads(aws.ask("secretsmanager", "get_secret_value", SecretId=match[2])["SecretString"])
    assert len(SessionIdSettings.parse(match[1] + secret[match[3]]).keys["k0"]) == 32
    template = aws.ask("cloudformation", "get_template", StackName="vision")
    assert secret[match[3]] not in json.dumps(template, default=str)


def test_bucket_is_closed_encrypted_and_swept(stack: Stack, aws: Aws) -> None:
    """The bucket forbids public access and plain HTTP, encrypts its objects, and expires them."""
    stack.put("create", SessionDays="3")

    bucket = {"Bucket": stack.outputs()["Bucket"]}
    rules = aws.ask("s3", "get_bucket_encryption", **bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rules[0]["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    block = aws.ask("s3", "get_public_access_block", **bucket)["PublicAccessBlockConfiguration"]
    assert set(block.values()) == {True}
    assert len(block) == 4
    [statement] = json.loads(aws.ask("s3", "get_bucket_policy", **bucket)["Policy"])["Statement"]
    assert (statement["Effect"], statement["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})
    rules = aws.ask("s3", "get_bucket_lifecycle_configuration", **bucket)["Rules"]
    ends = {rule["Filter"]["Prefix"]: rule.get("Expiration", {}).get("Days") for rule in rules}
    assert ends == {"sessions/": 3, "async/": 7, "": None}


def test_updates_move_the_endpoint_and_deletion_leaves_only_the_bucket(stack: Stack, aws: Aws) -> None:
    """An update applies a new image and limits; deletion keeps the bucket and nothing else that costs money."""
    stack.put("create", **ASYNCHRONOUS)
    bucket, first = stack.outputs()["Bucket"], stack.config()["EndpointConfigName"]

    stack.put("update", **{**ASYNCHRONOUS, "ImageTag": "2", "MaxCapacity": "5"})

    assert stack.model()["PrimaryContainer"]["Image"].endswith("/torchmoor:2")
    assert stack.config()["EndpointConfigName"] != first
    of_sagemaker = {"ServiceNamespace": "sagemaker"}
    [target] = aws.ask("application-autoscaling", "describe_scalable_targets", **of_sagemaker)["ScalableTargets"]
    assert (target["MinCapacity"], target["MaxCapacity"]) == (0, 5)
    assert stack.outputs()["Bucket"] == bucket

    stack.delete()

    assert aws.left() == {}
    assert aws.names("s3", "list_buckets", "Buckets", "Name") == [bucket]
    assert aws.names("sns", "list_topics", "Topics", "TopicArn") == []
    assert aws.names("iam", "list_roles", "Roles", "RoleName") == []
    assert aws.names("secretsmanager", "list_secrets", "SecretList", "Name") == []


def test_real_time_stack_scales_by_requests_at_once(stack: Stack, aws: Aws) -> None:
    """A real-time stack has no topics and no backlog alarm, and uses a VPC if one is given."""
    network = {"SubnetIds": "subnet-1,subnet-2", "SecurityGroupIds": "sg-1"}
    stack.put("create", MaxCapacity="3", ModelMode="MultiModel", ModelKey="many/", **network)

    assert not stack.config().get("AsyncInferenceConfig")
    model = stack.model()
    assert model["VpcConfig"] == {"Subnets": ["subnet-1", "subnet-2"], "SecurityGroupIds": ["sg-1"]}
    assert (model["PrimaryContainer"]["Mode"], model["PrimaryContainer"]["ModelDataUrl"]) == (
        "MultiModel",
        "s3://models/many/",
    )
    left = aws.left()
    assert left["policies"] == ["ConcurrentRequests-llava-AllTraffic"]
    assert "alarms" not in left
    assert aws.names("sns", "list_topics", "Topics", "TopicArn") == []
    stack.delete()
    assert aws.left() == {}
