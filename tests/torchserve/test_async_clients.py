"""Clients of asynchronous inference against real TorchServe instances: results in files, and in a real S3 server."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from tests.servers import BUCKET, S3Server
from tests.torchserve.configured_proxy import serve_configured
from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import draw
from tests.torchserve.test_sdk_clients import run
from tests.torchserve.test_sessions import Chat
from tests.waiting import wait_until

pytestmark = pytest.mark.torchserve
PROMPT = "<s><|user|>What color is the circle?<|end|><|assistant|>"


@pytest.fixture(scope="module")
def s3_proxy(fleet: Fleet, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a second proxy for the fleet's instances that stores results in S3, and return its address."""
    folder = tmp_path_factory.mktemp("s3-proxy")
    config = {
        "EndpointConfigName": "llava",
        "ProductionVariants": [{"VariantName": "AllTraffic", "ModelName": "llava"}],
        "AsyncInferenceConfig": {
            "OutputConfig": {"S3OutputPath": f"s3://{BUCKET}/out", "S3FailurePath": f"s3://{BUCKET}/failed"}
        },
    }
    content = {
        "Endpoints": [{"EndpointConfig": config}],
        "Instances": [{"name": each["name"], "port": each["port"]} for each in fleet.instances()],
        "async_inference": {"queue": f"sqlite://{folder / 'queue.db'}"},
    }
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    with serve_configured(fleet, folder, content, {**environment, **s3_server.environment}) as served:
        wait_until(lambda: requests.get(f"{served.admin}/healthz", timeout=60).ok, "the proxy has instances")
        yield served.runtime


def client_of(server: S3Server) -> str:
    """Return the arguments of boto3's S3 client for a script."""
    environment = server.environment
    return json.dumps(
        {
            "endpoint_url": environment["AWS_ENDPOINT_URL_S3"],
            "region_name": "us-east-1",
            "aws_access_key_id": environment["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": environment["AWS_SECRET_ACCESS_KEY"],
        }
    )


def check_langchain(told: dict[str, Any], scheme: str) -> None:
    """Check equal answers of all methods, and error messages with the answer's location."""
    assert told["whole"]
    assert told["stopped"] == told["whole"].partition("circle")[0]
    assert told["several"] == [told["several"][0]] * 3
    assert told["several"][0].startswith(told["whole"])
    assert told["failed"].startswith("AsyncInferenceFailed: parameters.temperature must be")
    assert told["timed_out"].startswith("AsyncInferenceTimedOut: ")
    assert all(urlsplit(told[name].split()[-1]).scheme == scheme for name in ("failed", "timed_out"))


def test_langchain_waits_for_results_in_files(fleet: Fleet) -> None:
    """SagemakerAsyncEndpoint works without services: inputs in the request, results below `torchmoor up`'s folder."""
    check_langchain(run("langchain_async.py", fleet.runtime, PROMPT), "file")


def test_langchain_waits_for_results_in_s3(s3_proxy: str, s3_server: S3Server) -> None:
    """Inputs and results go through a real S3 server."""
    check_langchain(run("langchain_async.py", s3_proxy, PROMPT, client_of(s3_server)), "s3")


def test_sagemaker_sdk_predicts_asynchronously(s3_proxy: str, s3_server: S3Server) -> None:
    """AsyncPredictor works: predict_async with get_result, polled and waited for, predict, and refusals."""
    told = run("sagemaker_async_predictor.py", s3_proxy, client_of(s3_server))

    assert told["output"] == f"s3://{BUCKET}/out/inference-1.out"
    assert told["failure"] == f"s3://{BUCKET}/failed/inference-1-error.out"
    assert told["polled"] == told["waited"] == told["predicted"]
    assert told["polled"][0]["generated_text"]
    assert "'type' must be one of" in told["broken"]


def test_a_session_is_opened_by_an_asynchronous_request(fleet: Fleet, s3_proxy: str, s3_server: S3Server) -> None:
    """An image in S3 is the input of an opening without a session id; the result contains the id."""
    s3_server.client().put_object(Bucket=BUCKET, Key="inputs/circle.png", Body=draw("circle", "red"))
    submitted = (
        replace(fleet, runtime=s3_proxy)
        .client()
        .invoke_endpoint_async(
            EndpointName="llava", ContentType="image/png", InputLocation=f"s3://{BUCKET}/inputs/circle.png"
        )
    )
    key = submitted["OutputLocation"].removeprefix(f"s3://{BUCKET}/")

    def results() -> list[Any]:
        return s3_server.client().list_objects_v2(Bucket=BUCKET, Prefix=key).get("Contents", [])

    wait_until(results, "the result is there", interval_s=0.2)
    opened = json.loads(s3_server.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())

    assert Chat(fleet.client(), opened["session_id"]).ask("What color is the circle?") == "The circle is red."


def test_videos_and_sounds_are_told_that_they_are_not_supported(fleet: Fleet) -> None:
    """Videos and sounds are refused in a synchronous call, and in an asynchronous call's failure object."""
    client = fleet.client()
    for kind in ("video/mp4", "audio/wav"):
        with pytest.raises(client.exceptions.ModelError, match=f"{kind[:5]} is not supported") as caught:
            client.invoke_endpoint(EndpointName="llava", ContentType=kind, Body=b"\x00")
        assert caught.value.response["OriginalStatusCode"] == 415

    submitted = client.invoke_endpoint_async(EndpointName="llava", ContentType="video/mp4", Body=b"\x00")
    failure = Path(urlsplit(submitted["FailureLocation"]).path)
    wait_until(failure.exists, "a failure object")
    assert "video is not supported" in failure.read_text()
