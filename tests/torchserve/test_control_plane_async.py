"""Asynchronous requests of an endpoint whose deletion by the control plane is interrupted by a kill."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.torchserve.conftest import processes_below, run_fleet
from tests.torchserve.test_control_plane import (
    IMAGE,
    ONE_AT_A_TIME,
    ROLE,
    check_ended,
    create_config,
    send_asynchronously,
    wait,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve]


@pytest.mark.slow
def test_a_deletion_that_a_kill_interrupts_leaves_no_asynchronous_request(
    archives: Path, tmp_path: Path, aws: Any
) -> None:
    """After the restart the deletion ends with no request left; test_control_plane.py has an uninterrupted deletion."""
    run_dir = tmp_path / "run"
    with run_fleet("--control-plane", run_dir=run_dir, log=tmp_path / "first.log") as first:
        client = aws("sagemaker", first)
        place = {"Image": IMAGE, "ModelDataUrl": (archives / "llava.mar").as_uri()}
        client.create_model(ModelName="queued", PrimaryContainer=place, ExecutionRoleArn=ROLE)
        create_config(client, "queued", AsyncInferenceConfig=ONE_AT_A_TIME)
        client.create_endpoint(EndpointName="queued", EndpointConfigName="queued")
        wait(client, "endpoint_in_service", "queued")
        sent = send_asynchronously(aws("sagemaker-runtime", first), "queued")
        client.delete_endpoint(EndpointName="queued")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(60)
    wait_until(lambda: not processes_below(run_dir), "no process of the killed fleet is left")
    with run_fleet("--control-plane", run_dir=run_dir, log=tmp_path / "second.log") as second:
        wait(aws("sagemaker", second), "endpoint_deleted", "queued")
        check_ended(second, sent)
