"""Asynchronous inference on real TorchServe, with boto3's own client."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import boto3
import pytest
import requests

from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve]


def question(color: str) -> bytes:
    """Return a body with an image of a circle and the question for its color."""
    picture = {"type": "image_url", "image_url": {"url": data_url(draw("circle", color))}}
    text = {"type": "text", "text": "What color is the circle?"}
    return json.dumps({"messages": [{"role": "user", "content": [picture, text]}], "max_tokens": 8}).encode()


def path_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def submit(fleet: Fleet, **members: Any) -> dict[str, Any]:
    with_type = {"ContentType": "application/json", **members}
    return fleet.client().invoke_endpoint_async(EndpointName="llava", **with_type)


def until_there(url: str) -> str:
    wait_until(path_of(url).is_file, f"{url} is there")
    return path_of(url).read_text()


def state_of(fleet: Fleet, inference_id: str) -> str:
    return str(requests.get(f"{fleet.admin}/async-requests/{inference_id}", timeout=60).json()["state"])


def test_inline_and_stored_inputs_are_answered(fleet: Fleet) -> None:
    """Input is taken from the body or InputLocation; Filename and S3OutputPathExtension name the result."""
    inline = submit(fleet, Body=question("red"))
    inputs = path_of(inline["OutputLocation"]).parents[3] / "inputs"
    (inputs / "question.json").write_bytes(question("blue"))

    stored = submit(fleet, InputLocation=(inputs / "question.json").as_uri(), Filename="a.json")
    folder = submit(fleet, Body=question("green"), S3OutputPathExtension="mine/today")

    for answer, color in ((inline, "red"), (stored, "blue"), (folder, "green")):
        assert color in until_there(answer["OutputLocation"])
        assert not path_of(answer["FailureLocation"]).exists()
    assert stored["OutputLocation"].endswith("/async-endpoint-outputs/llava/a.json")
    assert "/mine/today/" in folder["OutputLocation"]


def test_the_endpoint_describes_where_results_go(fleet: Fleet) -> None:
    client = boto3.client(
        "sagemaker",
        endpoint_url=fleet.runtime,
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )

    output = client.describe_endpoint(EndpointName="llava")["AsyncInferenceConfig"]["OutputConfig"]

    answer = submit(fleet, Body=question("red"))
    assert answer["OutputLocation"].startswith(f"{output['S3OutputPath']}/")
    assert answer["FailureLocation"].startswith(f"{output['S3FailurePath']}/")


def test_models_error_becomes_a_failure_object(fleet: Fleet) -> None:
    """The handler's 400 ends the request, and the failure object contains its message."""
    answer = submit(fleet, Body=b'{"messages": "no list"}')

    assert "Received client error (400) from primary" in until_there(answer["FailureLocation"])
    wait_until(lambda: state_of(fleet, answer["InferenceId"]) == "FAILED", "the request has failed")
    assert not path_of(answer["OutputLocation"]).exists()


def test_session_is_opened_and_asked_asynchronously(fleet: Fleet) -> None:
    """A session that an asynchronous request opens continues with a real-time client."""
    body = json.dumps({"type": "start_session", "path": data_url(draw("circle", "red"))}).encode()
    opened = json.loads(until_there(submit(fleet, Body=body)["OutputLocation"]))

    asked = {"type": "send_text_prompt", "session_id": opened["session_id"], "prompt_text": "What color is the circle?"}
    answer = fleet.client().invoke_endpoint(
        EndpointName="llava", SessionId=opened["session_id"], Body=json.dumps(asked).encode()
    )

    assert "red" in json.loads(answer["Body"].read())["response_text"]
