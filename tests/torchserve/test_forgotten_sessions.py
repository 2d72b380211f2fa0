"""Clients that forget their sessions: two workers for eight sessions each keep forty conversations."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
import requests
from botocore.exceptions import ClientError

from tests.servers import LossyProxy
from tests.torchserve.conftest import Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw
from torchmoor.wire.session_hash import session_hash

pytestmark = [pytest.mark.slow, pytest.mark.torchserve]
MAX_SESSIONS = 8
NUM_SESSIONS = 40
COLOURS = ("red", "blue", "green", "yellow")


@pytest.fixture(scope="module")
def crowded(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run two instances whose workers hold eight sessions each, with a journal."""
    folder = tmp_path_factory.mktemp("crowded")
    limit = {"TORCHMOOR_HANDLER_SESSION_MAX_SESSIONS": str(MAX_SESSIONS)}
    with run_fleet("--instances", "2", run_dir=folder / "run", log=folder / "up.log", environment=limit) as running:
        yield running


class User:
    """A boto3 client of the session API."""

    def __init__(self, runtime: str) -> None:
        self._client: Any = boto3.client(
            "sagemaker-runtime",
            endpoint_url=runtime,
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
        )

    def send(self, session_id: str, **body: Any) -> Any:
        return self._client.invoke_endpoint(
            EndpointName="llava", SessionId=session_id, ContentType="application/json", Body=json.dumps(body)
        )

    def open(self, colour: str) -> str:
        answer = self.send("NEW_SESSION", type="start_session", image=data_url(draw("circle", colour)))
        return str(json.load(answer["Body"])["session_id"])

    def ask(self, session_id: str) -> str:
        answer = self.send(session_id, type="send_text_prompt", prompt_text="What color is the circle?")
        return str(json.load(answer["Body"])["response_text"])


def count(fleet: Fleet, key: str) -> int:
    return sum(fleet.status(name)["sessions"][key] for name in ("llava-0", "llava-1"))


def test_forgotten_sessions_block_no_opening_and_can_be_asked_again(crowded: Fleet) -> None:
    """No opening is refused, the workers hold no more than their limits, and every session still answers rightly."""
    user = User(crowded.runtime)
    colours = [COLOURS[i % len(COLOURS)] for i in range(NUM_SESSIONS)]
    with ThreadPoolExecutor(4) as clients:
        ids = list(clients.map(user.open, colours))
        order = random.Random(0).sample(range(NUM_SESSIONS), NUM_SESSIONS)
        answers = dict(zip(order, clients.map(user.ask, [ids[i] for i in order]), strict=True))

    assert [answers[i] for i in range(NUM_SESSIONS)] == [f"The circle is {colour}." for colour in colours]
    assert count(crowded, "open") <= 2 * MAX_SESSIONS
    assert count(crowded, "evicted") >= NUM_SESSIONS - 2 * MAX_SESSIONS


def test_close_of_an_evicted_session_happens_once(crowded: Fleet) -> None:
    """A close that is sent again gets the first answer; a new close learns that the session was closed."""
    user = User(crowded.runtime)
    forgotten = user.open("red")
    for _ in range(2 * MAX_SESSIONS + 2):
        user.open("blue")

    def close(invocation_id: str) -> requests.Response:
        headers = {"X-Amzn-SageMaker-Session-Id": forgotten, "amz-sdk-invocation-id": invocation_id}
        return requests.post(
            f"{crowded.runtime}/endpoints/llava/invocations",
            json={"type": "close_session"},
            headers=headers,
            timeout=60,
        )

    first, again, other = close("c1"), close("c1"), close("c2")

    assert (first.status_code, first.json()) == (200, {"success": True})
    assert (again.status_code, again.json()) == (200, {"success": True})
    assert again.headers["X-Amzn-SageMaker-Closed-Session-Id"] == forgotten
    assert (other.status_code, other.headers["x-amzn-ErrorType"]) == (400, "ValidationError")
    assert "this session was closed" in other.json()["Message"]


def test_operator_closes_an_evicted_session(crowded: Fleet) -> None:
    """By the hash that the access log shows. Its client learns that it was closed; a second close finds nothing."""
    user = User(crowded.runtime)
    forgotten = user.open("red")
    for _ in range(2 * MAX_SESSIONS + 2):
        user.open("blue")
    assert crowded.holders(forgotten) == []
    address = f"{crowded.admin}/sessions/{session_hash(forgotten)}/close"

    closed, again = (requests.post(address, timeout=60) for _ in range(2))

    assert (closed.status_code, again.status_code) == (200, 404)
    with pytest.raises(ClientError, match="this session was closed"):
        user.ask(forgotten)


def test_boto3_repeats_a_close_whose_answer_was_lost(crowded: Fleet) -> None:
    """The connection breaks before the answer; boto3 sends the request again under the same invocation id."""
    port = urlsplit(crowded.runtime).port
    assert port is not None
    with LossyProxy(port) as lossy:
        user = User(f"http://127.0.0.1:{lossy.port}")
        session_id = user.open("green")
        lossy.is_losing.set()

        answer = user.send(session_id, type="close_session")

        assert json.load(answer["Body"]) == {"success": True}
        assert answer["ClosedSessionId"] == session_id
        assert answer["ResponseMetadata"]["RetryAttempts"] == lossy.num_lost == 1
