"""The open inference protocol on real TorchServe: by NVIDIA's client, by boto3's TargetModel, and by plain HTTP."""

import json
import struct
from urllib.parse import urlsplit

import pytest
import requests

from tests.torchserve.many.fleet import ManyFleet
from tests.torchserve.many.population import CLASSIFIERS
from tests.torchserve.test_sdk_clients import run

pytestmark = pytest.mark.torchserve
MODEL = "triton.tar.gz"  # doubles its input
SAGEMAKERS = "application/vnd.sagemaker-triton.binary+json;json-header-size="
FLOATS = "<6f"


def binary_request() -> tuple[int, bytes]:
    """Return a request with a raw tensor, made by hand, and the length of its JSON."""
    raw = struct.pack(FLOATS, 1, 2, 3, 4, 5, 6)
    tensor = {"name": "INPUT__0", "shape": [2, 3], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return len(head), head + raw


def read_binary(length: int, body: bytes) -> tuple[dict[str, object], tuple[float, ...]]:
    (described,) = json.loads(body[:length])["outputs"]
    return described, struct.unpack(FLOATS, body[length:])


def test_nvidias_client_asks_and_infers(many: ManyFleet) -> None:
    """Health, metadata, JSON and raw tensors, and errors in the protocol's form."""
    told = run("triton_http.py", urlsplit(many.fleet.runtime).netloc, MODEL)

    doubled = {"values": [[3.0, -4.0, 6.5], [pytest.approx(0.2), pytest.approx(0.4), pytest.approx(0.6)]]}
    assert (told["live"], told["ready"], told["model_ready"], told["unknown_ready"]) == (True, True, True, False)
    assert told["server"] == ["binary_tensor_data"]
    assert told["metadata"] == {
        "name": MODEL,
        "versions": ["1"],
        "platform": "pytorch_libtorch",
        "inputs": [{"name": "INPUT__0", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "OUTPUT__0", "datatype": "FP32", "shape": [-1, 3]}],
    }
    assert told["raw"] == {**doubled, "is_raw": True, "id": "mine", "model": MODEL}
    assert told["json"] == {**doubled, "is_raw": False, "id": "mine", "model": MODEL}
    assert told["unknown"][0] == "404"
    assert told["wrong"] == ["400", "the inputs must be INPUT__0"]
    assert told["version"] == told["metadata"]
    assert "no version '2'" in told["other_version"][1]


def test_raw_tensors_by_plain_http(many: ManyFleet) -> None:
    """A client without a library sends raw tensors; a model without tensors is ready and has no inputs."""
    url = f"{many.fleet.runtime}/v2/models"
    length, body = binary_request()

    answer = requests.post(
        f"{url}/{MODEL}/infer", data=body, headers={"Inference-Header-Content-Length": str(length)}, timeout=120
    )
    described, values = read_binary(int(answer.headers["Inference-Header-Content-Length"]), answer.content)

    assert answer.headers["content-type"] == "application/octet-stream"
    assert described["parameters"] == {"binary_data_size": 24}
    assert values == (2, 4, 6, 8, 10, 12)
    assert requests.get(f"{url}/{MODEL}/versions/1/ready", timeout=120).json() == {"name": MODEL, "ready": True}
    assert requests.get(f"{url}/{MODEL}/versions/2/ready", timeout=120).status_code == 400
    assert requests.get(f"{url}/{CLASSIFIERS[0]}/ready", timeout=120).json() == {"name": CLASSIFIERS[0], "ready": True}
    assert requests.get(f"{url}/{CLASSIFIERS[0]}", timeout=120).json()["inputs"] == []


def test_boto3_sends_raw_tensors_to_a_target_model(many: ManyFleet) -> None:
    """SageMaker's Triton examples name the length of the JSON in the content type, in both directions."""
    length, body = binary_request()

    answer = many.fleet.client().invoke_endpoint(
        EndpointName="many", TargetModel=MODEL, ContentType=f"{SAGEMAKERS}{length}", Accept=SAGEMAKERS, Body=body
    )

    assert answer["ContentType"].startswith(SAGEMAKERS)
    _, values = read_binary(int(answer["ContentType"].removeprefix(SAGEMAKERS)), answer["Body"].read())
    assert values == (2, 4, 6, 8, 10, 12)
