"""Run scripts/deploy_sagemaker.py against moto's server, through boto3 and HTTP."""

import json
import re
import time
from pathlib import Path

import pytest
import yaml
from moto.core.exceptions import JsonRESTError

from tests.aws.conftest import ACCOUNT, REGION, Aws
from tests.aws.operator import NAME, Operator
from tests.aws.slow_sagemaker import SERVING, SlowSageMaker, fails

pytestmark = pytest.mark.slow
RESOURCE = f"endpoint/{NAME}/variant/AllTraffic"
ALARM = f"HasBacklogWithoutCapacity-{NAME}-AllTraffic"


def test_deploys_what_a_file_says_and_takes_it_away(operator: Operator, aws: Aws, file: Path) -> None:
    """Deploying creates the requested resources; teardown removes all of them and may be repeated."""
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
    assert operator.run("deploy", *flags) == 0, operator.err
    before = aws.left()

    assert operator.run("deploy", *flags) == 0, operator.err

    assert aws.left() == before
    assert sagemaker.updates == []
    assert "has this configuration already" in operator.out


def test_a_tag_that_was_pushed_again_is_an_update(
    operator: Operator, aws: Aws, sagemaker: SlowSageMaker, flags: list[str]
) -> None:
    """Images are named by digest, so a new `:latest` is deployed; one previous version is kept."""
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
    """Scaling is off during an update, which SageMaker refuses otherwise, and on again afterwards."""
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
    """After a rollback, the script reports the reason and restores the scaling."""
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


def test_an_update_that_is_refused_leaves_the_scaling_on(
    operator: Operator, aws: Aws, sagemaker: SlowSageMaker, flags: list[str]
) -> None:
    """After a refused update, the endpoint still serves and scales."""
    scaled = [*flags, "--min", "1", "--max", "3"]
    assert operator.run("deploy", *scaled) == 0, operator.err
    sagemaker.refusal = JsonRESTError("ResourceLimitExceeded", "The account-level service limit is 1 Instances")

    assert operator.run("deploy", *scaled, "--instance-type", "ml.g4dn.2xlarge") == 1

    assert "The account-level service limit is 1 Instances" in operator.err
    assert aws.left()["targets"] == [RESOURCE]
    assert aws.left()["policies"] == ["ConcurrentRequests-llava-AllTraffic"]


def test_creation_that_fails_tells_the_reason_and_the_log(
    operator: Operator, aws: Aws, sagemaker: SlowSageMaker, flags: list[str]
) -> None:
    """A failed creation reports SageMaker's reason and the end of the log, and can be repeated."""
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
    """An exceeded quota is reported with its remedy; the next attempt continues from there."""
    told = "The account-level service limit 'ml.g4dn.xlarge for endpoint usage' is 0 Instances"
    sagemaker.refusal = JsonRESTError("ResourceLimitExceeded", told)

    assert operator.run("deploy", *flags) == 1

    assert told in operator.err
    assert "ask for more in Service Quotas" in operator.err
    made = aws.left()
    assert set(made) == {"configs", "models"}
    assert operator.run("status", "--endpoint", NAME) == 3, "resources without an endpoint"
    assert "state: there is none" in operator.out
    sagemaker.refusal = None
    assert operator.run("deploy", *flags) == 0, operator.err
    assert aws.left() == {**made, "endpoints": [NAME]}


def test_waiting_has_an_end(operator: Operator, sagemaker: SlowSageMaker, flags: list[str]) -> None:
    """The script stops waiting after its limit and says how to check; teardown waits until deletion is possible."""
    sagemaker.creation = [{"endpoint_status": "Creating"}] * 40 + [SERVING]

    assert operator.run("deploy", *flags, timeout_s=120) == 1

    assert "llava is still Creating after 120 s" in operator.err
    assert "[   60 s] llava: Creating" in operator.out, "the progress is repeated after a minute"
    assert operator.run("teardown", "--endpoint", NAME, "--yes") == 0
    assert operator.aws.left() == {}


def test_status_tells_what_there_is(operator: Operator, file: Path) -> None:
    """The status is printed for people and as JSON; a missing endpoint has its own exit status."""
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


def end_of_input(question: str) -> str:
    raise EOFError


def test_teardown_asks_first(operator: Operator, aws: Aws, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is deleted without a confirmation, nor without a terminal that could give one."""
    assert operator.run("deploy", *flags) == 0, operator.err
    before = aws.left()

    assert operator.run("teardown", "--endpoint", NAME) == 1
    assert "give --yes" in operator.err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert operator.run("teardown", "--endpoint", NAME) == 1
    assert "endpoint llava, InService" in operator.out
    monkeypatch.setattr("builtins.input", end_of_input)
    assert operator.run("teardown", "--endpoint", NAME) == 1
    assert "nothing was deleted" in operator.err
    assert aws.left() == before

    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert operator.run("teardown", "--endpoint", NAME) == 0
    assert aws.left() == {}


def test_what_others_have_made_is_left_alone(operator: Operator, aws: Aws, flags: list[str]) -> None:
    """An endpoint of this name without our tag, and models with a similar prefix, are left alone."""
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


def test_long_names_are_kept_apart(operator: Operator, aws: Aws, flags: list[str]) -> None:
    """Two names of 63 characters with the same beginning are separate deployments."""
    one, two = (f"{'long-' * 12}{end}" for end in ("one", "two"))
    for name in (one, two):
        assert operator.run("deploy", *flags, "--endpoint", name) == 0, operator.err

    assert operator.run("teardown", "--endpoint", one, "--yes") == 0, operator.err

    left = aws.left()
    assert (left["endpoints"], len(left["configs"]), len(left["models"])) == ([two], 1, 1)
    assert operator.run("teardown", "--endpoint", two, "--yes") == 0
    assert aws.left() == {}


def test_a_directory_of_models_is_one_endpoint(operator: Operator, aws: Aws, flags: list[str]) -> None:
    """A multi-model endpoint accepts an empty prefix; a prefix without its slash is an error."""
    aws.put_model(key="many/minilm.tar.gz")

    assert operator.run("deploy", *flags, "--multi-model", "--model-data", "s3://models/many") == 1
    assert "ends in a slash: s3://models/many/" in operator.err
    assert operator.run("deploy", *flags, "--multi-model", "--model-data", "s3://models/many/") == 0, operator.err

    [variant] = operator.config()["ProductionVariants"]
    container = aws.ask("sagemaker", "describe_model", ModelName=variant["ModelName"])["PrimaryContainer"]
    assert (container["Mode"], container["ModelDataUrl"]) == ("MultiModel", "s3://models/many/")
    assert container["Environment"] == {"SAGEMAKER_MULTI_MODEL": "true"}
