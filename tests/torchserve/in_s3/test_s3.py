"""An archive without weights, with a checkpoint and a journal in S3 that only the environment names.

Asynchronous results go to S3, too.
"""

import json
from contextlib import suppress
from typing import Any
from urllib.parse import urlparse

import pytest
from botocore.exceptions import ClientError

from tests.servers import BUCKET, S3Server
from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.in_s3.fleet import FleetInS3
from tests.torchserve.journals import MAX_SESSIONS, check_fleet, check_forgotten
from tests.torchserve.test_faults import wait_until_all_serve
from tests.torchserve.test_sessions import open_session
from tests.waiting import wait_until

pytestmark = [pytest.mark.torchserve, pytest.mark.s3]


@pytest.fixture(scope="module")
def from_s3(in_s3: FleetInS3) -> Fleet:
    return in_s3.fleet


def test_a_checkpoint_in_s3_serves_by_configuration_alone(from_s3: Fleet) -> None:
    """The model sees images and answers rightly."""
    chat = open_session(from_s3.client(), image=data_url(draw("circle", "red")))

    assert chat.ask("What color is the circle?") == "The circle is red."


def test_its_limits_are_those_of_the_environment(from_s3: Fleet) -> None:
    """A question beyond MAX_INPUT_LENGTH is refused with the limit."""
    chat = open_session(from_s3.client(), image=data_url(draw("circle", "red")))

    with pytest.raises(ClientError, match="150"):
        chat.ask("What color is the circle? " * 40)


def test_forgotten_sessions_in_s3_can_be_asked_again(from_s3: Fleet) -> None:
    """Workers that hold few sessions read the others from S3."""
    check_forgotten(from_s3, 3 * MAX_SESSIONS)


def test_asynchronous_results_are_polled_in_s3(from_s3: Fleet, s3_server: S3Server) -> None:
    """A client that takes bucket and key from the locations and polls S3 gets the result and the failure."""
    client, s3 = from_s3.client(), s3_server.client()

    def submit(body: dict[str, Any]) -> dict[str, str]:
        return client.invoke_endpoint_async(EndpointName="llava", ContentType="application/json", Body=json.dumps(body))

    def wait_for(location: str) -> str:
        url, found = urlparse(location), []
        assert url.scheme == "s3"

        def is_there() -> bool:
            with suppress(s3.exceptions.NoSuchKey):
                found.append(s3.get_object(Bucket=url.netloc, Key=url.path[1:])["Body"].read().decode())
            return bool(found)

        wait_until(is_there, f"{location} is there", interval_s=0.1)
        return found[0]

    answered = submit({"inputs": "Hello", "parameters": {"max_new_tokens": 4}})
    refused = submit({"inputs": 1})

    assert answered["OutputLocation"] == f"s3://{BUCKET}/results/{answered['InferenceId']}.out"
    assert json.loads(wait_for(answered["OutputLocation"]))[0]["generated_text"]
    assert "'inputs' must be" in wait_for(refused["FailureLocation"])


@pytest.mark.slow
@pytest.mark.ends_fleet
def test_sessions_in_s3_survive_their_instance(from_s3: Fleet, s3_server: S3Server) -> None:
    """After kill -9 of a JVM, sessions continue elsewhere with the environment's credentials."""

    def kept(session_id: str) -> list[str]:
        found = s3_server.client().list_objects_v2(Bucket=BUCKET, Prefix="fleet/").get("Contents", [])
        return sorted({item["Key"].split("/")[4] for item in found if f"/{session_id}/" in item["Key"]})

    check_fleet(from_s3, kept, ["events", "owner", "pictures"], ["closed", "events", "owner"])
    wait_until_all_serve(from_s3)
