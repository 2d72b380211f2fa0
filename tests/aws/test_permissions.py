"""The published policies are sufficient and minimal: the deployer's in deployments, the role's by policy evaluation."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.deploy_sagemaker import main
from scripts.sagemaker_deploy.account import Account
from scripts.sagemaker_deploy.progress import Watch
from tests.aws.conftest import ACCOUNT, REGION, Aws
from tests.aws.enforced import enforce, is_allowed
from tests.aws.slow_sagemaker import SlowSageMaker
from tests.aws.stack import ASYNCHRONOUS, Stack, read_document

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "sagemaker.md"


def read_deployer() -> Any:
    """Return the published policy, completed by the command from docs/sagemaker.md."""
    command = re.search(r"^(sed .*?deployer\.json) > policy\.json$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert command
    filled = subprocess.run(["bash", "-c", command[1]], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\b(REPOSITORY|ENDPOINT|ACCOUNT|REGION|BUCKET|ROLE)\b", filled)
    return json.loads(filled)


class Deployer:
    """A user with the published policy or a part of it."""

    def __init__(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        self._aws, self._monkeypatch = aws, monkeypatch
        self.policy = read_deployer()

    def become(self, *without: str) -> None:
        """Act as the user. without: Sids of statements to leave out."""
        policy = {**self.policy, "Statement": [each for each in self.policy["Statement"] if each["Sid"] not in without]}
        self._aws.ask("iam", "create_user", UserName="deployer")
        self._aws.ask("iam", "put_user_policy", UserName="deployer", PolicyName="p", PolicyDocument=json.dumps(policy))
        key = self._aws.ask("iam", "create_access_key", UserName="deployer")["AccessKey"]
        self._monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        self._monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        enforce(self._monkeypatch)
        account = Account(REGION, None, self._aws.url)
        self.connect: Callable[..., Account] = lambda *options: account

    def run(self, *arguments: str) -> int:
        return main([*arguments, "--endpoint", "llava"], Watch(say=print, poll_s=0), self.connect)


@pytest.fixture
def role(aws: Aws) -> str:
    return aws.make_role("llava-ExecutionRole")


@pytest.fixture
def deploy(aws: Aws, role: str) -> list[str]:
    """Deploy an asynchronous endpoint that scales, which uses every service."""
    return [
        *("deploy", "--role", role, "--image", aws.push_image(), "--model-data", aws.put_model("my-models")),
        *("--instance-type", "ml.g4dn.xlarge", "--async-output", "s3://models/results", "--min", "0", "--max", "2"),
    ]


@pytest.fixture
def deployer(aws: Aws, sagemaker: SlowSageMaker, monkeypatch: pytest.MonkeyPatch, deploy: list[str]) -> Deployer:
    return Deployer(aws, monkeypatch)


def test_the_published_policy_is_enough(
    deployer: Deployer, deploy: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The policy allows create, describe, update and delete, and does not allow another endpoint to be described."""
    deployer.become()

    assert deployer.run(*deploy) == 0, capsys.readouterr().err
    assert "note: may not" not in capsys.readouterr().out
    assert deployer.run("status") == 0
    assert deployer.run(*deploy, "--max-concurrent", "8") == 0, capsys.readouterr().err
    assert deployer.run("teardown", "--yes") == 0, capsys.readouterr().err
    assert deployer.run("status") == 3
    assert deployer.run(*deploy, "--image", deploy[4].replace("torchmoor", "other")) == 0, "SageMaker would refuse it"
    assert "note: may not look for" in capsys.readouterr().out
    assert main(["status", "--endpoint", "other"], None, deployer.connect) == 1
    assert "docs/sagemaker.md lists the rights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sid", "refused"),
    [
        ("Endpoint", "DescribeEndpoint"),
        ("FindWhatIsOurs", "ListEndpointConfigs"),
        ("Scale", "RegisterScalableTarget"),
        ("LookAtScaling", "DescribeScalableTargets"),
        ("Alarms", "PutMetricAlarm"),
    ],
)
def test_each_right_is_needed(
    deployer: Deployer, deploy: list[str], capsys: pytest.CaptureFixture[str], sid: str, refused: str
) -> None:
    """Without a permission, the script names the missing one and the list of all of them."""
    deployer.become(sid)

    assert deployer.run(*deploy) == 1

    told = capsys.readouterr().err
    assert f"error: {refused} failed: " in told
    assert "docs/sagemaker.md lists the rights" in told


def test_without_the_right_to_look_it_deploys_all_the_same(
    deployer: Deployer, deploy: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the permission for its checks, the script says so and leaves the checks to SageMaker."""
    deployer.become("LookAtRole", "LookAtImage", "LookAtModel", "ReadLogs")

    assert deployer.run(*deploy) == 0, capsys.readouterr().err

    assert capsys.readouterr().out.count("note: may not look ") == 3


def test_the_role_may_do_what_the_endpoint_needs_and_no_more(stack: Stack, aws: Aws) -> None:
    """Each statement of the template's role allows its own resources and refuses others."""
    stack.put("create", **ASYNCHRONOUS, SubnetIds="subnet-1", SecurityGroupIds="sg-1")
    outputs = stack.outputs()
    name = outputs["RoleArn"].rpartition("/")[2]
    policies = [
        read_document(aws.ask("iam", "get_role_policy", RoleName=name, PolicyName=policy)["PolicyDocument"])
        for policy in aws.ask("iam", "list_role_policies", RoleName=name)["PolicyNames"]
    ]
    elsewhere = f"arn:aws:ec2:{REGION}:999999999999:subnet/subnet-1"
    own, arn = f"arn:aws:s3:::{outputs['Bucket']}", f"{REGION}:{ACCOUNT}"
    group = f"arn:aws:logs:{arn}:log-group:/aws/sagemaker/Endpoints/"

    for action, yes, no in (
        ("ecr:GetAuthorizationToken", "*", None),
        ("ecr:BatchGetImage", f"arn:aws:ecr:{arn}:repository/torchmoor", f"arn:aws:ecr:{arn}:repository/other"),
        ("ecr:PutImage", None, f"arn:aws:ecr:{arn}:repository/torchmoor"),
        ("s3:GetObject", "arn:aws:s3:::models/llava.tar.gz", "arn:aws:s3:::models/other.tar.gz"),
        ("s3:PutObject", None, "arn:aws:s3:::models/llava.tar.gz"),
        ("s3:GetObject", f"{own}/sessions/ab/1", f"{own}/async/results/1.out"),
        ("s3:PutObject", f"{own}/sessions/ab/1", f"{own}/async/inputs/1"),
        ("s3:DeleteObject", f"{own}/sessions/ab/1", f"{own}/async/results/1.out"),
        ("s3:GetObject", f"{own}/async/inputs/1", f"{own}-two/async/inputs/1"),
        ("s3:PutObject", f"{own}/async/results/1.out", f"{own}/elsewhere"),
        ("s3:PutObject", f"{own}/async/failures/1-error.out", None),
        ("s3:PutBucketPolicy", None, own),
        ("sns:Publish", outputs["SuccessTopic"], f"arn:aws:sns:{arn}:other"),
        ("sns:Publish", outputs["ErrorTopic"], None),
        ("logs:PutLogEvents", f"{group}llava:log-stream:AllTraffic/i-1", f"{group}llava-two:log-stream:AllTraffic/i-1"),
        ("logs:CreateLogGroup", f"{group}llava", f"{group}other"),
        ("ec2:CreateNetworkInterface", f"arn:aws:ec2:{arn}:subnet/subnet-1", elsewhere),
        ("ec2:RunInstances", None, f"arn:aws:ec2:{arn}:instance/*"),
        ("iam:PassRole", None, outputs["RoleArn"]),
        ("secretsmanager:GetSecretValue", None, outputs["SessionKeysSecret"]),
        ("sagemaker:CreateEndpoint", None, f"arn:aws:sagemaker:{arn}:endpoint/llava"),
    ):  # fmt: skip
        assert yes is None or is_allowed(policies, action, yes), (action, yes)
        assert no is None or not is_allowed(policies, action, no), (action, no)

    for prefix, may in (("sessions/ab", True), ("async/inputs/1", True), ("async/results/", False), ("", False)):
        assert is_allowed(policies, "s3:ListBucket", own, {"s3:prefix": prefix}) is may, prefix
    for namespace, may in (("AWS/SageMaker", True), ("/aws/sagemaker/Endpoints", True), ("AWS/Billing", False)):
        assert is_allowed(policies, "cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": namespace}) is may
