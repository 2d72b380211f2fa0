"""Clients above boto3, from a virtual environment of their own (make clients), against real TorchServe instances."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.tools import missing
from tests.torchserve.conftest import ROOT, Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_sessions import SAMPLES
from tests.waiting import PROGRAM_S

pytestmark = pytest.mark.torchserve
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
CLIENTS = ROOT / "tests" / "torchserve" / "clients"


def require_clients() -> Path:
    """Return the Python that has the clients."""
    if not PYTHON.exists():
        missing("the clients are not installed; run make clients")
    return PYTHON


def run(script: str, *arguments: str) -> Any:
    """Run a client's script and return its line of JSON."""
    done = subprocess.run(
        [require_clients(), CLIENTS / script, *arguments],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "PYTHON"))},
            "PYTHONPATH": str(ROOT),  # torchmoor.clients is not installed there
        },
    )
    assert done.returncode == 0, (done.stderr + done.stdout)[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_sagemaker_sdk_predicts_in_a_session(fleet: Fleet) -> None:
    """Predictor supports initial_args, variants, ids and attributes, both stream iterators, and errors."""
    told = run("sagemaker_predictor.py", fleet.runtime, str(SAMPLES / "red_circle.png"))

    assert told["opened"].startswith("ts-seq-")
    assert told["asked"] == {"response_text": "The circle is red."}
    assert "circle" in told["bytes"]
    events = [json.loads(line.removeprefix("data:")) for line in told["lines"] if line]
    assert told["whole"] == [{"generated_text": events[-1]["generated_text"]}]
    assert "red" in events[-1]["generated_text"]
    assert told["closed"] == {"success": True}
    assert "was closed" in told["after"]
    assert told["model_error"].startswith("ModelError: Received client error (400) from primary")
    for call, member in (
        ("target_model", "target model"),
        ("variant", "Variant Other"),
        ("component", "InferenceComponentName"),
        ("hostname", "TargetContainerHostname"),
    ):
        assert told[call].startswith("ValidationError: "), (call, told[call])
        assert member in told[call]


def test_langchain_completes_and_streams(fleet: Fleet) -> None:
    """SagemakerEndpoint works with a content handler for TGI's form, as in its documentation."""
    picture = data_url(draw("circle", "red"))
    told = run(
        "langchain_endpoint.py",
        fleet.runtime,
        f"<s><|user|>![]({picture})What color is the circle?<|end|><|assistant|>",
    )

    assert "red" in told["whole"]
    assert "".join(told["pieces"]) == told["whole"]
    assert len(told["pieces"]) > 1


def test_langchain_chat_model_streams_and_keeps_sessions(fleet: Fleet) -> None:
    """ChatSagemakerEndpoint supports whole, streamed and asynchronous answers, images, stop, errors and sessions."""
    told = run("langchain_chat.py", fleet.runtime, str(SAMPLES / "red_circle.png"))

    assert told["whole"] == "The circle is red."
    assert told["usage"]["output_tokens"] > 1
    assert told["usage"]["total_tokens"] == told["usage"]["input_tokens"] + told["usage"]["output_tokens"]
    for pieces in (told["pieces"], told["apieces"]):
        assert "".join(pieces) == told["whole"]
        assert len([piece for piece in pieces if piece]) > 1
    assert told["stopped"] == "The "
    assert told["refused"].startswith("ModelError: 'temperature' must be")
    assert told["session"].startswith("ts-seq-")
    assert told["asked"] == told["whole"]
    assert "circle" in told["more"]
    assert told["usage_in_session"]["output_tokens"] == told["usage"]["output_tokens"]
    assert "was closed" in told["closed"]
