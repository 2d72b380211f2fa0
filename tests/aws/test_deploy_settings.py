"""Settings of scripts/deploy_sagemaker.py from flags, files and the environment, and errors in them."""

import json
import re
from pathlib import Path

import pytest
import yaml
from moto.core.exceptions import JsonRESTError

from scripts.sagemaker_deploy.account import Account
from tests.aws.conftest import ACCOUNT, REGION, Aws
from tests.aws.operator import Operator
from tests.aws.slow_sagemaker import SlowSageMaker

pytestmark = pytest.mark.slow


def test_dry_run_prints_requests_that_aws_would_take(operator: Operator, file: Path, tmp_path: Path) -> None:
    """A dry run prints valid requests as JSON, one per line, without credentials and without a server."""
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
    """A secret's value comes from the environment, which other users cannot read, and a dry run hides it."""
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


@pytest.mark.parametrize(
    "variable",
    [
        *(
            "HF_API_KEY=hidden",
            "db_password=hidden",
            "PGPASSWD=hidden",
            "GOOGLE_CREDENTIALS=hidden",
            "HTTP_AUTH=hidden",
        ),
        *("CACHE=redis://:hid/hidden@cache/0", "MODEL=https://b.s3.aws/x?X-Amz-Date=1&X-Amz-Signature=hidden"),
    ],
)
def test_a_dry_run_hides_whatever_looks_like_a_secret(operator: Operator, flags: list[str], variable: str) -> None:
    """A dry run hides values that look like secrets, because its output goes into pipeline logs and tickets."""
    assert operator.run("deploy", *flags, "--env", variable, "--env", "OMP_NUM_THREADS=1", "--dry-run") == 0

    assert "hidden" not in operator.out
    assert '"OMP_NUM_THREADS": "1"' in operator.out


def test_an_error_of_awss_repeats_no_secret(operator: Operator, sagemaker: SlowSageMaker, flags: list[str]) -> None:
    """Errors of the script omit secrets, although AWS's validation errors quote the whole value."""
    sagemaker.refusal = JsonRESTError("ValidationException", "Value '{HF_TOKEN=hidden}' at 'environment' is too long")

    assert operator.run("deploy", *flags, "--env", "HF_TOKEN=hidden") == 1

    assert "Value '{HF_TOKEN=***}' at 'environment' is too long" in operator.err


def test_a_variable_that_is_a_number_is_refused_without_being_shown(operator: Operator, file: Path) -> None:
    """YAML reads a password of digits as a number; the error does not show it."""
    content = yaml.safe_load(file.read_text())
    content["PrimaryContainer"]["Environment"] = {"DB_PASSWORD": 8675309}
    file.write_text(yaml.safe_dump(content))

    assert operator.run("deploy", "--config", str(file), "--dry-run") == 1

    assert "PrimaryContainer.Environment.DB_PASSWORD must be text: put it into quotes" in operator.err
    assert "8675309" not in operator.err


def test_the_guides_file_is_one_that_aws_would_take(operator: Operator, tmp_path: Path) -> None:
    """The guide's file gives valid requests, also with the guide's flags for an asynchronous endpoint."""
    guide = (Path(__file__).parents[2] / "docs" / "sagemaker.md").read_text()
    [text] = re.findall(r"^```yaml\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    (file := tmp_path / "endpoint.yaml").write_text(text)
    [flags] = re.findall(r"--endpoint llava-async ((?:.*\\\n)*.*)", guide)
    topic = f"arn:aws:sns:{REGION}:{ACCOUNT}:done"
    flags = flags.replace("arn:aws:sns:...", topic).replace("\\\n", " ").split()

    assert operator.run("deploy", "--config", str(file), "--dry-run") == 0, operator.err
    assert "SageMakerVariantConcurrentRequestsPerModelHighResolution" in operator.out
    asynchronous = ("deploy", "--config", str(file), "--endpoint", "llava-async", *flags, "--dry-run")
    assert operator.run(*asynchronous) == 1
    assert "Autoscaling.TargetConcurrentRequests is for real-time endpoints" in operator.err
    file.write_text(text.replace(", TargetConcurrentRequests: 4", ""))
    assert operator.run(*asynchronous) == 0
    assert '"operation": "put_metric_alarm"' in operator.out


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
    """Each mistake is reported with its remedy before anything is created."""
    aws.make_role("humans", {"Version": "2012-10-17", "Statement": []})

    assert operator.run("deploy", *flags, *more) == 1

    assert operator.err.startswith("error: ")
    assert told in operator.err
    assert aws.left() == {}


def test_mistakes_in_a_file_are_told(operator: Operator, file: Path) -> None:
    """Unknown groups, members that the API does not have, and invalid YAML are reported."""
    settings = yaml.safe_load(file.read_text())
    for text, told in (
        (yaml.safe_dump({**settings, "Model": {}}), "unknown key 'Model'; known are AsyncInferenceConfig"),
        (yaml.safe_dump({**settings, "ProductionVariant": {"InstanceTyp": "a", "InstanceType": "b"}}), "InstanceTyp"),
        (yaml.safe_dump({**settings, "Autoscaling": {"MinCapacity": 0}}), "Autoscaling.MaxCapacity is missing"),
        ("a: [", "is not valid YAML"),
        ("EndpointName: 2026-02-30", "is not valid YAML: '2026-02-30' is not a valid timestamp"),
        ("EndpointName: a\nEndpointName: b", "is not valid YAML: key 'EndpointName' is given twice"),
        ("[]", "must be keys and values"),
    ):
        file.write_text(text)

        assert operator.run("deploy", "--config", str(file)) == 1
        assert told in operator.err


@pytest.mark.parametrize("arguments", [("--poll", "0"), ("--poll", "nan"), ("--timeout", "-1")])
def test_times_that_make_no_sense_are_refused(
    arguments: tuple[str, str], operator: Operator, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Impossible times are refused before anything is created."""
    with pytest.raises(SystemExit):
        operator.run("deploy", *flags, *arguments)

    assert f"{arguments[0]}: must be a number of seconds above 0" in capsys.readouterr().err


def test_without_region_or_credentials_it_says_so(
    operator: Operator, flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A missing region or missing credentials are reported at once."""
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    operator.connect = Account
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.delenv("AWS_REGION", raising=False)
    assert operator.run("deploy", *flags) == 1
    assert "no region: give --region" in operator.err
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")

    assert operator.run("deploy", *flags, "--region", REGION) == 1

    assert "give --profile" in operator.err
    monkeypatch.setenv("AWS_REGION", REGION)  # as the message advises; boto3 itself does not read it
    assert operator.run("deploy", *flags) == 1
    assert "give --profile" in operator.err
