"""SageMaker's own sequence with boto3 and only AWS_ENDPOINT_URL set: from create_model to delete_endpoint."""

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
from botocore.exceptions import ClientError

from tests.torchserve.conftest import Fleet, processes_below, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_async import path_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve]
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-inference:2.6.0-cpu-py312"
ROLE = "arn:aws:iam::000000000000:role/anything-at-all"
SCALING = "application-autoscaling"
QUICK = {"Delay": 1, "MaxAttempts": 120}
ONE_AT_A_TIME = {"OutputConfig": {}, "ClientConfig": {"MaxConcurrentInvocationsPerInstance": 1}}


@pytest.fixture(scope="module")
def plane(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run `torchmoor up --control-plane` without an endpoint."""
    folder = tmp_path_factory.mktemp("plane")
    with run_fleet("--control-plane", run_dir=folder / "run", log=folder / "up.log") as fleet:
        yield fleet


def create(client: Any, name: str, model_data: str, *, count: int = 1, **environment: str) -> None:
    """Create a model, a configuration and an endpoint of one name."""
    client.create_model(
        ModelName=name,
        PrimaryContainer={"Image": IMAGE, "ModelDataUrl": model_data, "Environment": environment},
        ExecutionRoleArn=ROLE,
    )
    create_config(client, name, count=count)
    client.create_endpoint(EndpointName=name, EndpointConfigName=name)


def create_config(client: Any, name: str, *, model: str = "", count: int = 1, **fields: Any) -> None:
    client.create_endpoint_config(
        EndpointConfigName=name,
        ProductionVariants=[
            {
                "VariantName": "AllTraffic",
                "ModelName": model or name,
                "InitialInstanceCount": count,
                "InstanceType": "ml.g5.xlarge",
            }
        ],
        **fields,
    )


def ask(runtime: Any, name: str, **arguments: Any) -> dict[str, Any]:
    body = {"inputs": "USER: hello ASSISTANT:", "parameters": {"max_new_tokens": 4}}
    answer = runtime.invoke_endpoint(
        EndpointName=name, ContentType="application/json", Body=json.dumps(body), **arguments
    )
    return {"text": answer["Body"].read(), **answer["ResponseMetadata"]["HTTPHeaders"]}


def send_asynchronously(runtime: Any, name: str) -> list[dict[str, Any]]:
    """Send an asynchronous endpoint more requests than it runs at once."""
    body = json.dumps({"inputs": "USER: hello ASSISTANT:", "parameters": {"max_new_tokens": 64}}).encode()
    asked = {"EndpointName": name, "ContentType": "application/json", "Body": body}
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda _: runtime.invoke_endpoint_async(**asked), range(12)))


def check_ended(fleet: Fleet, sent: list[dict[str, Any]]) -> None:
    """Check that each request of the deleted endpoint has one object, and a reason if it did not run."""
    reasons = []
    for each in sent:
        result, failure = path_of(each["OutputLocation"]), path_of(each["FailureLocation"])
        assert result.exists() != failure.exists()
        reasons += [failure.read_text()] if failure.exists() else []
        found = requests.get(f"{fleet.admin}/async-requests/{each['InferenceId']}", timeout=60).json()
        assert found["state"] == ("CANCELLED" if failure.exists() else "COMPLETED")
    assert set(reasons) == {"The endpoint was deleted before the request was done."}


def wait(client: Any, waiter: str, name: str) -> None:
    client.get_waiter(waiter).wait(EndpointName=name, WaiterConfig=QUICK)


def test_an_endpoint_from_create_model_to_delete_endpoint(plane: Fleet, aws: Any, archives: Path) -> None:
    client, runtime = aws("sagemaker", plane), aws("sagemaker-runtime", plane)
    archive = (archives / "llava.mar").as_uri()
    create(client, "chat", archive)
    found = client.describe_endpoint(EndpointName="chat")
    assert found["EndpointStatus"] == "Creating"
    [status] = found["ProductionVariants"][0]["VariantStatus"]
    assert status["Status"] == "Creating"
    assert status["StatusMessage"]
    with pytest.raises(ClientError, match="Cannot update in-progress endpoint"):
        client.delete_endpoint(EndpointName="chat")
    with pytest.raises(ClientError, match="Endpoint chat of account 000000000000 not found"):
        ask(runtime, "chat")
    wait(client, "endpoint_in_service", "chat")
    assert ask(runtime, "chat")["x-amzn-invoked-production-variant"] == "AllTraffic"

    # A session goes on through an update, whose instances are new.
    opened = runtime.invoke_endpoint(
        EndpointName="chat",
        SessionId="NEW_SESSION",
        Body=json.dumps({"type": "start_session", "path": data_url(draw("circle", "red"))}),
    )
    session = opened["NewSessionId"].partition(";")[0]
    first = ask_session(runtime, session)
    create_config(client, "chat-2", model="chat", AsyncInferenceConfig=ONE_AT_A_TIME)
    answers: list[Any] = []
    is_done = threading.Event()

    def keep_asking() -> None:
        while not is_done.wait(0.5):  # the new instance needs the processor too
            try:
                answers.append(ask(runtime, "chat")["text"])
            except Exception as error:
                answers.append(error)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    client.update_endpoint(EndpointName="chat", EndpointConfigName="chat-2")
    updating = client.describe_endpoint(EndpointName="chat")
    assert updating["EndpointStatus"] == "Updating"
    assert updating["PendingDeploymentSummary"]["EndpointConfigName"] == "chat-2"
    assert [each["EndpointName"] for each in client.list_endpoints(StatusEquals="Updating")["Endpoints"]] == ["chat"]
    try:
        wait(client, "endpoint_in_service", "chat")
    finally:
        is_done.set()
        asking.join(60)
    assert answers
    assert [each for each in answers if isinstance(each, Exception)] == []
    found = client.describe_endpoint(EndpointName="chat")
    assert (found["EndpointConfigName"], found["ProductionVariants"][0]["CurrentInstanceCount"]) == ("chat-2", 1)
    assert "FailureReason" not in found
    assert "PendingDeploymentSummary" not in found
    second = ask_session(runtime, session)
    assert second["x-torchmoor-instance"] != first["x-torchmoor-instance"]
    assert second["text"] == first["text"]

    check_metrics(aws("cloudwatch", plane))

    # Each asynchronous request ends with one object; a new endpoint of the same name has none of them in its queue.
    sent = send_asynchronously(runtime, "chat")
    client.delete_endpoint(EndpointName="chat")
    wait(client, "endpoint_deleted", "chat")
    check_ended(plane, sent)
    assert plane.instances() == []
    client.delete_endpoint_config(EndpointConfigName="chat")
    client.delete_endpoint_config(EndpointConfigName="chat-2")
    client.delete_model(ModelName="chat")
    assert client.list_models()["Models"] == client.list_endpoint_configs()["EndpointConfigs"] == []


def check_metrics(cloudwatch: Any) -> None:
    """Read the metrics of the endpoint as a dashboard does, and set an alarm."""
    metric: dict[str, Any] = {
        "Namespace": "AWS/SageMaker",
        "MetricName": "Invocations",
        "Dimensions": [{"Name": "EndpointName", "Value": "chat"}, {"Name": "VariantName", "Value": "AllTraffic"}],
    }
    now = datetime.now(UTC)
    window = {"StartTime": now - timedelta(hours=1), "EndTime": now + timedelta(minutes=2)}
    points = cloudwatch.get_metric_statistics(**metric, **window, Period=3600, Statistics=["Sum", "SampleCount"])
    assert sum(each["Sum"] for each in points["Datapoints"]) >= 1
    latency = {**metric, "MetricName": "ModelLatency"}
    query = {"Id": "latency", "MetricStat": {"Metric": latency, "Period": 60, "Stat": "p99"}}
    [found] = cloudwatch.get_metric_data(MetricDataQueries=[query], **window)["MetricDataResults"]
    assert found["Timestamps"]
    assert all(value > 100 for value in found["Values"])  # in microseconds
    listed = cloudwatch.list_metrics(Namespace="AWS/SageMaker", MetricName="Invocations")["Metrics"]
    assert metric in listed
    alarm = {"ComparisonOperator": "GreaterThanThreshold", "EvaluationPeriods": 5, "Period": 60, "Statistic": "Sum"}
    cloudwatch.put_metric_alarm(AlarmName="busy", Threshold=0.0, DatapointsToAlarm=1, **alarm, **metric)
    [described] = cloudwatch.describe_alarms(AlarmNames=["busy"])["MetricAlarms"]
    assert described["StateValue"] == "ALARM"
    cloudwatch.delete_alarms(AlarmNames=["busy"])
    assert cloudwatch.describe_alarms()["MetricAlarms"] == []
    with pytest.raises(ClientError, match="multiple of 60") as caught:
        cloudwatch.get_metric_statistics(**metric, **window, Period=10, Statistics=["Sum"])
    assert caught.value.response["Error"]["Code"] == "ValidationException"


def ask_session(runtime: Any, session: str) -> dict[str, Any]:
    body = {"type": "send_text_prompt", "session_id": session, "prompt_text": "What colour is the circle?"}
    answer = runtime.invoke_endpoint(EndpointName="chat", SessionId=session, Body=json.dumps(body))
    return {"text": answer["Body"].read(), **answer["ResponseMetadata"]["HTTPHeaders"]}


def test_a_model_that_cannot_be_loaded_fails_and_says_why(plane: Fleet, aws: Any, archives: Path) -> None:
    client = aws("sagemaker", plane)
    create(client, "broken", (archives / "llava.mar").as_uri(), TORCHMOOR_HANDLER_ENGINE_MAX_ROWS="many")
    wait_until(
        lambda: client.describe_endpoint(EndpointName="broken")["EndpointStatus"] == "Failed", "the endpoint has failed"
    )
    assert "max_rows" in client.describe_endpoint(EndpointName="broken")["FailureReason"]
    assert plane.instances() == []
    client.delete_endpoint(EndpointName="broken")
    wait(client, "endpoint_deleted", "broken")


@pytest.mark.slow
def test_resources_survive_a_kill_and_no_process_stays(archives: Path, tmp_path: Path, aws: Any) -> None:
    run_dir = tmp_path / "run"
    with run_fleet("--control-plane", run_dir=run_dir, log=tmp_path / "first.log") as first:
        client = aws("sagemaker", first)
        create(client, "kept", (archives / "llava.mar").as_uri())
        wait_until(lambda: len(processes_below(run_dir)) > 2, "TorchServe is being started")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(60)
    wait_until(lambda: not processes_below(run_dir), "no process of the killed fleet is left")
    with run_fleet("--control-plane", run_dir=run_dir, log=tmp_path / "second.log") as second:
        client, runtime = aws("sagemaker", second), aws("sagemaker-runtime", second)
        wait(client, "endpoint_in_service", "kept")
        assert ask(runtime, "kept")["text"]
        assert [each["ModelName"] for each in client.list_models()["Models"]] == ["kept"]
    assert not processes_below(run_dir)


def test_models_and_configurations_are_described_listed_tagged_and_deleted(
    plane: Fleet, aws: Any, archives: Path
) -> None:
    client = aws("sagemaker", plane)
    data = (archives / "llava.mar").as_uri()
    for number in range(12):
        client.create_model(
            ModelName=f"listed-{number}",
            PrimaryContainer={"Image": IMAGE, "ModelDataUrl": data, "Environment": {"TS_JOB_QUEUE_SIZE": "100"}},
            ExecutionRoleArn=ROLE,
            Tags=[{"Key": "team", "Value": "vision"}],
        )
    described = client.describe_model(ModelName="listed-3")
    assert described["PrimaryContainer"]["ModelDataUrl"] == data
    assert described["ModelArn"] == "arn:aws:sagemaker:us-east-1:000000000000:model/listed-3"
    first = client.list_models(NameContains="listed", SortBy="Name", SortOrder="Ascending")
    rest = client.list_models(NameContains="listed", SortBy="Name", SortOrder="Ascending", NextToken=first["NextToken"])
    names = [each["ModelName"] for each in (*first["Models"], *rest["Models"])]
    assert names == sorted(f"listed-{number}" for number in range(12))
    assert "NextToken" not in rest
    pages = client.get_paginator("list_models").paginate(NameContains="LISTED")
    assert sum(len(page["Models"]) for page in pages) == 12

    arn = described["ModelArn"]
    client.add_tags(ResourceArn=arn, Tags=[{"Key": "stage", "Value": "test"}])
    client.delete_tags(ResourceArn=arn, TagKeys=["team"])
    assert client.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "stage", "Value": "test"}]

    create_config(client, "listed", model="listed-3", count=2)
    config = client.describe_endpoint_config(EndpointConfigName="listed")
    assert config["ProductionVariants"][0]["InitialInstanceCount"] == 2
    for name in names:
        client.delete_model(ModelName=name)
    with pytest.raises(ClientError, match="Could not find model"):
        client.describe_model(ModelName="listed-3")
    with pytest.raises(ClientError, match="Could not find model"):
        client.create_endpoint(EndpointName="listed", EndpointConfigName="listed")
    client.delete_endpoint_config(EndpointConfigName="listed")
    with pytest.raises(ClientError, match="Could not find endpoint configuration"):
        client.create_endpoint(EndpointName="listed", EndpointConfigName="listed")


@pytest.mark.parametrize(
    ("container", "problem"),
    [
        ({"Image": "registry.example/team/unheard-of:1"}, "unheard-of:1' is not served here"),
        ({"Image": IMAGE}, "names no model"),
        ({"Image": IMAGE, "ModelDataUrl": "file:///etc/passwd"}, "may not be read"),
        ({"Image": IMAGE, "ModelDataUrl": "file://STORE/../../../etc/passwd"}, "may not be read"),
        ({"Image": IMAGE, "ModelDataUrl": "file://STORE/no.mar"}, "There is no"),
        ({"Image": IMAGE, "ModelDataUrl": "https://models.example/model.tar.gz"}, "must be s3://"),
        ({"Image": "nvcr.io/nvidia/tritonserver:25.01-py3", "ModelDataUrl": "s3://b/m.tar.gz"}, "Mode MultiModel only"),
        (
            {"Image": IMAGE, "ModelDataUrl": "file://STORE/llava.mar", "Environment": {"TS_MODEL_STORE": "/"}},
            "TS_MODEL_STORE cannot be set",
        ),
        (
            {"Image": IMAGE, "ModelDataUrl": "file://STORE/llava.mar", "Environment": {"TORCHMOOR_SESSION_KEYS": "x"}},
            "must not set TORCHMOOR_SESSION_KEYS",
        ),
        (
            {"Image": IMAGE, "ModelDataUrl": "file://STORE/llava.mar", "Environment": {"NAME": "a\0b"}},
            "no process can be given",
        ),
        ({"Image": IMAGE, "ModelPackageName": "a-package"}, "ModelPackageName is not supported"),
    ],
)
def test_a_container_that_cannot_be_served_is_refused(
    plane: Fleet, aws: Any, archives: Path, container: dict[str, Any], problem: str
) -> None:
    client = aws("sagemaker", plane)
    given = json.loads(json.dumps(container).replace("file://STORE", archives.as_uri()))
    with pytest.raises(ClientError) as caught:
        client.create_model(ModelName="refused", PrimaryContainer=given, ExecutionRoleArn=ROLE)
    assert caught.value.response["Error"]["Code"] == "ValidationException"
    assert problem in caught.value.response["Error"]["Message"]


def test_more_instances_than_allowed_are_refused(plane: Fleet, aws: Any, archives: Path) -> None:
    client = aws("sagemaker", plane)
    with pytest.raises(ClientError, match=r"control\.max_instances allows 8") as caught:
        create(client, "large", (archives / "llava.mar").as_uri(), count=9)
    assert caught.value.response["Error"]["Code"] == "ResourceLimitExceeded"


@pytest.mark.slow
def test_the_published_policy_scales_an_endpoint_to_zero_and_back(plane: Fleet, aws: Any, archives: Path) -> None:
    client, runtime, scaling = (aws(name, plane) for name in ("sagemaker", "sagemaker-runtime", SCALING))
    create(client, "rare", (archives / "llava.mar").as_uri())
    variant = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": "endpoint/rare/variant/AllTraffic",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
    policy = {
        "TargetValue": 5.0,
        "CustomizedMetricSpecification": {
            "MetricName": "ApproximateBacklogSizePerInstance",
            "Namespace": "AWS/SageMaker",
            "Dimensions": [{"Name": "EndpointName", "Value": "rare"}],
            "Statistic": "Average",
        },
        "ScaleInCooldown": 1,
        "ScaleOutCooldown": 1,
    }
    with pytest.raises(ClientError, match="No scalable target registered") as caught:
        scaling.put_scaling_policy(PolicyName="backlog", PolicyType="TargetTrackingScaling", **variant)
    assert caught.value.response["Error"]["Code"] == "ObjectNotFoundException"
    wait(client, "endpoint_in_service", "rare")
    reweigh = client.update_endpoint_weights_and_capacities
    for count in (2, 1):
        capacity = {"VariantName": "AllTraffic", "DesiredInstanceCount": count}
        reweigh(EndpointName="rare", DesiredWeightsAndCapacities=[capacity])
        wait(client, "endpoint_in_service", "rare")
        wait_until(lambda count=count: len(plane.instances()) == count, "as many instances run")
    scaling.register_scalable_target(**variant, MinCapacity=0, MaxCapacity=1)
    put = scaling.put_scaling_policy(
        PolicyName="backlog",
        PolicyType="TargetTrackingScaling",
        TargetTrackingScalingPolicyConfiguration=policy,
        **variant,
    )
    wait(client, "endpoint_in_service", "rare")
    [described] = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    assert described["TargetTrackingScalingPolicyConfiguration"] == policy
    assert described["PolicyARN"] == put["PolicyARN"]
    [target] = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert (target["MinCapacity"], target["MaxCapacity"]) == (0, 1)

    wait_until(lambda: plane.instances() == [], "the idle instance is stopped")
    [found] = client.describe_endpoint(EndpointName="rare")["ProductionVariants"]
    assert (found["CurrentInstanceCount"], found["DesiredInstanceCount"]) == (0, 0)
    reweigh(EndpointName="rare", DesiredWeightsAndCapacities=[{"VariantName": "AllTraffic", "DesiredWeight": 2}])
    wait(client, "endpoint_in_service", "rare")
    assert "FailureReason" not in client.describe_endpoint(EndpointName="rare"), "the count of before does not apply"
    assert ask(runtime, "rare")["text"]  # waits until an instance has started
    activities = scaling.describe_scaling_activities(ServiceNamespace="sagemaker")["ScalingActivities"]
    assert [each["Description"] for each in activities][-2:] == [
        "Setting desired instance count to 1.",
        "Setting desired instance count to 0.",
    ]

    scaling.delete_scaling_policy(PolicyName="backlog", **variant)
    scaling.deregister_scalable_target(**variant)
    assert scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"] == []
    client.delete_endpoint(EndpointName="rare")
    wait(client, "endpoint_deleted", "rare")
    assert plane.instances() == []
