"""scripts/deploy_sagemaker.py against moto's server, through boto3 and HTTP."""

from __future__ import annotations

import json
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from moto.core.exceptions import JsonRESTError

from scripts.deploy_sagemaker import main
from scripts.sagemaker_deploy.account import Account
from scripts.sagemaker_deploy.progress import Watch
from tests.aws.conftest import ACCOUNT, REGION, Aws
from tests.aws.slow_sagemaker import SERVING, SlowSageMaker, fails

NAME = "llava"
RESOURCE = f"endpoint/{NAME}/variant/AllTraffic"
ALARM = f"HasBacklogWithoutCapacity-{NAME}-AllTraffic"


class Operator:
    """Runs the script as from a shell, with a clock that moves when it waits."""

    def __init__(self, aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
        self.aws, self._capsys = aws, capsys
        self.now = 0.0
        self.connect: Any = cached_account
        self.out = self.err = ""

    def run(self, command: str, *arguments: str, timeout_s: float = 3600) -> int:
        def sleep(seconds: float) -> None:
            self.now += seconds

        watch = Watch(say=print, timeout_s=timeout_s, clock=lambda: self.now, sleep=sleep)
        status = main([command, "--endpoint-url", self.aws.url, *arguments], watch, self.connect)
        self.out, self.err = self._capsys.readouterr()
        return status

    def endpoint(self) -> Any:
        return self.aws.ask("sagemaker", "describe_endpoint", EndpointName=NAME)

    def config(self) -> Any:
        name = self.endpoint()["EndpointConfigName"]
        return self.aws.ask("sagemaker", "describe_endpoint_config", EndpointConfigName=name)


@cache
def cached_account(*options: str | None) -> Account:
    """One for all tests, because to make boto3's clients takes longer than to ask them."""
    return Account(*options)


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


def test_deploys_what_a_file_says_and_takes_it_away(operator: Operator, aws: Aws, file: Path) -> None:
    """Model, configuration, endpoint and scaling as they were asked for; then nothing is left, and that is no error."""
    assert operator.run("deploy", "--config", str(file)) == 0, operator.err

    assert "[    0 s] llava: Creating" in operator.out
    assert "[   10 s] llava: InService" in operator.out
    config = operator.config()
    [variant] = config["ProductionVariants"]
    assert variant["RoutingConfig"] == {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"}
    assert (variant["ModelDataDownloadTimeoutInSeconds"], variant["ContainerStartupHealthCheckTimeoutInSeconds"]) == (
        1200,
        900,
    )
    asked = yaml.safe_load(file.read_text())
    assert config["AsyncInferenceConfig"] == asked["AsyncInferenceConfig"]
    model = aws.ask("sagemaker", "describe_model", ModelName=variant["ModelName"])
    assert model["ExecutionRoleArn"] == asked["ExecutionRoleArn"]
    assert model["VpcConfig"] == asked["VpcConfig"]
    container = model["PrimaryContainer"]
    assert container["Environment"] == asked["PrimaryContainer"]["Environment"]
    assert container["ModelDataSource"] == asked["PrimaryContainer"]["ModelDataSource"]
    assert container["Image"].startswith(f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/torchmoor@sha256:")
    tags = aws.ask("sagemaker", "list_tags", ResourceArn=operator.endpoint()["EndpointArn"])["Tags"]
    assert {"Key": "team", "Value": "vision"} in tags
    left = aws.left()
    assert (left["targets"], left["alarms"]) == ([RESOURCE], [ALARM])
    assert len(left["policies"]) == 2

    assert operator.run("teardown", "--endpoint", NAME, "--yes") == 0, operator.err
    said = operator.out
    assert operator.run("teardown", "--endpoint", NAME, "--yes") == 0

    assert aws.left() == {}
    assert said.index("autoscaling of AllTraffic: removed") < said.index("llava: Deleting") < said.index("llava: gone")
    assert said.index("llava: gone") < said.index("delete_endpoint_config: ") < said.index("delete_model: ")
    assert operator.out == "nothing is left of llava\n"


def test_deploying_the_same_again_changes_nothing(
    operator: Operator, aws: Aws, sagemaker: SlowSageMaker, flags: list[str]
) -> None:
    """A pipeline may run it every time."""
    assert operator.run("deploy", *flags) == 0, operator.err
    before = aws.left()

    assert operator.run("deploy", *flags) == 0, operator.err

    assert aws.left() == before
    assert sagemaker.updates == []
    assert "has this configuration already" in operator.out


def test_a_tag_that_was_pushed_again_is_an_update(
    operator: Operator, aws: Aws, sagemaker: SlowSageMaker, flags: list[str]
) -> None:
    """Images are named by digest, so `:latest` is deployed when it changes; of older versions one stays."""
    for content in ("two", "three", "four"):
        aws.push_image(content=content)
        assert operator.run("deploy", *flags) == 0, operator.err

    assert len(sagemaker.updates) == 2
    left = aws.left()
    assert (len(left["configs"]), len(left["models"])) == (2, 2)
    assert operator.endpoint()["EndpointConfigName"] == sagemaker.updates[-1]["EndpointConfigName"]
    assert operator.run("teardown", "--endpoint", NAME, "--yes") == 0
    assert aws.left() == {}


def test_update_keeps_the_scale_and_moves_traffic_as_asked(
    operator: Operator, aws: Aws, sagemaker: SlowSageMaker, flags: list[str]
) -> None:
    """Scaling is off meanwhile, for an update that changes the instance type is refused otherwise, and on after it."""
    scaled = [*flags, "--min", "1", "--max", "3"]
    assert operator.run("deploy", *scaled) == 0, operator.err
    assert aws.left()["policies"] == ["ConcurrentRequests-llava-AllTraffic"]

    changed = [*scaled, "--instance-type", "ml.g4dn.2xlarge", "--canary-percent", "20", "--rollback-alarm", "errors"]
    assert operator.run("deploy", *changed) == 0, operator.err

    [update] = sagemaker.updates
    assert update["RetainAllVariantProperties"] is True
    assert update["DeploymentConfig"] == {
        "BlueGreenUpdatePolicy": {
            "TrafficRoutingConfiguration": {
                "Type": "CANARY",
                "CanarySize": {"Type": "CAPACITY_PERCENT", "Value": 20},
                "WaitIntervalInSeconds": 300,
            }
        },
        "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": "errors"}]},
    }
    assert operator.out.index("autoscaling of AllTraffic is off") < operator.out.index("update_endpoint")
    assert aws.left()["targets"] == [RESOURCE]
    policy = aws.ask("application-autoscaling", "describe_scaling_policies", ServiceNamespace="sagemaker")
    [tracking] = [each["TargetTrackingScalingPolicyConfiguration"] for each in policy["ScalingPolicies"]]
    assert tracking["TargetValue"] == 4.0


def test_update_that_is_taken_back_is_an_error_and_leaves_the_old_one(
    operator: Operator, aws: Aws, sagemaker: SlowSageMaker, flags: list[str]
) -> None:
    """SageMaker keeps the old instances; the script says why, and the scaling that was taken off is on again."""
    scaled = [*flags, "--min", "1", "--max", "3"]
    assert operator.run("deploy", *scaled) == 0, operator.err
    serving = operator.endpoint()["EndpointConfigName"]
    sagemaker.is_taken_back = True
    rolling = {"endpoint_status": "RollingBack", "failure_reason": "/ping of the new instances did not answer"}
    sagemaker.update = [{"endpoint_status": "Updating"}, rolling, SERVING]

    assert operator.run("deploy", *scaled, "--env", "TORCHMOOR_LOG_LEVEL=DEBUG") == 1

    assert f"it serves {serving} as before: /ping of the new instances did not answer" in operator.err
    assert "llava: RollingBack" in operator.out
    assert aws.left()["targets"] == [RESOURCE]
    assert operator.run("teardown", "--endpoint", NAME, "--yes") == 0
    assert aws.left() == {}


def test_creation_that_fails_tells_the_reason_and_the_log(
    operator: Operator, aws: Aws, sagemaker: SlowSageMaker, flags: list[str]
) -> None:
    """SageMaker's reason, the container's last lines, and where the rest is; deploying again makes it anew."""
    logs = {"logGroupName": f"/aws/sagemaker/Endpoints/{NAME}"}
    aws.ask("logs", "create_log_group", **logs)
    logs["logStreamName"] = "AllTraffic/i-1"
    aws.ask("logs", "create_log_stream", **logs)
    event = {"timestamp": int(time.time() * 1000), "message": "no model archive below /opt/ml/model"}
    aws.ask("logs", "put_log_events", **logs, logEvents=[event])
    working, sagemaker.creation = sagemaker.creation, fails("The primary container did not pass the ping health check.")

    assert operator.run("deploy", *flags) == 1

    assert "llava is Failed" in operator.err
    assert "did not pass the ping health check" in operator.err
    assert f"/aws/sagemaker/Endpoints/{NAME} in {REGION}" in operator.err
    assert re.search(r"\| \d\d:\d\d:\d\d no model archive below /opt/ml/model", operator.err)
    assert operator.run("status", "--endpoint", NAME) == 0
    assert "failure: The primary container did not pass the ping health check." in operator.out

    sagemaker.creation = working
    assert operator.run("deploy", *flags) == 0, operator.err

    assert operator.endpoint()["EndpointStatus"] == "InService"
    assert operator.run("teardown", "--endpoint", NAME, "--yes") == 0
    assert aws.left() == {}


def test_a_quota_that_is_used_up_is_told(
    operator: Operator, aws: Aws, sagemaker: SlowSageMaker, flags: list[str]
) -> None:
    """With what can be done about it; the next try goes on from there."""
    told = "The account-level service limit 'ml.g4dn.xlarge for endpoint usage' is 0 Instances"
    sagemaker.refusal = JsonRESTError("ResourceLimitExceeded", told)

    assert operator.run("deploy", *flags) == 1

    assert told in operator.err
    assert "ask for more in Service Quotas" in operator.err
    made = aws.left()
    assert set(made) == {"configs", "models"}
    sagemaker.refusal = None
    assert operator.run("deploy", *flags) == 0, operator.err
    assert aws.left() == {**made, "endpoints": [NAME]}


def test_waiting_has_an_end(operator: Operator, sagemaker: SlowSageMaker, flags: list[str]) -> None:
    """SageMaker goes on; the script says how to look, and teardown waits until there is something to delete."""
    sagemaker.creation = [{"endpoint_status": "Creating"}] * 40 + [SERVING]

    assert operator.run("deploy", *flags, timeout_s=120) == 1

    assert "llava is still Creating after 120 s" in operator.err
    assert "[   60 s] llava: Creating" in operator.out, "said again after a minute"
    assert operator.run("teardown", "--endpoint", NAME, "--yes") == 0
    assert operator.aws.left() == {}


def test_status_tells_what_there_is(operator: Operator, file: Path) -> None:
    """For people and as JSON; of nothing, with an exit status of its own."""
    assert operator.run("status", "--endpoint", NAME) == 3
    assert operator.err == f"there is no endpoint {NAME} in {REGION}\n"
    assert operator.run("deploy", "--config", str(file)) == 0, operator.err

    assert operator.run("status", "--endpoint", NAME, "--json") == 0
    record = json.loads(operator.out)
    assert operator.run("status", "--config", str(file)) == 0

    assert (record["state"], record["asynchronous"], record["made_by_this_script"]) == ("InService", True, True)
    assert record["variants"][0]["instance_type"] == "ml.g4dn.xlarge"
    assert record["autoscaling"] == [{"resource": RESOURCE, "min": 0, "max": 2}]
    assert "state: InService\n" in operator.out
    assert f"autoscaling: resource {RESOURCE}, min 0, max 2\n" in operator.out


def test_teardown_asks_first(operator: Operator, aws: Aws, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is deleted without a yes, nor where nobody can give one."""
    assert operator.run("deploy", *flags) == 0, operator.err
    before = aws.left()

    assert operator.run("teardown", "--endpoint", NAME) == 1
    assert "give --yes" in operator.err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert operator.run("teardown", "--endpoint", NAME) == 1
    assert aws.left() == before
    assert "endpoint llava, InService" in operator.out

    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert operator.run("teardown", "--endpoint", NAME) == 0
    assert aws.left() == {}


def test_what_others_have_made_is_left_alone(operator: Operator, aws: Aws, flags: list[str]) -> None:
    """An endpoint of that name without our tag, and models whose names begin alike."""
    assert operator.run("deploy", *flags, "--endpoint", f"{NAME}-two") == 0, operator.err
    model, config = f"{NAME}-mine", f"{NAME}-mine"
    aws.ask("sagemaker", "create_model", ModelName=model, ExecutionRoleArn=aws.make_role("other"))
    variant = {"VariantName": "v", "ModelName": model, "InstanceType": "ml.m5.large", "InitialInstanceCount": 1}
    aws.ask("sagemaker", "create_endpoint_config", EndpointConfigName=config, ProductionVariants=[variant])
    aws.ask("sagemaker", "create_endpoint", EndpointName=NAME, EndpointConfigName=config)
    operator.endpoint()
    before = aws.left()

    assert operator.run("deploy", *flags) == 1
    assert "has not made; it is left alone" in operator.err
    assert operator.run("teardown", "--endpoint", NAME, "--yes") == 1
    assert "has not made the endpoint" in operator.err

    assert aws.left() == before


def test_dry_run_prints_requests_that_aws_would_take(operator: Operator, file: Path, tmp_path: Path) -> None:
    """As JSON, a line each, without credentials and without a server."""
    operator.aws = Aws("http://127.0.0.1:9")

    assert operator.run("deploy", "--config", str(file), "--dry-run", "--region", REGION) == 0, operator.err

    calls = [json.loads(line) for line in operator.out.splitlines()]
    assert [call["operation"] for call in calls] == [
        *("create_model", "create_endpoint_config", "create_endpoint", "update_endpoint"),
        *("register_scalable_target", "put_scaling_policy", "put_scaling_policy", "put_metric_alarm"),
    ]
    assert [call.get("only_if") for call in calls[2:4]] == ["there is no such endpoint", "there is one"]


def test_secrets_are_passed_without_being_written_down(
    operator: Operator, aws: Aws, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable's value comes from the environment, where other users cannot read it, and a dry run hides it."""
    monkeypatch.setenv("TORCHMOOR_SESSION_KEYS", "k0:5a5a")
    variables = [
        "--env",
        "TORCHMOOR_SESSION_KEYS",
        "--env",
        "TORCHMOOR_HANDLER_JOURNAL_URL=rediss://:word@cache:6379/0",
    ]

    assert operator.run("deploy", *flags, *variables, "--dry-run") == 0, operator.err
    assert "TORCHMOOR_SESSION_KEYS" in operator.out
    assert "5a5a" not in operator.out
    assert "word@" not in operator.out
    assert operator.run("deploy", *flags, *variables) == 0, operator.err

    [variant] = operator.config()["ProductionVariants"]
    container = aws.ask("sagemaker", "describe_model", ModelName=variant["ModelName"])["PrimaryContainer"]
    assert container["Environment"]["TORCHMOOR_SESSION_KEYS"] == "k0:5a5a"


def test_the_guides_file_is_one_that_aws_would_take(operator: Operator, tmp_path: Path) -> None:
    """And its asynchronous sister, by the flags that the guide has for it."""
    guide = (Path(__file__).parents[2] / "docs" / "sagemaker.md").read_text()
    [text] = re.findall(r"^```yaml\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    (file := tmp_path / "endpoint.yaml").write_text(text)
    [flags] = re.findall(r"--endpoint llava-async ((?:.*\\\n)*.*)", guide)
    topic = f"arn:aws:sns:{REGION}:{ACCOUNT}:done"
    flags = flags.replace("arn:aws:sns:...", topic).replace("\\\n", " ").split()

    assert operator.run("deploy", "--config", str(file), "--dry-run") == 0, operator.err
    assert "SageMakerVariantConcurrentRequestsPerModelHighResolution" in operator.out
    file.write_text(text.replace(", TargetConcurrentRequests: 4", ""))
    assert operator.run("deploy", "--config", str(file), "--endpoint", "llava-async", *flags, "--dry-run") == 0
    assert '"operation": "put_metric_alarm"' in operator.out


def test_long_names_are_kept_apart(operator: Operator, aws: Aws, flags: list[str]) -> None:
    """Names of 63 characters leave no room for a digest; two that begin alike are two deployments all the same."""
    one, two = (f"{'long-' * 12}{end}" for end in ("one", "two"))
    for name in (one, two):
        assert operator.run("deploy", *flags, "--endpoint", name) == 0, operator.err

    assert operator.run("teardown", "--endpoint", one, "--yes") == 0, operator.err

    left = aws.left()
    assert (left["endpoints"], len(left["configs"]), len(left["models"])) == ([two], 1, 1)
    assert operator.run("teardown", "--endpoint", two, "--yes") == 0
    assert aws.left() == {}


def test_a_directory_of_models_is_one_endpoint(operator: Operator, aws: Aws, flags: list[str]) -> None:
    """MultiModel wants a prefix, which may still be empty; a prefix without its slash is told."""
    aws.put_model(key="many/minilm.tar.gz")

    assert operator.run("deploy", *flags, "--multi-model", "--model-data", "s3://models/many") == 1
    assert "ends in a slash: s3://models/many/" in operator.err
    assert operator.run("deploy", *flags, "--multi-model", "--model-data", "s3://models/many/") == 0, operator.err

    [variant] = operator.config()["ProductionVariants"]
    container = aws.ask("sagemaker", "describe_model", ModelName=variant["ModelName"])["PrimaryContainer"]
    assert (container["Mode"], container["ModelDataUrl"]) == ("MultiModel", "s3://models/many/")
    assert container["Environment"] == {"SAGEMAKER_MULTI_MODEL": "true"}


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--role", ""], "no role: give --role ARN"),
        (["--role", f"arn:aws:iam::{ACCOUNT}:role/nobody"], "there is no role"),
        (["--role", f"arn:aws:iam::{ACCOUNT}:role/humans"], "does not trust sagemaker.amazonaws.com"),
        (["--image", ""], "no image: give --image URI"),
        (["--image", "docker.io/library/torchmoor:1"], "SageMaker pulls from nowhere else"),
        (
            ["--image", f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/torchmoor:1"],
            "but the endpoint will be in us-east-1",
        ),
        (["--image", f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/torchmoor:2"], "is not in ECR"),
        (["--image", f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/other:1"], "is not in ECR"),
        (["--model-data", "s3://models/gone.tar.gz"], "there is nothing at s3://models/gone.tar.gz"),
        (["--model-data", "s3://no-such-bucket/llava.tar.gz"], "there is nothing at s3://no-such-bucket"),
        (["--endpoint", "two words"], "EndpointName must look like"),
        (["--instance-type", "ml.g5.xlarg"], "InstanceType must be one of"),
        (["--instances", "0"], "InitialInstanceCount"),
        (["--routing", "STICKY"], "RoutingStrategy must be one of LEAST_OUTSTANDING_REQUESTS"),
        (["--startup-timeout", "4000"], "must be at most 3600, not 4000"),
        (["--max-concurrent", "4"], 'Missing required parameter in AsyncInferenceConfig: "OutputConfig"'),
        (["--async-output", "/tmp/results"], "S3OutputPath must look like"),
        (["--subnet", "subnet-1"], 'Missing required parameter in VpcConfig: "SecurityGroupIds"'),
        (["--env", "NOT_SET_HERE"], "there is no such variable here"),
        (["--min", "0", "--max", "1"], "only an asynchronous endpoint can have no instance"),
        (["--min", "1"], "Autoscaling.MaxCapacity is missing"),
        (["--async-output", "s3://b/o", "--min", "2", "--max", "1"], "Autoscaling"),
        (["--profile", "nobody"], "aws configure list-profiles"),
    ],
)
def test_each_mistake_is_told_before_anything_is_made(
    operator: Operator, aws: Aws, flags: list[str], more: list[str], told: str
) -> None:
    """In words that say what to do."""
    aws.make_role("humans", {"Version": "2012-10-17", "Statement": []})

    assert operator.run("deploy", *flags, *more) == 1

    assert operator.err.startswith("error: ")
    assert told in operator.err
    assert aws.left() == {}


def test_mistakes_in_a_file_are_told(operator: Operator, file: Path) -> None:
    """Unknown groups, members that the API does not have, and what is no YAML."""
    settings = yaml.safe_load(file.read_text())
    for text, told in (
        (yaml.safe_dump({**settings, "Model": {}}), "unknown key 'Model'; known are AsyncInferenceConfig"),
        (yaml.safe_dump({**settings, "ProductionVariant": {"InstanceTyp": "a", "InstanceType": "b"}}), "InstanceTyp"),
        (yaml.safe_dump({**settings, "Autoscaling": {"MinCapacity": 0}}), "Autoscaling.MaxCapacity is missing"),
        ("a: [", "cannot read"),
        ("[]", "must be keys and values"),
    ):
        file.write_text(text)

        assert operator.run("deploy", "--config", str(file)) == 1
        assert told in operator.err


def test_without_region_or_credentials_it_says_so(
    operator: Operator, flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before a person wonders."""
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    operator.connect = Account
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert operator.run("deploy", *flags) == 1
    assert "no region: give --region" in operator.err
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")

    assert operator.run("deploy", *flags, "--region", REGION) == 1

    assert "give --profile" in operator.err
