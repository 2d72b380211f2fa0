"""The JavaScript clients of OpenAI and AWS, from .venv-clients (make clients), against real TorchServe instances."""

import json
import os
import subprocess
from typing import Any

import pytest

from tests.tools import missing
from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.test_sdk_clients import CLIENTS, require_clients
from tests.waiting import PROGRAM_S

pytestmark = [pytest.mark.slow, pytest.mark.torchserve]


def run(script: str, fleet: Fleet) -> Any:
    """Run a client's script with the fleet's address and a picture, and return its line of JSON."""
    python = require_clients()
    modules = python.parents[1] / "node_modules"
    if not (modules / ".package-lock.json").exists():  # which npm writes last
        missing("npm could not install the JavaScript clients; run make clients")
    done = subprocess.run(
        [python.with_name("node"), CLIENTS / "javascript" / script, fleet.runtime, data_url(draw("circle", "red"))],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "NODE_", "PYTHON"))},
            "NODE_PATH": str(modules),
        },
    )
    assert done.returncode == 0, (done.stderr + done.stdout)[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_openai_client_chats_and_continues_responses(fleet: Fleet) -> None:
    """Chat with images, streams, schemas, tools and an aborted stream; responses, resumed streams and conversations."""
    told = run("openai_client.cjs", fleet)

    chat = told["chat"]
    assert chat["whole"] == "The circle is red."
    assert "".join(piece or "" for piece in chat["pieces"]) == chat["whole"]
    assert chat["parsed"] == {"color": "red"}
    assert (chat["painted"], chat["calling"]) == (["red"], None)
    assert chat["num_read"] == 5
    assert told["responses"] == {
        "next": "It is a circle.",
        "resumed": chat["whole"],
        "items": ["assistant", "user"],
    }
    assert told["refusals"] == {
        "model": ["NotFoundError", 404, "model_not_found"],
        "image": ["BadRequestError", 400, "invalid_image_format"],
        "length": ["BadRequestError", 400, "context_length_exceeded"],
        "response": ["BadRequestError", 400, "previous_response_not_found"],
    }


def test_aws_client_keeps_a_session_and_names_errors(fleet: Fleet) -> None:
    """The three operations, a session from opening to closing, and errors as classes of the client."""
    told = run("sagemaker_client.cjs", fleet)

    assert told["body"] == {"session_id": told["session"]}
    assert told["closed"] == told["session"]
    assert told["asked"] == {"response_text": "The circle is red."}
    assert len(told["pieces"]) > 1
    assert "".join(told["pieces"])
    assert told["events"][-1] == "data: [DONE]\n\n"
    assert all(event.startswith("data: ") and event.count("data: ") == 1 for event in told["events"])
    assert told["queued"] == [202, "file"]
    closed = ["ValidationError", True, 400, None]
    assert (told["after"], told["stream_after"], told["target"]) == (closed, closed, closed)
    assert told["model"] == ["ModelError", True, 424, 400]
