"""Limits of each caller over real HTTP: boto3 with signatures, tokens, and clients without credentials."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.request
from collections.abc import Callable
from contextlib import closing
from time import gmtime, strftime
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.proxy.conftest import Stage
from tests.proxy.fake_instance import Gate, Received, Wire
from tests.waiting import DEADLINE_S
from torchmoor.config.access import AccessKey, Credentials
from torchmoor.config.limits import CallerSettings
from torchmoor.proxy.access.gate import principal_of

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
OTHER_SECRET = "another-secret-of-another-client"
TOKEN = "token-of-alice-0123456789"
CREDENTIALS = Credentials(
    keys={"AKIAEXAMPLE": AccessKey(secret=SECRET), "AKIAOTHER": AccessKey(secret=OTHER_SECRET)},
    tokens={"alice": TOKEN},
)
PATH = "/endpoints/llava/invocations"

MakeStage = Callable[..., Stage]


class Holding:
    """Makes both instances hold their answers until the test opens the gate."""

    def __init__(self, stage: Stage) -> None:
        self.gate = Gate()
        stage.a.behave = stage.b.behave = self.behave

    async def behave(self, request: Received, wire: Wire) -> None:
        await self.gate.pass_through()
        await wire.answer()


def send(stage: Stage, token: str = TOKEN, path: str = PATH, body: bytes = b"{}") -> http.client.HTTPConnection:
    """Send a request without reading its answer."""
    connection = stage.http()
    connection.request("POST", path, body=body, headers={"Authorization": f"Bearer {token}"} if token else {})
    return connection


def until_in_flight(stage: Stage, caller: str, number: int) -> None:
    callers = stage.proxy.data.dispatchers.callers
    assert callers is not None
    stage.until(lambda: callers.num_requests[caller] == number, f"{number} requests of {caller} in flight")


def read(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    with closing(connection), connection.getresponse() as answer:
        return answer.status, json.loads(answer.read())


def limited(stage: Stage) -> dict[str, float]:
    """Return the refusals on the metrics page, by setting."""
    with urllib.request.urlopen(f"{stage.proxy.admin_url}/metrics", timeout=DEADLINE_S) as page:
        lines = [line for line in page.read().decode().splitlines() if line.startswith("CallerLimited_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_requests_in_flight_are_limited_per_key(make_stage: MakeStage) -> None:
    """boto3 raises the API's throttling error; another key's requests pass, and so do its own after the answers."""
    stage = make_stage(credentials=CREDENTIALS, callers=CallerSettings(max_requests=2))
    holding = Holding(stage)
    client = stage.client(secret=SECRET)
    other = stage.client(key_id="AKIAOTHER", secret=OTHER_SECRET)
    answers: list[bytes] = []

    def ask(asking: Any) -> None:
        answers.append(asking.invoke_endpoint(EndpointName="llava", Body=b"{}")["Body"].read())

    threads = [threading.Thread(target=ask, args=(asking,)) for asking in (client, client, other)]
    for thread in threads:
        thread.start()
    until_in_flight(stage, principal_of("key", "AKIAEXAMPLE"), 2)
    until_in_flight(stage, principal_of("key", "AKIAOTHER"), 1)

    with pytest.raises(ClientError) as caught:
        client.invoke_endpoint(EndpointName="llava", Body=b"{}")

    response = caught.value.response
    assert response["Error"]["Code"] == "ThrottlingException"
    assert "callers.max_requests is 2" in response["Error"]["Message"]
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 429
    assert response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "1"
    assert limited(stage) == {"max_requests": 1.0}
    holding.gate.open()
    for thread in threads:
        thread.join()
    assert answers == [b"{}"] * 3
    ask(client)


@pytest.mark.parametrize("operation", ["invocations-response-stream", "openai/v1/chat/completions"])
def test_every_dialect_has_the_limit(make_stage: MakeStage, operation: str) -> None:
    """Each dialect refuses in its own form, with Retry-After."""
    stage = make_stage(credentials=CREDENTIALS, callers=CallerSettings(max_requests=1))
    holding = Holding(stage)
    first = send(stage)
    until_in_flight(stage, principal_of("token", "alice"), 1)

    connection = send(stage, path=f"/endpoints/llava/{operation}")
    with closing(connection), connection.getresponse() as answer:
        assert (answer.status, answer.getheader("Retry-After")) == (429, "1")
        assert "callers.max_requests" in answer.read().decode()
    holding.gate.open()
    assert read(first)[0] == 200


def test_a_client_that_leaves_frees_its_share(make_stage: MakeStage) -> None:
    """A request counts until its client has gone, whatever the instance does with it."""
    stage = make_stage(credentials=CREDENTIALS, callers=CallerSettings(max_requests=1))
    holding = Holding(stage)
    leaving = send(stage)
    holding.gate.wait_reached()
    leaving.close()
    until_in_flight(stage, principal_of("token", "alice"), 0)

    holding.gate.open()
    assert read(send(stage))[0] == 200


def test_a_forged_signature_does_not_use_the_share_of_its_key(make_stage: MakeStage) -> None:
    """A body that has not been verified counts for no caller."""
    stage = make_stage(credentials=CREDENTIALS, callers=CallerSettings(max_requests=1))
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: h\r\nX-Amz-Date: DATE\r\nContent-Length: 5\r\nAuthorization: AWS4-HMAC-SHA256 "
        "Credential=AKIAEXAMPLE/DAY/us-east-1/sagemaker/aws4_request, SignedHeaders=host;x-amz-date, "
        f"Signature={'0' * 64}\r\n\r\n"
    )
    with stage.socket() as forged:
        forged.sendall(dated(head).encode())
        connections = stage.proxy.data.server.connections
        stage.until(lambda: any(each.exchange is not None for each in connections), "the forged request's body awaited")

        answer = stage.client(secret=SECRET).invoke_endpoint(EndpointName="llava", Body=b"{}")

        assert answer["Body"].read() == b"{}"


def dated(head: str) -> str:
    now = gmtime()
    return head.replace("DATE", strftime("%Y%m%dT%H%M%SZ", now)).replace("DAY", strftime("%Y%m%d", now))


def test_without_keys_nothing_is_limited_unless_configured(make_stage: MakeStage) -> None:
    """By default one anonymous caller may use everything; `always` counts by address."""
    free = make_stage(callers=CallerSettings(max_requests=1))
    assert free.proxy.data.dispatchers.callers is None

    stage = make_stage(callers=CallerSettings(limited="always", max_requests=1))
    holding = Holding(stage)
    first = send(stage, token="")
    until_in_flight(stage, "127.0.0.1", 1)
    assert read(send(stage, token=""))[0] == 429
    holding.gate.open()
    assert read(first)[0] == 200
