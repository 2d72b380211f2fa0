"""scripts/register_autoscaling.py against moto's server, through boto3 and HTTP."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests

from scripts.register_autoscaling import main, register
from torchmoor.config.application_autoscaling import read_autoscaling, resource_of
from torchmoor.config.scaling import ScalingSettings, StepScaling, TargetTracking, TrackedMetric

RESOURCE = "endpoint/llava/variant/AllTraffic"


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return an empty account's address, with credentials in the environment."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.delenv("AWS_REGION", raising=False)
    url = "http://{}:{}".format(*server.get_host_and_port())
    requests.post(f"{url}/moto-api/reset", timeout=60).raise_for_status()  # moto's state belongs to the process
    yield url
    server.stop()


def ask(aws: str, service: str, operation: str, **parameters: Any) -> Any:
    return getattr(boto3.client(service, endpoint_url=aws), operation)(**parameters)


def policies(aws: str) -> dict[str, Any]:
    found = ask(aws, "application-autoscaling", "describe_scaling_policies", ServiceNamespace="sagemaker")
    return {policy["PolicyType"]: policy for policy in found["ScalingPolicies"]}


def targets(aws: str) -> list[dict[str, Any]]:
    found = ask(aws, "application-autoscaling", "describe_scalable_targets", ServiceNamespace="sagemaker")
    return list(found["ScalableTargets"])


def test_registers_the_published_policies_and_removes_them(aws: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script registers and removes limits, target tracking, and a step with its backlog alarm.

    Removing again is not an error.
    """
    arguments = ["--endpoint", "llava", "--endpoint-url", aws]

    assert main(arguments) == 0
    assert main(arguments) == 0, "a second time writes over the first"

    (target,) = targets(aws)
    assert (target["ResourceId"], target["MinCapacity"], target["MaxCapacity"]) == (RESOURCE, 0, 1)
    tracking = policies(aws)["TargetTrackingScaling"]["TargetTrackingScalingPolicyConfiguration"]
    assert (tracking["TargetValue"], tracking["ScaleInCooldown"], tracking["ScaleOutCooldown"]) == (5.0, 600, 300)
    assert tracking["CustomizedMetricSpecification"]["MetricName"] == "ApproximateBacklogSizePerInstance"
    step = policies(aws)["StepScaling"]
    assert step["StepScalingPolicyConfiguration"]["StepAdjustments"] == [
        {"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}
    ]
    alarms = ask(aws, "cloudwatch", "describe_alarms", AlarmNamePrefix="HasBacklogWithoutCapacity")["MetricAlarms"]
    assert [alarm["AlarmActions"] for alarm in alarms] == [[step["PolicyARN"]]]
    assert alarms[0]["Dimensions"] == [{"Name": "EndpointName", "Value": "llava"}]

    assert main([*arguments, "--delete"]) == 0
    assert main([*arguments, "--delete"]) == 0

    assert (targets(aws), policies(aws)) == ([], {})
    alarms = ask(aws, "cloudwatch", "describe_alarms", AlarmNamePrefix="HasBacklogWithoutCapacity")["MetricAlarms"]
    assert alarms == []
    assert "nothing was there" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "region"), [((), "eu-west-1"), (("--region", "us-west-2"), "us-west-2")])
def test_the_region_is_that_of_awss_tools(
    aws: str, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...], region: str
) -> None:
    """AWS_REGION, which SageMaker and the deployment scripts set, precedes AWS_DEFAULT_REGION."""
    monkeypatch.setenv("AWS_REGION", "eu-west-1")

    assert main(["--endpoint", "llava", "--endpoint-url", aws, *option]) == 0

    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    assert [target["ResourceId"] for target in targets(aws)] == [RESOURCE]


def test_registers_what_a_configuration_file_says(aws: str, tmp_path: Path) -> None:
    """The script reads the same file as torchmoor serve."""
    file = tmp_path / "torchmoor.yaml"
    file.write_text(
        json.dumps(
            {
                "Endpoints": [
                    {
                        "EndpointConfig": {
                            "EndpointConfigName": "llava",
                            "ProductionVariants": [{"VariantName": "AllTraffic", "ModelName": "llava"}],
                        }
                    }
                ],
                "Autoscaling": [{"ResourceId": RESOURCE, "MinCapacity": 1, "MaxCapacity": 7}],
            }
        )
    )

    assert main(["--config", str(file), "--endpoint-url", aws]) == 0

    assert [(target["MinCapacity"], target["MaxCapacity"]) for target in targets(aws)] == [(1, 7)]
    assert set(policies(aws)) == {"TargetTrackingScaling", "StepScaling"}


def test_a_dry_run_prints_and_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run prints one line of JSON per request, without credentials and without a server."""
    assert main(["--endpoint", "llava", "--dry-run", "--endpoint-url", "http://127.0.0.1:9"]) == 0

    calls = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [call["operation"] for call in calls] == [
        "register_scalable_target",
        "put_scaling_policy",
        "put_scaling_policy",
        "put_metric_alarm",
    ]


@pytest.mark.parametrize("names", [["--endpoint", "my_llava"], ["--endpoint", "llava", "--variant", "a/b"]])
def test_a_dry_run_refuses_what_sagemaker_refuses(names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run refuses a wrong ResourceId, which Application Auto Scaling accepts without finding a variant."""
    assert main([*names, "--dry-run"]) == 1

    told = capsys.readouterr()
    assert told.out == ""
    assert names[-1] in told.err


def test_errors_are_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing group, an invalid endpoint, out-of-range numbers and other files are reported in one line."""
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "date.yaml").write_text("Autoscaling: 2026-02-30")
    (tmp_path / "empty.yaml").write_text("Endpoints: []")
    (tmp_path / "odd.yaml").write_text("{Endpoints: [{EndpointName: llava}], Autoscaling: [{}]}")

    assert main(["--config", str(tmp_path / "binary.yaml")]) == 1
    assert main(["--config", str(tmp_path / "date.yaml")]) == 1
    assert main(["--config", str(tmp_path / "none.yaml")]) == 1
    assert main(["--config", str(tmp_path / "empty.yaml")]) == 1
    assert main(["--config", str(tmp_path / "odd.yaml")]) == 1
    assert main(["--endpoint", "llava", "--min", "2", "--max", "1"]) == 1

    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["error"] * 6


@pytest.mark.parametrize("metric", TrackedMetric)
def test_what_is_registered_reads_back_as_the_same_settings(metric: TrackedMetric) -> None:
    """The host's launcher and AWS get the same settings."""
    cooldowns = {"scale_in_cooldown_s": 60, "scale_out_cooldown_s": 30}
    settings = ScalingSettings(
        min_capacity=1,
        max_capacity=4,
        initial_count=1,
        tracking=TargetTracking(metric=metric, target=2.5, can_scale_in=False, **cooldowns),
        step=StepScaling(num_instances=2, cooldown_s=10),
    )
    target, *others = register("llava", "AllTraffic", settings)
    entry = {**target.parameters, "ScalingPolicies": [each.parameters for each in others[:2]]}

    read = read_autoscaling([entry], {("llava", "AllTraffic"): None})

    assert read == {("llava", "AllTraffic"): settings}
    assert resource_of("llava", "AllTraffic") == RESOURCE
