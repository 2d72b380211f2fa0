"""Sessions that clients never close: two workers for eight sessions each serve forty conversations."""

import json
import random
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
import requests
from botocore.config import Config
from botocore.exceptions import ClientError
from PIL import Image

from tests.servers import LossyProxy
from tests.torchserve.conftest import Fleet, run_fleet
from tests.torchserve.drawings import data_url, draw
from tests.waiting import wait_until
from torchmoor.wire.session_ids import session_hash

pytestmark = [pytest.mark.slow, pytest.mark.torchserve]
MAX_SESSIONS = 8
NUM_SESSIONS = 40
COLOURS = ("red", "blue", "green", "yellow")
KEYS = {"AKIAONE": secrets.token_hex(20), "AKIATWO": secrets.token_hex(20)}
MAX_JOURNALED = 120  # of which the tests before need about half
NUM_SHARED = 3  # large images that fill one caller's share of the journal


@pytest.fixture(scope="module")
def crowded(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run two instances whose workers hold eight sessions each, with keys and a journal."""
    folder = tmp_path_factory.mktemp("crowded")
    keys = folder / "keys"
    keys.touch(0o600)
    keys.write_text("".join(f"key {key_id} {secret}\n" for key_id, secret in KEYS.items()))
    limits = {
        "TORCHMOOR_HANDLER_SESSION_MAX_SESSIONS": str(MAX_SESSIONS),
        "TORCHMOOR_HANDLER_JOURNAL_MAX_SESSIONS": str(MAX_JOURNALED),
        "TORCHMOOR_HANDLER_JOURNAL_MAX_CALLER_BYTES": str(NUM_SHARED * 1_000_000),
    }
    with run_fleet(
        *("--instances", "2", "--keys", str(keys)), run_dir=folder / "run", log=folder / "up.log", environment=limits
    ) as running:
        yield running


class User:
    """A boto3 client of the session API."""

    def __init__(self, runtime: str, key_id: str = "AKIAONE") -> None:
        self._client: Any = boto3.client(
            "sagemaker-runtime",
            endpoint_url=runtime,
            region_name="us-east-1",
            aws_access_key_id=key_id,
            aws_secret_access_key=KEYS[key_id],
            config=Config(retries={"total_max_attempts": 2}),
        )

    def send(self, session_id: str, **body: Any) -> Any:
        return self._client.invoke_endpoint(
            EndpointName="llava", SessionId=session_id, ContentType="application/json", Body=json.dumps(body)
        )

    def open(self, colour: str) -> str:
        return self.open_with(data_url(draw("circle", colour)))

    def open_with(self, image: str) -> str:
        answer = self.send("NEW_SESSION", type="start_session", image=image)
        return str(json.load(answer["Body"])["session_id"])

    def use_invocation_id(self, invocation_id: str) -> None:
        """Send all further requests with this id, as if they were attempts of one."""

        def replace(request: Any, **_: Any) -> None:
            request.headers["amz-sdk-invocation-id"] = invocation_id  # which boto3 does not sign

        self._client.meta.events.register("before-send.sagemaker-runtime", replace)

    def ask(self, session_id: str) -> str:
        answer = self.send(session_id, type="send_text_prompt", prompt_text="What color is the circle?")
        return str(json.load(answer["Body"])["response_text"])


def forget(fleet: Fleet, user: User, session_id: str) -> None:
    """Open sessions until no instance holds this one: routing decides how many each instance gets."""
    wait_until(lambda: user.open("blue") and not fleet.holders(session_id), "no instance holds the session")


def test_forgotten_sessions_block_no_opening_and_can_be_asked_again(crowded: Fleet) -> None:
    """No opening is refused, the workers hold no more than their limits, and every session still answers rightly."""
    user = User(crowded.runtime)
    colours = [COLOURS[i % len(COLOURS)] for i in range(NUM_SESSIONS)]
    with ThreadPoolExecutor(4) as clients:
        ids = list(clients.map(user.open, colours))
        order = random.Random(0).sample(range(NUM_SESSIONS), NUM_SESSIONS)
        answers = dict(zip(order, clients.map(user.ask, [ids[i] for i in order]), strict=True))

    assert [answers[i] for i in range(NUM_SESSIONS)] == [f"The circle is {colour}." for colour in colours]
    assert crowded.count("sessions", "open") <= 2 * MAX_SESSIONS
    assert crowded.count("sessions", "evicted") >= NUM_SESSIONS - 2 * MAX_SESSIONS


def test_another_instance_adopts_a_session_that_its_own_has_evicted(crowded: Fleet) -> None:
    """The session's instance is drained, so that the other one gets the image from the journal."""
    user = User(crowded.runtime)
    forgotten = user.open("yellow")
    (home,) = crowded.holders(forgotten)
    forget(crowded, user, forgotten)

    requests.post(f"{crowded.admin}/instances/{home}/drain", timeout=60).raise_for_status()
    try:
        assert user.ask(forgotten) == "The circle is yellow."
        assert crowded.holders(forgotten) == [{"llava-0": "llava-1", "llava-1": "llava-0"}[home]]
    finally:
        requests.post(f"{crowded.admin}/instances/{home}/resume", timeout=60).raise_for_status()
    wait_until(lambda: home in crowded.settled(), "the instance gets the turns of its sessions again")


def test_close_of_an_evicted_session_happens_once(crowded: Fleet) -> None:
    """A repeated close gets the first answer; a new one gets the error for a closed session."""
    user = User(crowded.runtime)
    forgotten = user.open("red")
    forget(crowded, user, forgotten)

    def close(invocation_id: str) -> Any:
        closing = User(crowded.runtime)
        closing.use_invocation_id(invocation_id)
        return closing.send(forgotten, type="close_session")

    first, again = close("c1"), close("c1")

    assert json.load(first["Body"]) == json.load(again["Body"]) == {"success": True}
    assert again["ClosedSessionId"] == forgotten
    with pytest.raises(ClientError, match="this session was closed") as caught:
        close("c2")
    assert caught.value.response["Error"]["Code"] == "ValidationError"


def test_operator_closes_an_evicted_session(crowded: Fleet) -> None:
    """An operator closes the session by its hash.

    Its client gets SessionClosed, and a second close finds no session.
    """
    user = User(crowded.runtime)
    forgotten = user.open("red")
    forget(crowded, user, forgotten)
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


def noise(number: int) -> str:
    """Return the address of a unique image of about a megabyte."""
    return data_url(Image.frombytes("RGB", (600, 600), random.Random(number).randbytes(600 * 600 * 3)))


def test_a_caller_cannot_fill_the_journal_for_others(crowded: Fleet) -> None:
    """A caller's openings are refused when its share is full, with the time until there is room. A close makes room.

    Sessions with the same images need no more room, and turns continue.
    """
    user, greedy = User(crowded.runtime), User(crowded.runtime, "AKIATWO")
    ids = [greedy.open_with(noise(0)) for _ in range(2 * NUM_SHARED)]

    def fill() -> None:
        for number in range(1, 2 * NUM_SHARED + 2):  # each instance counts what it has written itself
            ids.append(greedy.open_with(noise(number)))

    with pytest.raises(ClientError) as caught:
        fill()

    response = caught.value.response
    assert response["Error"]["Code"] == "ThrottlingException"
    assert "journal.max_caller_bytes" in response["Error"]["Message"]
    assert 3500 < int(response["ResponseMetadata"]["HTTPHeaders"]["retry-after"]) <= 3660
    assert len(ids) >= 3 * NUM_SHARED - 1
    greedy.ask(ids[0])
    user.ask(user.open("red"))
    for session_id in ids:
        greedy.send(session_id, type="close_session")
    greedy.send(greedy.open_with(noise(0)), type="close_session")


def test_a_journal_keeps_a_limited_number_of_sessions(crowded: Fleet) -> None:
    """An opening beyond it is refused, with the time until there is room. Turns go on, and a close makes room."""
    user = User(crowded.runtime)
    ids = [user.open("red")]

    def fill() -> None:
        for _ in range(2 * MAX_JOURNALED):  # each instance counts what it has written itself
            ids.append(json.load(user.send("NEW_SESSION", requestType="NEW_SESSION")["Body"])["session_id"])

    with pytest.raises(ClientError) as caught:
        fill()

    response = caught.value.response
    assert response["Error"]["Code"] == "ServiceUnavailable"
    assert "journal.max_sessions" in response["Error"]["Message"]
    assert 1000 < int(response["ResponseMetadata"]["HTTPHeaders"]["retry-after"]) <= 3660
    assert user.ask(ids[0]) == "The circle is red."
    for session_id in ids:
        user.send(session_id, type="close_session")
    user.open("blue")
