"""Asynchronous requests of endpoints that the control plane deletes."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.torchserve.conftest import Fleet, processes_below, run_fleet
from tests.torchserve.test_async import path_of
from tests.torchserve.test_control_plane import IMAGE, ROLE, wait
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.timeout(240)]


def create_queued(client: Any, runtime: Any, archives: Path) -> list[dict[str, Any]]:
    """Create an asynchronous endpoint, and send it more requests than it runs at once."""
    place = {"Image": IMAGE, "ModelDataUrl": (archives / "llava.mar").as_uri()}
    client.create_model(ModelName="queued", PrimaryContainer=place, ExecutionRoleArn=ROLE)
    variant = {"VariantName": "AllTraffic", "ModelName": "queued", "InitialInstanceCount": 1}
    client.create_endpoint_config(
        EndpointConfigName="queued",
        ProductionVariants=[variant],
        AsyncInferenceConfig={"OutputConfig": {}, "ClientConfig": {"MaxConcurrentInvocationsPerInstance": 1}},
    )
    client.create_endpoint(EndpointName="queued", EndpointConfigName="queued")
    wait(client, "endpoint_in_service", "queued")
    body = json.dumps({"inputs": "USER: hello ASSISTANT:", "parameters": {"max_new_tokens": 64}}).encode()
    asked = {"EndpointName": "queued", "ContentType": "application/json", "Body": body}
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda _: runtime.invoke_endpoint_async(**asked), range(12)))


def check_ended(fleet: Fleet, sent: list[dict[str, Any]]) -> None:
    """Each request has one object; those that did not run have the reason."""
    reasons = []
    for each in sent:
        result, failure = path_of(each["OutputLocation"]), path_of(each["FailureLocation"])
        assert result.exists() != failure.exists()
        reasons += [failure.read_text()] if failure.exists() else []
        found = requests.get(f"{fleet.admin}/async-requests/{each['InferenceId']}", timeout=60).json()
        assert found["state"] == ("CANCELLED" if failure.exists() else "COMPLETED")
    assert set(reasons) == {"The endpoint was deleted before the request was done."}


def test_a_deleted_endpoint_leaves_no_asynchronous_request(archives: Path, tmp_path: Path, aws: Any) -> None:
    """Each ends with one object, so that another endpoint of the same name has nothing of it to run."""
    with run_fleet("--control-plane", run_dir=tmp_path / "run", log=tmp_path / "up.log") as fleet:
        client = aws("sagemaker", fleet)
        sent = create_queued(client, aws("sagemaker-runtime", fleet), archives)
        client.delete_endpoint(EndpointName="queued")
        wait(client, "endpoint_deleted", "queued")
        check_ended(fleet, sent)


@pytest.mark.slow
def test_a_deletion_that_a_kill_interrupts_leaves_no_asynchronous_request(
    archives: Path, tmp_path: Path, aws: Any
) -> None:
    run_dir = tmp_path / "run"
    with run_fleet("--control-plane", run_dir=run_dir, log=tmp_path / "first.log") as first:
        client = aws("sagemaker", first)
        sent = create_queued(client, aws("sagemaker-runtime", first), archives)
        client.delete_endpoint(EndpointName="queued")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(60)
    wait_until(lambda: not processes_below(run_dir), "no process of the killed fleet is left")
    with run_fleet("--control-plane", run_dir=run_dir, log=tmp_path / "second.log") as second:
        wait(aws("sagemaker", second), "endpoint_deleted", "queued")
        check_ended(second, sent)
