"""Run one `torchmoor up --control-plane` and an S3 store for all clients of this folder."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.servers import S3Server
from tests.torchserve.conftest import ROOT, Fleet, run_fleet
from tests.torchserve.test_sdk_clients import require_clients
from tests.waiting import PROGRAM_S, wait_until

BUCKET = "published"
CLIENTS = Path(__file__).parent / "clients"
SILENT = "{SchemaVersion: '1.0', SageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}}"
RunClient = Callable[..., dict[str, Any]]


@pytest.fixture(scope="package")
def plane(archives: Path, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run a control plane that accepts the name of the sample's image."""
    folder = tmp_path_factory.mktemp("published")
    s3 = s3_server.client()
    s3.create_bucket(Bucket=BUCKET)
    s3.close()
    with run_fleet(
        *("--control-plane", "--own-image", "llava-stateful", "--allow-image-host", "127.0.0.1"),
        run_dir=folder / "run",
        log=folder / "up.log",
        environment=s3_server.environment,
    ) as fleet:
        yield fleet


@pytest.fixture
def run_client(plane: Fleet, s3_server: S3Server, tmp_path: Path) -> Iterator[RunClient]:
    """Return a function that runs a client, and returns what it prints as its last line of JSON.

    The client must delete everything that it creates.
    """
    (tmp_path / "sagemaker.yaml").write_text(SILENT)

    def run(script: str, *arguments: str) -> dict[str, Any]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "PYTHON"))}
        environment |= s3_server.environment
        environment |= {
            "AWS_ENDPOINT_URL": plane.runtime,
            "AWS_DEFAULT_REGION": "us-east-1",
            "SAGEMAKER_USER_CONFIG_OVERRIDE": str(tmp_path / "sagemaker.yaml"),
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [require_clients(), CLIENTS / script, BUCKET, *arguments],
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        assert plane.instances() == []
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert told["left"] == {"endpoints": [], "configs": [], "models": []}
        return told

    yield run
    remove_all(plane)


def remove_all(plane: Fleet) -> None:
    """Delete the resources that a failed client has left."""
    client = boto3.client(
        "sagemaker",
        endpoint_url=plane.runtime,
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )
    for endpoint in client.list_endpoints()["Endpoints"]:
        name = endpoint["EndpointName"]
        wait_until(
            lambda name=name: client.describe_endpoint(EndpointName=name)["EndpointStatus"] != "Creating",
            "the endpoint can be deleted",
        )
        client.delete_endpoint(EndpointName=name)
        client.get_waiter("endpoint_deleted").wait(EndpointName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 200})
    for config in client.list_endpoint_configs()["EndpointConfigs"]:
        client.delete_endpoint_config(EndpointConfigName=config["EndpointConfigName"])
    for model in client.list_models()["Models"]:
        client.delete_model(ModelName=model["ModelName"])
    client.close()
