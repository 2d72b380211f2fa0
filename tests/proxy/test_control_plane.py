"""The control plane's Describe operations, and access to them."""

from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.proxy.conftest import MakeStage, Stage
from tests.proxy.fake_instance import answering
from torchmoor.config.async_inference import AsyncEndpointSettings
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.config.listen import ListenSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.proxy.instances.instance import Instance, InstanceState

TARGET = {"X-Amz-Target": "SageMaker.ListEndpoints", "Content-Type": "application/x-amz-json-1.1"}


def sagemaker(url: str, *, secret: str = "secret") -> Any:
    return boto3.client(
        "sagemaker",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="AKIAEXAMPLE",
        aws_secret_access_key=secret,
        config=Config(retries={"total_max_attempts": 1}),
    )


@pytest.mark.parametrize("plane", ["runtime_url", "admin_url"])
def test_describes_and_lists_the_configured_endpoints_on_both_ports(stage: Stage, plane: str) -> None:
    client = sagemaker(getattr(stage.proxy, plane))
    found = client.describe_endpoint(EndpointName="llava")
    assert found["EndpointArn"] == "arn:aws:sagemaker:us-east-1:000000000000:endpoint/llava"
    assert found["EndpointStatus"] == "InService"
    assert found["ProductionVariants"][0]["CurrentInstanceCount"] == 2
    client.get_waiter("endpoint_in_service").wait(EndpointName="llava")
    assert [each["EndpointName"] for each in client.list_endpoints()["Endpoints"]] == ["llava"]
    assert client.list_endpoints(NameContains="other")["Endpoints"] == []


def test_what_an_endpoint_names_can_be_described(make_stage: MakeStage) -> None:
    """Each name in a description can itself be described, as the SageMaker SDK's Predictor does."""
    variants = (
        VariantSettings(name="blue", model="llava", weight=3.0, routing_strategy="RANDOM"),
        VariantSettings(name="green", model="other", weight=1.0),
    )
    stage = make_stage(variants=variants, homes={"a": "blue", "b": "green"})
    client = sagemaker(stage.proxy.runtime_url)
    endpoint = client.describe_endpoint(EndpointName="llava")
    config = client.describe_endpoint_config(EndpointConfigName=endpoint["EndpointConfigName"])

    assert config["EndpointConfigArn"] == "arn:aws:sagemaker:us-east-1:000000000000:endpoint-config/llava"
    assert config["CreationTime"] == endpoint["CreationTime"]
    assert config["ProductionVariants"] == [
        {
            "VariantName": name,
            "ModelName": model,
            "InitialInstanceCount": 1,
            "InitialVariantWeight": weight,
            "RoutingConfig": {"RoutingStrategy": strategy},
        }
        for name, model, weight, strategy in (
            ("blue", "llava", 3.0, "RANDOM"),
            ("green", "other", 1.0, "LEAST_OUTSTANDING_REQUESTS"),
        )
    ]
    for variant in config["ProductionVariants"]:
        model = client.describe_model(ModelName=variant["ModelName"])
        assert model["ModelArn"] == f"arn:aws:sagemaker:us-east-1:000000000000:model/{variant['ModelName']}"
        assert model["PrimaryContainer"] == {"Mode": "SingleModel"}

    with pytest.raises(ClientError, match="Could not find endpoint configuration"):
        client.describe_endpoint_config(EndpointConfigName="gone")
    with pytest.raises(ClientError, match="Could not find model"):
        client.describe_model(ModelName="gone")


@pytest.mark.parametrize("is_complete", [False, True])
def test_asynchronous_inference_is_described(make_stage: MakeStage, tmp_path: Path, *, is_complete: bool) -> None:
    """Asynchronous inference is described in CreateEndpointConfig's form, with the default paths in effect."""
    topic = "arn:aws:sns:us-east-1:123456789012:done"
    config = AsyncEndpointSettings(
        output_path=(tmp_path / "results/own").as_uri(),
        failure_path=(tmp_path / "results/failed").as_uri(),
        success_topic=topic,
        include_response_in=("SUCCESS_NOTIFICATION_TOPIC",),
        max_concurrent_per_instance=2,
    )
    stage = make_stage(async_folder=tmp_path, async_config=config if is_complete else None)
    client = sagemaker(stage.proxy.runtime_url)

    endpoint = client.describe_endpoint(EndpointName="llava")["AsyncInferenceConfig"]
    described = client.describe_endpoint_config(EndpointConfigName="llava")["AsyncInferenceConfig"]

    assert described == endpoint
    if is_complete:
        notification = {"SuccessTopic": topic, "IncludeInferenceResponseIn": ["SUCCESS_NOTIFICATION_TOPIC"]}
        assert endpoint == {
            "ClientConfig": {"MaxConcurrentInvocationsPerInstance": 2},
            "OutputConfig": {
                "S3OutputPath": (tmp_path / "results/own").as_uri(),
                "S3FailurePath": (tmp_path / "results/failed").as_uri(),
                "NotificationConfig": notification,
            },
        }
    else:
        root = stage.settings.async_inference.output_root
        assert endpoint == {
            "OutputConfig": {
                "S3OutputPath": f"{root}/async-endpoint-outputs/llava",
                "S3FailurePath": f"{root}/async-endpoint-failures/llava",
            }
        }


def test_an_endpoint_without_asynchronous_inference_describes_none(stage: Stage) -> None:
    assert "AsyncInferenceConfig" not in sagemaker(stage.proxy.runtime_url).describe_endpoint(EndpointName="llava")


def test_a_missing_endpoint_has_the_services_error_and_ends_the_waiter(stage: Stage) -> None:
    client = sagemaker(stage.proxy.runtime_url)
    with pytest.raises(ClientError, match=r'Could not find endpoint "arn:aws:sagemaker:.*:endpoint/gone"') as caught:
        client.describe_endpoint(EndpointName="gone")
    assert caught.value.response["Error"]["Code"] == "ValidationException"
    client.get_waiter("endpoint_deleted").wait(EndpointName="gone")


def test_input_is_checked_against_the_services_model(stage: Stage) -> None:
    url = stage.proxy.runtime_url
    target = {**TARGET, "X-Amz-Target": "SageMaker.DescribeEndpoint"}
    for body, problem in (
        (b'{"EndpointName": "two words"}', "must match"),
        (b'{"EndpointName": 5}', "Invalid type"),
        (b"{}", "Missing required parameter"),
        (b'{"EndpointName": "llava", "Other": 1}', "Unknown parameter"),
        (b"[]", "must be a JSON object"),
        (b"{", "not valid JSON"),
    ):
        answer = requests.post(url, headers=target, data=body, timeout=60)
        assert (answer.status_code, answer.json()["__type"]) == (400, "ValidationException")
        assert problem in answer.json()["message"]


def test_other_operations_name_those_that_are_served(stage: Stage) -> None:
    client = sagemaker(stage.proxy.runtime_url)
    with pytest.raises(
        ClientError, match="Served are DescribeEndpoint, DescribeEndpointConfig, DescribeModel, ListEndpoints"
    ) as caught:
        client.create_training_job(
            TrainingJobName="job",
            AlgorithmSpecification={"TrainingInputMode": "File"},
            RoleArn="arn:aws:iam::000000000000:role/any-role-there-is",
            OutputDataConfig={"S3OutputPath": "s3://bucket/out"},
            ResourceConfig={"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
            StoppingCondition={"MaxRuntimeInSeconds": 60},
        )
    assert caught.value.response["Error"]["Code"] == "UnknownOperationException"
    other = requests.post(
        stage.proxy.runtime_url, headers={**TARGET, "X-Amz-Target": "Logs_1.Any"}, data=b"{}", timeout=60
    )
    assert "sagemaker (SageMaker)" in other.json()["message"]


@pytest.mark.parametrize(
    ("service", "operation", "arguments"),
    [
        ("s3", "put_object", {"Bucket": "bucket", "Key": "key", "Body": b"model"}),
        ("s3", "list_objects_v2", {"Bucket": "bucket"}),
        ("s3", "list_objects_v2", {"Bucket": "embeddings"}),
        ("s3", "list_buckets", {}),
        ("s3", "put_object", {"Bucket": "bucket", "Key": "evaluation/responses", "Body": b"model"}),
        ("sts", "get_caller_identity", {}),
        ("iam", "get_role", {"RoleName": "execution"}),
        ("sns", "list_topics", {}),
    ],
)
def test_other_services_that_one_address_covers_say_what_to_set(
    stage: Stage, service: str, operation: str, arguments: dict[str, Any]
) -> None:
    """A request for another AWS service gets an error that names the variable to set instead of AWS_ENDPOINT_URL."""
    client = boto3.client(
        service,
        endpoint_url=stage.proxy.runtime_url,
        region_name="us-east-1",
        aws_access_key_id="AKIAEXAMPLE",
        aws_secret_access_key="secret",
        config=Config(retries={"total_max_attempts": 1}),
    )
    with pytest.raises(ClientError, match=f"does not serve {service}: set AWS_ENDPOINT_URL_{service.upper()} to"):
        getattr(client, operation)(**arguments)
    client.close()


@pytest.mark.parametrize("plane", ["runtime_url", "admin_url"])
def test_a_web_page_does_not_reach_it(stage: Stage, plane: str) -> None:
    url = getattr(stage.proxy, plane)
    assert requests.post(url, headers=TARGET, data=b"{}", timeout=60).status_code == 200
    for headers, status in (
        ({**TARGET, "Origin": "https://page.example"}, 403),
        ({**TARGET, "Host": "page.example"}, 403),
        ({"Content-Type": "text/plain"}, 404),  # a page may send this without a preflight
    ):
        assert requests.post(url, headers=headers, data=b"{}", timeout=60).status_code == status
    preflight = requests.options(
        url,
        headers={"Origin": "https://page.example", "Access-Control-Request-Headers": "x-amz-target"},
        timeout=60,
    )
    assert preflight.status_code >= 400
    assert "Access-Control-Allow-Origin" not in preflight.headers


def test_keys_guard_it_on_the_data_plane(make_stage: MakeStage) -> None:
    stage = make_stage(credentials=Credentials(keys={"AKIAEXAMPLE": AccessKey(secret="0123456789abcdef")}))
    url = stage.proxy.runtime_url
    assert sagemaker(url, secret="0123456789abcdef").list_endpoints()["Endpoints"]
    with pytest.raises(ClientError, match="signature we calculated does not match"):
        sagemaker(url, secret="another").list_endpoints()
    assert requests.post(url, headers=TARGET, data=b"{}", timeout=60).status_code == 403


def test_an_open_address_without_keys_does_not_serve_it(make_stage: MakeStage) -> None:
    stage = make_stage(listen=ListenSettings(host="0.0.0.0", port=0, admin_port=0))
    answer = requests.post(f"http://127.0.0.1:{stage.proxy.port}", headers=TARGET, data=b"{}", timeout=60)
    assert answer.status_code == 403
    assert "needs access keys" in answer.json()["message"]


def test_endpoints_come_change_and_go_while_requests_are_served(stage: Stage) -> None:
    client = stage.client()
    stage.a.behave = answering(body=b"a")
    stage.b.behave = answering(body=b"b")

    async def stage_endpoint(generation: int, port: int) -> Endpoint:
        settings = EndpointSettings(name="other", variants=(VariantSettings(model=f"model{generation}"),))
        endpoint = stage.registry.stage(settings, generation)
        name = f"other-{generation}"
        stage.registry.add(
            Instance(
                name=name,
                endpoint="other",
                generation=generation,
                model=f"model{generation}",
                port=port,
                state=InstanceState.READY,
            )
        )
        return endpoint

    async def end(endpoint: Endpoint) -> None:
        stage.registry.retire(endpoint)
        for instance in list(endpoint.instances):
            stage.registry.dismiss(instance.name)
        stage.registry.forget(endpoint)

    def invoke() -> tuple[str, str]:
        answer = client.invoke_endpoint(EndpointName="other", Body=b"{}")
        return answer["Body"].read().decode(), answer["ResponseMetadata"]["HTTPHeaders"]["x-torchmoor-instance"]

    with pytest.raises(ClientError, match="Endpoint other of account 000000000000 not found"):
        invoke()
    first = stage.run(stage_endpoint(1, stage.a.port))
    with pytest.raises(ClientError, match="not found"):
        invoke()
    stage.call(stage.registry.serve, first)
    assert invoke() == ("a", "other-1")
    second = stage.run(stage_endpoint(2, stage.b.port))
    assert invoke() == ("a", "other-1")
    stage.call(stage.registry.serve, second)
    assert invoke() == ("b", "other-2")
    stage.run(end(first))
    assert invoke() == ("b", "other-2")
    assert stage.b.received[-1].path == "/predictions/model2"
    assert 'endpoint="other"' in stage.admin("/metrics").text
    stage.run(end(second))
    with pytest.raises(ClientError, match="not found"):
        invoke()
    assert 'endpoint="other"' not in stage.admin("/metrics").text


def test_the_cbor_protocol_has_the_same_errors_and_the_same_guard(stage: Stage) -> None:
    url = f"{stage.proxy.runtime_url}/service/SageMaker/operation/ListEndpoints"
    cbor = {"Smithy-Protocol": "rpc-v2-cbor", "Content-Type": "application/cbor"}
    assert b"llava" in requests.post(url, headers=cbor, data=b"\xa0", timeout=60).content
    for body in (b"\x9f" * 20_000, b"\xa1", b"\x5b\xff\xff\xff\xff\xff\xff\xff\xff", b"\x80"):
        answer = requests.post(url, headers=cbor, data=body, timeout=60)
        assert (answer.status_code, answer.headers["x-amzn-errortype"]) == (400, "ValidationException")
    assert requests.post(url, headers={**cbor, "Origin": "https://page.example"}, timeout=60).status_code == 403
    assert requests.post(url, data=b"\xa0", timeout=60).status_code == 404
    cloudwatch = boto3.client(
        "cloudwatch",
        endpoint_url=stage.proxy.runtime_url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    with pytest.raises(ClientError, match="names no service that is served here") as caught:
        cloudwatch.list_metrics()
    assert caught.value.response["Error"]["Code"] == "UnknownOperationException"
    cloudwatch.close()
