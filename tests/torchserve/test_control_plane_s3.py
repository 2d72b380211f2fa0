"""Endpoints that boto3 creates of models in S3: a checkpoint in a model.tar.gz, asynchronous too, and many models."""

import json
import tarfile
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.servers import BUCKET, S3Server
from tests.torchserve.conftest import ROOT, Fleet, run_fleet
from tests.torchserve.test_control_plane import QUICK, ROLE
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.torchserve, pytest.mark.s3]
TGI = "763104351884.dkr.ecr.us-east-1.amazonaws.com/huggingface-pytorch-tgi-inference:2.7.0-tgi3.3.4-gpu-py311"
TRITON = "785573368785.dkr.ecr.us-east-1.amazonaws.com/sagemaker-tritonserver:25.01-py3"
MODELS = f"s3://{BUCKET}/control/models"


@pytest.fixture(scope="module")
def plane(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run `torchmoor up --control-plane` beside a store that has a checkpoint as model.tar.gz."""
    folder = tmp_path_factory.mktemp("plane-s3")
    packed = folder / "model.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for path in (ROOT / "models" / "tiny-llava").iterdir():
            if path.is_file():
                archive.add(path, path.name)
    client = s3_server.client()
    client.upload_file(str(packed), BUCKET, "control/models/model.tar.gz")
    client.close()
    with run_fleet(
        "--control-plane", run_dir=folder / "run", log=folder / "up.log", environment=s3_server.environment
    ) as fleet:
        yield fleet


def make(service: str, fleet: Fleet) -> Any:
    return boto3.client(
        service,
        endpoint_url=fleet.runtime,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


def create(client: Any, name: str, container: dict[str, Any], **config: Any) -> None:
    client.create_model(ModelName=name, PrimaryContainer=container, ExecutionRoleArn=ROLE)
    variant = {"VariantName": "v", "ModelName": name, "InitialInstanceCount": 1, "InstanceType": "ml.g5.xlarge"}
    client.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[variant], **config)
    client.create_endpoint(EndpointName=name, EndpointConfigName=name)
    client.get_waiter("endpoint_in_service").wait(EndpointName=name, WaiterConfig=QUICK)


def test_a_checkpoint_in_a_tarball_also_serves_asynchronous_requests(plane: Fleet, s3_server: S3Server) -> None:
    sagemaker, runtime, s3 = make("sagemaker", plane), make("sagemaker-runtime", plane), s3_server.client()
    create(
        sagemaker,
        "packed",
        {
            "Image": TGI,
            "ModelDataSource": {
                "S3DataSource": {
                    "S3Uri": f"{MODELS}/model.tar.gz",
                    "S3DataType": "S3Object",
                    "CompressionType": "Gzip",
                }
            },
            "Environment": {"HF_MODEL_ID": "/opt/ml/model", "SM_NUM_GPUS": "0", "MAX_INPUT_LENGTH": "150"},
        },
        AsyncInferenceConfig={"OutputConfig": {"S3OutputPath": f"s3://{BUCKET}/control/results"}},
    )
    body = json.dumps({"inputs": "hello", "parameters": {"max_new_tokens": 4}}).encode()
    whole = runtime.invoke_endpoint(EndpointName="packed", ContentType="application/json", Body=body)
    assert "generated_text" in json.load(whole["Body"])[0]
    long = json.dumps({"inputs": "word " * 400}).encode()
    with pytest.raises(ClientError, match="150"):
        runtime.invoke_endpoint(EndpointName="packed", ContentType="application/json", Body=long)
    s3.put_object(Bucket=BUCKET, Key="control/input.json", Body=body)
    accepted = runtime.invoke_endpoint_async(
        EndpointName="packed", ContentType="application/json", InputLocation=f"s3://{BUCKET}/control/input.json"
    )
    assert accepted["OutputLocation"].startswith(f"s3://{BUCKET}/control/results/")
    key = accepted["OutputLocation"].removeprefix(f"s3://{BUCKET}/")
    wait_until(lambda: s3.list_objects_v2(Bucket=BUCKET, Prefix=key)["KeyCount"], "the result is in S3")
    assert "generated_text" in json.load(s3.get_object(Bucket=BUCKET, Key=key)["Body"])[0]
    s3.close()
    sagemaker.delete_endpoint(EndpointName="packed")
    sagemaker.get_waiter("endpoint_deleted").wait(EndpointName="packed", WaiterConfig=QUICK)
    with pytest.raises(ClientError, match="not found"):
        runtime.invoke_endpoint_async(EndpointName="packed", InputLocation=f"s3://{BUCKET}/control/input.json")


def test_a_prefix_in_mode_multi_model_serves_many_models(plane: Fleet) -> None:
    sagemaker, runtime = make("sagemaker", plane), make("sagemaker-runtime", plane)
    create(sagemaker, "shelf", {"Image": TRITON, "ModelDataUrl": f"{MODELS}/", "Mode": "MultiModel"})
    body = json.dumps({"inputs": "hello", "parameters": {"max_new_tokens": 4}})
    answer = runtime.invoke_endpoint(
        EndpointName="shelf", TargetModel="model.tar.gz", ContentType="application/json", Body=body
    )
    assert "generated_text" in json.load(answer["Body"])[0]
    with pytest.raises(ClientError, match="missing a target model header"):
        runtime.invoke_endpoint(EndpointName="shelf", ContentType="application/json", Body=body)
    sagemaker.delete_endpoint(EndpointName="shelf")
    sagemaker.get_waiter("endpoint_deleted").wait(EndpointName="shelf", WaiterConfig=QUICK)
