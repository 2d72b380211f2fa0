"""Limits of each caller over real HTTP: boto3 with signatures, tokens, and clients without credentials."""

import http.client
import json
import threading
import time
from contextlib import closing
from pathlib import Path
from time import gmtime, strftime
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from tests.proxy.conftest import KEY, MakeStage, Stage
from tests.proxy.fake_instance import Gate, Received, Wire, refusing
from tests.waiting import wait_until
from torchmoor.config.callers import CallerSettings
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.proxy.access.gate import principal_of
from torchmoor.wire.session_ids import mint

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
OTHER_SECRET = "another-secret-of-another-client"
TOKEN = "token-of-alice-0123456789"
CREDENTIALS = Credentials(
    keys={"AKIAEXAMPLE": AccessKey(secret=SECRET), "AKIAOTHER": AccessKey(secret=OTHER_SECRET)},
    tokens={"alice": TOKEN},
)
PATH = "/endpoints/llava/invocations"


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
    stage.until(lambda: callers.num_requests.get(caller, 0) == number, f"{number} requests of {caller} in flight")


def read(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    with closing(connection), connection.getresponse() as answer:
        return answer.status, json.loads(answer.read())


def limited(stage: Stage) -> dict[str, float]:
    """Return the refusals on the metrics page, by setting."""
    lines = [line for line in stage.admin("/metrics").text.splitlines() if line.startswith("CallerLimited_total{")]
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
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nX-Amz-Date: DATE\r\nContent-Length: 5\r\nAuthorization: AWS4-HMAC-SHA256 "
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


def test_instances_learn_a_client_s_address_only_where_it_is_the_caller(make_stage: MakeStage) -> None:
    """The address is sent only if it stands for a caller without a principal; a client's own header is removed."""
    free = make_stage()
    limited_by_address = make_stage(callers=CallerSettings(limited="always"))
    limited_by_key = make_stage(credentials=CREDENTIALS)
    for stage in (free, limited_by_address, limited_by_key):
        connection = stage.http()
        headers = {"X-Torchmoor-Source": "192.0.2.1"}
        if stage is limited_by_key:
            headers["Authorization"] = f"Bearer {TOKEN}"
        connection.request("POST", PATH, body=b"{}", headers=headers)
        assert read(connection)[0] == 200

    seen = [stage.a.received + stage.b.received for stage in (free, limited_by_address, limited_by_key)]

    assert [[request.headers.get("x-torchmoor-source") for request in each] for each in seen] == [
        [None],
        ["127.0.0.1"],
        [None],
    ]


def test_a_caller_s_full_share_of_the_journal_is_a_throttling_error(make_stage: MakeStage) -> None:
    """The instance's message and Retry-After reach boto3; no other instance is asked."""
    stage = make_stage(credentials=CREDENTIALS)
    message = "one caller's may hold 200 (journal.max_caller_bytes)"
    stage.a.behave = stage.b.behave = refusing(429, "CallerBudgetReached", message, {"Retry-After": "460"})

    response = refused_opening(stage.client(secret=SECRET))

    assert response["Error"] == {"Code": "ThrottlingException", "Message": message}
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 429
    assert response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "460"
    assert len(stage.a.received) + len(stage.b.received) == 1


class Sessions:
    """Makes both instances open sessions that live an hour, take turns and close sessions, as the handlers do."""

    def __init__(self, stage: Stage) -> None:
        self.refusal: str | None = None  # the code with which the next turn is refused
        stage.a.behave = stage.b.behave = self.behave

    async def behave(self, request: Received, wire: Wire) -> None:
        session = request.headers.get("x-amzn-sagemaker-session-id", "")
        if b"start_session" in request.body and "x-torchmoor-session-limit" in request.headers:
            await refusing(429, "SessionLimitReached", "as many sessions as it may have")(request, wire)
        elif b"start_session" in request.body:
            principal = request.headers.get("x-torchmoor-principal", "")
            expires_at = int(time.time()) + 3600
            minted = mint({"k1": KEY}, instance="a", expires_at=expires_at, endpoint="llava", principal=principal)
            stamp = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(expires_at))
            await wire.answer(headers={"X-Amzn-SageMaker-New-Session-Id": f"{minted.text}; Expires={stamp}"})
        elif self.refusal is not None:
            await refusing(410, self.refusal, "the session is gone")(request, wire)
        elif b"close_session" in request.body:
            await wire.answer(headers={"X-Amzn-SageMaker-Closed-Session-Id": session})
        else:
            await wire.answer()


OPEN, CLOSE = b'{"type": "start_session"}', b'{"type": "close_session"}'


def ask(client: Any, session: str, body: bytes = b"{}") -> str:
    """Return the id of the session that a request opens, or ""."""
    answer = client.invoke_endpoint(EndpointName="llava", Body=body, SessionId=session)
    answer["Body"].read()
    return str(answer.get("NewSessionId", "")).partition(";")[0]


def refused_opening(client: Any) -> dict[str, Any]:
    with pytest.raises(ClientError) as caught:
        ask(client, "NEW_SESSION", OPEN)
    return caught.value.response


@pytest.fixture
def sessions_stage(make_stage: MakeStage) -> Stage:
    """Return a proxy that allows two sessions per caller."""
    return make_stage(credentials=CREDENTIALS, callers=CallerSettings(max_sessions=2))


def test_sessions_are_limited_at_the_opening_only(sessions_stage: Stage) -> None:
    """boto3 gets the throttling error with the time until the first expiry; turns pass, and a close makes room."""
    stage = sessions_stage
    Sessions(stage)
    client, other = stage.client(secret=SECRET), stage.client(key_id="AKIAOTHER", secret=OTHER_SECRET)
    first, second = (ask(client, "NEW_SESSION", OPEN) for _ in range(2))

    response = refused_opening(client)

    assert response["Error"]["Code"] == "ThrottlingException"
    assert "The caller has 2 open sessions, and callers.max_sessions is 2. Close one" in response["Error"]["Message"]
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 429
    assert 3500 < int(response["ResponseMetadata"]["HTTPHeaders"]["retry-after"]) <= 3600
    assert limited(stage) == {"max_sessions": 1.0}
    assert ask(other, "NEW_SESSION", OPEN) != ""
    for session in (first, second, first):
        ask(client, session)
    ask(client, first, CLOSE)
    ask(client, "NEW_SESSION", OPEN)
    refused_opening(client)


def test_a_session_opened_by_its_body_alone_counts(sessions_stage: Stage) -> None:
    """A session that is opened by its body counts.

    The proxy's header, which clients cannot forge, makes the instance refuse it.
    """
    Sessions(sessions_stage)
    client = sessions_stage.client(secret=SECRET)
    for _ in range(2):
        client.invoke_endpoint(EndpointName="llava", Body=OPEN)["Body"].read()

    refused_opening(client)
    with pytest.raises(ClientError, match=r"callers\.max_sessions is 2") as caught:
        client.invoke_endpoint(EndpointName="llava", Body=OPEN)
    assert caught.value.response["Error"]["Code"] == "ThrottlingException"
    assert int(caught.value.response["ResponseMetadata"]["HTTPHeaders"]["retry-after"]) > 3500
    assert limited(sessions_stage) == {"max_sessions": 2.0}
    client.invoke_endpoint(EndpointName="llava", Body=b"{}")["Body"].read()


def test_a_session_that_is_gone_counts_no_more(sessions_stage: Stage) -> None:
    """The instance's refusal of a turn ends the count."""
    sessions = Sessions(sessions_stage)
    client = sessions_stage.client(secret=SECRET)
    first, _ = (ask(client, "NEW_SESSION", OPEN) for _ in range(2))
    sessions.refusal = "SessionExpired"
    with pytest.raises(ClientError):
        ask(client, first)

    ask(client, "NEW_SESSION", OPEN)
    refused_opening(client)


def test_openings_that_fail_or_whose_clients_leave_give_their_shares_back(sessions_stage: Stage) -> None:
    """Neither an error of the instance nor a disconnect leaves a session counted."""
    stage, caller = sessions_stage, principal_of("token", "alice")
    holding = Holding(stage)
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Amzn-SageMaker-Session-Id": "NEW_SESSION"}
    callers = stage.proxy.data.dispatchers.callers
    leaving = stage.http()
    leaving.request("POST", PATH, body=OPEN, headers=headers)
    holding.gate.wait_reached()
    assert callers.sessions.count(caller) == 1
    leaving.close()
    stage.until(lambda: callers.sessions.count(caller) == 0, "the opening given back")
    holding.gate.open()

    stage.a.behave = stage.b.behave = refusing(507, "OutOfMemory", "no room")
    for _ in range(3):
        connection = stage.http()
        connection.request("POST", PATH, body=OPEN, headers=headers)
        assert read(connection)[0] == 503
    stage.until(lambda: callers.sessions.count(caller) == 0, "the refused openings given back")


def test_pending_asynchronous_requests_are_limited_per_key(make_stage: MakeStage, tmp_path: Path) -> None:
    """boto3 gets the throttling error by number and by bytes; when a request has ended, another is accepted."""
    stage = make_stage(
        credentials=CREDENTIALS,
        callers=CallerSettings(max_async_requests=2, max_async_bytes=128_000),
        async_folder=tmp_path,
    )
    holding = Holding(stage)
    client, other = stage.client(secret=SECRET), stage.client(key_id="AKIAOTHER", secret=OTHER_SECRET)

    def submit(asking: Any, body: bytes) -> Any:
        return asking.invoke_endpoint_async(EndpointName="llava", Body=body)

    def refused(body: bytes) -> dict[str, Any]:
        with pytest.raises(ClientError) as caught:
            submit(client, body)
        response: dict[str, Any] = caught.value.response
        assert response["Error"]["Code"] == "ThrottlingException"
        assert response["ResponseMetadata"]["HTTPStatusCode"] == 429
        assert response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "30"
        return response

    submit(client, b"x" * 100_000)
    assert "callers.max_async_bytes is 128000" in refused(b"x" * 28_001)["Error"]["Message"]
    last = submit(client, b"{}")
    assert "callers.max_async_requests is 2" in refused(b"{}")["Error"]["Message"]
    submit(other, b"x" * 128_000)
    assert limited(stage) == {"max_async_bytes": 1.0, "max_async_requests": 1.0}

    holding.gate.open()
    wait_until(Path(urlsplit(last["OutputLocation"]).path).is_file, "the result")
    wait_until(lambda: is_accepted(client), "a request that ended makes room")


def is_accepted(client: Any) -> bool:
    try:
        client.invoke_endpoint_async(EndpointName="llava", Body=b"{}")
    except ClientError:
        return False
    return True


def test_a_submit_is_a_request_in_flight_until_it_is_queued(make_stage: MakeStage, tmp_path: Path) -> None:
    """A submit counts as a request in flight until it is queued, also if the client disconnects or it is refused."""
    stage = make_stage(credentials=CREDENTIALS, callers=CallerSettings(max_requests=1), async_folder=tmp_path)
    holding = Holding(stage)
    first = send(stage)
    holding.gate.wait_reached()
    path = "/endpoints/llava/async-invocations"

    status, body = read(send(stage, path=path))

    assert (status, "callers.max_requests is 1" in body["Message"]) == (429, True)
    holding.gate.open()
    assert read(first)[0] == 200
    until_in_flight(stage, principal_of("token", "alice"), 0)
    assert read(send(stage, path=path, body=b""))[0] == 400
    assert read(send(stage, path=path))[0] == 202
    assert read(send(stage, path=path))[0] == 202
