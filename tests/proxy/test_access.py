"""Access control of the data plane with boto3's and OpenAI's own clients: signatures, tokens, identities, TLS."""

import hashlib
import json
import socket
import ssl
import threading
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import requests
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as Signer
from botocore.exceptions import ClientError
from click.testing import CliRunner

from tests.certificates import make_certificate
from tests.http_servers import QuietHandler, run_http
from tests.proxy.conftest import LISTEN, MakeStage, Stage, make_session_id, read_answer
from tests.proxy.fake_instance import answering
from tests.sagemaker_tokens import make_token
from tests.waiting import DEADLINE_S, wait_until
from torchmoor.cli.main import main
from torchmoor.cli.waiting_notice import EndpointWatch
from torchmoor.clients import signing
from torchmoor.config.access import AccessSettings
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.config.limits import LimitSettings
from torchmoor.proxy.access.gate import principal_of

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
OTHER_SECRET = "another-secret-of-another-client"
TOKEN = "token-of-alice-0123456789"
TOKENS = {"alice": TOKEN}
CREDENTIALS = Credentials(
    keys={
        "AKIAEXAMPLE": AccessKey(secret=SECRET),
        "AKIAOTHER": AccessKey(secret=OTHER_SECRET),
        "ASIATEMPORARY": AccessKey(secret=OTHER_SECRET, session_token="session-token-1"),
    },
    tokens=TOKENS,
)
PATH = "/endpoints/llava/invocations"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def guarded(make_stage: MakeStage) -> Stage:
    """Return a proxy that requires credentials."""
    return make_stage(credentials=CREDENTIALS)


def received(stage: Stage) -> list[Any]:
    return [*stage.a.received, *stage.b.received]


def refused(client: Any, **arguments: Any) -> tuple[int, str, str]:
    """Return status, code and message of the ClientError that boto3 raises."""
    with pytest.raises(ClientError) as caught:
        client.invoke_endpoint(**{"EndpointName": "llava", "Body": b"{}", **arguments})
    response = caught.value.response
    error = response["Error"]
    return response["ResponseMetadata"]["HTTPStatusCode"], error["Code"], error["Message"]


def signed(stage: Stage, body: bytes = b"{}", *, path: str = PATH, method: str = "POST", **headers: str) -> Any:
    """Return a request signed by botocore, to be tampered with and sent by hand."""
    request = AWSRequest(method, f"{stage.proxy.runtime_url}{path}", data=body, headers=headers)
    SigV4Auth(Signer("AKIAEXAMPLE", SECRET), "sagemaker", "us-east-1").add_auth(request)
    return request.prepare()


def send(request: Any, **changes: Any) -> tuple[int, str]:
    """Return the status and the name of the error."""
    data = changes.get("body", request.body)
    url = changes.get("url", request.url)
    headers = {**dict(request.headers.items()), **changes.get("headers", {})}
    headers.pop("Content-Length", None)  # requests computes it for the body
    answer = requests.request(request.method, url, data=data, headers=headers, timeout=60)
    return answer.status_code, answer.headers.get("x-amzn-errortype", "")


def test_a_request_signed_with_a_known_key_passes(guarded: Stage) -> None:
    """boto3 works unchanged: the proxy keeps its credentials and forwards its identity."""
    client = guarded.client(secret=SECRET)

    for body in (b'{"a": 1}', b"", b"x" * 300_000):
        answer = client.invoke_endpoint(
            EndpointName="llava", Body=body, CustomAttributes="a  b   c", SessionId=make_session_id_of("AKIAEXAMPLE")
        )
        assert answer["Body"].read() == b"{}"
        [request] = guarded.a.received
        assert request.body == body
        assert "authorization" not in request.headers
        assert request.headers["x-torchmoor-principal"] == principal_of("key", "AKIAEXAMPLE")
        guarded.a.received.clear()


def make_session_id_of(key_id: str) -> str:
    return make_session_id("a", principal=principal_of("key", key_id))


def test_a_stream_is_signed_as_well(guarded: Stage) -> None:
    """InvokeEndpointWithResponseStream is signed in the same way."""
    answer = guarded.client(secret=SECRET).invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"{}")

    assert b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]) == b"{}"


@pytest.mark.parametrize(
    ("credentials", "code", "message"),
    [
        ({"secret": "wrong"}, "InvalidSignatureException", "does not match"),
        ({"key_id": "AKIAUNKNOWN"}, "UnrecognizedClientException", "security token"),
        ({"secret": SECRET, "session_token": "stray"}, "UnrecognizedClientException", "security token"),
        ({"key_id": "ASIATEMPORARY", "secret": OTHER_SECRET}, "UnrecognizedClientException", "security token"),
        (
            {"key_id": "ASIATEMPORARY", "secret": OTHER_SECRET, "session_token": "session-token-2"},
            "UnrecognizedClientException",
            "security token",
        ),
    ],
)
def test_boto3_raises_the_error_that_aws_would_give(
    guarded: Stage, credentials: dict[str, str], code: str, message: str
) -> None:
    """boto3 raises ClientError with AWS's code and status 403; no instance receives the request."""
    status, given, text = refused(guarded.client(**credentials))

    assert (status, given) == (403, code)
    assert message in text
    assert received(guarded) == []


def test_a_session_token_that_belongs_to_its_key_is_asked_for(guarded: Stage) -> None:
    """Temporary credentials consist of three parts."""
    client = guarded.client(key_id="ASIATEMPORARY", secret=OTHER_SECRET, session_token="session-token-1")

    client.invoke_endpoint(EndpointName="llava", Body=b"{}")

    assert "x-amz-security-token" not in received(guarded)[0].headers


@pytest.mark.parametrize(("skew_s", "word"), [(400, "Signature expired"), (-400, "Signature not yet current")])
def test_a_signature_is_good_for_five_minutes(make_stage: MakeStage, skew_s: float, word: str) -> None:
    """The limit holds in both directions of the proxy's clock."""
    shift = [skew_s]
    stage = make_stage(credentials=CREDENTIALS, wall=lambda: time.time() + shift[0])
    client = stage.client(secret=SECRET)

    status, code, message = refused(client)
    assert (status, code) == (403, "InvalidSignatureException")
    assert word in message

    shift[0] = skew_s * 0.7
    client.invoke_endpoint(EndpointName="llava", Body=b"{}")


def test_a_refusal_has_the_proxys_time(make_stage: MakeStage) -> None:
    """AWS's SDK for JavaScript corrects a wrong clock by it."""
    stage = make_stage(credentials=CREDENTIALS, wall=lambda: time.time() + 3600)

    began = int(time.time())
    with pytest.raises(ClientError) as caught:
        stage.client(secret=SECRET).invoke_endpoint(EndpointName="llava", Body=b"{}")

    fields = caught.value.response["ResponseMetadata"]["HTTPHeaders"]
    assert began <= parsedate_to_datetime(fields["date"]).timestamp() <= time.time()


def test_nothing_of_a_tampered_request_reaches_an_instance(guarded: Stage) -> None:
    """Body, path, query and every field that gives the request its meaning must be as they were signed."""
    custom = "X-Amzn-SageMaker-Custom-Attributes"
    request = signed(guarded, b'{"n": 1}', **{custom: "one"})

    assert send(request)[0] == 200
    assert len(received(guarded)) == 1
    mismatch = (403, "InvalidSignatureException")
    assert send(request, body=b'{"n": 2}') == mismatch
    assert send(request, body=b"") == mismatch
    assert send(request, url=request.url + "-response-stream") == mismatch
    assert send(request, url=request.url + "?a=1") == mismatch
    assert send(request, headers={custom: "two"}) == mismatch
    assert send(request, headers={"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"}) == mismatch
    assert send(request, headers={"Host": "localhost:80"}) == mismatch
    assert len(received(guarded)) == 1


def test_a_request_can_be_sent_again_while_its_signature_is_good(guarded: Stage) -> None:
    """As at AWS, retries with the same bytes are allowed; on plain HTTP others could replay them, so use TLS."""
    request = signed(guarded)

    assert [send(request)[0] for _ in range(2)] == [200, 200]


def test_a_chunked_body_is_verified_too(guarded: Stage) -> None:
    """The length of a chunked body is not known before its end."""
    request = signed(guarded, b"abcdef")

    assert send(request, body=iter([b"abc", b"def"]))[0] == 200
    assert send(request, body=iter([b"abc", b"xyz"])) == (403, "InvalidSignatureException")
    assert [each.body for each in received(guarded)] == [b"abcdef"]


def test_a_declared_hash_binds_the_body(guarded: Stage) -> None:
    """Other SDKs send the hash as x-amz-content-sha256."""
    right = hashlib.sha256(b"{}").hexdigest()
    request = signed(guarded, b"{}", **{"X-Amz-Content-SHA256": right})

    assert send(request)[0] == 200
    assert send(request, body=b"[]") == (403, "InvalidSignatureException")
    assert send(request, body=b"") == (403, "InvalidSignatureException")
    assert send(signed(guarded, b"{}", **{"X-Amz-Content-SHA256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER"})) == (
        403,
        "InvalidSignatureException",
    )


@pytest.mark.parametrize("is_allowed", [False, True])
def test_an_unsigned_payload_must_be_allowed(make_stage: MakeStage, is_allowed: bool) -> None:
    """The proxy could not detect a changed body."""
    stage = make_stage(credentials=CREDENTIALS, access=AccessSettings(allows_unsigned_payload=is_allowed))
    request = signed(stage, b"{}", **{"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"})

    assert send(request) == ((200, "") if is_allowed else (403, "InvalidSignatureException"))


def test_a_client_that_signs_no_hash_learns_what_to_send(guarded: Stage) -> None:
    """The error for a client that signs no hash, such as AWS's JavaScript SDK with a stream, has the remedy."""
    request = signed(guarded, b"{}", **{"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"})

    answer = requests.post(request.url, data=b"{}", headers=dict(request.headers.items()), timeout=60)

    assert "as bytes" in answer.json()["message"]


def test_what_is_no_signature_is_told_so(guarded: Stage) -> None:
    """Each mistake gets the code that AWS has for it."""
    url = guarded.proxy.runtime_url + PATH

    def post(query: str = "", **headers: str) -> tuple[int, str, str]:
        answer = requests.post(url + query, data=b"{}", headers=headers, timeout=60)
        return answer.status_code, answer.headers["x-amzn-errortype"], answer.json()["message"]

    assert post()[:2] == (403, "MissingAuthenticationTokenException")
    status, code, message = post(Authorization="AWS4-HMAC-SHA256 Credential=a")
    assert (status, code) == (403, "IncompleteSignatureException")
    assert "requires 'Signature' parameter" in message
    status, code, message = post("?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=0")
    assert (status, code) == (403, "IncompleteSignatureException")
    assert "presigned" in message
    assert post(Authorization="Basic YTpi")[1] == "IncompleteSignatureException"
    assert post(Authorization="Bearer wrong")[1] == "UnrecognizedClientException"
    assert received(guarded) == []


def test_another_service_or_region_is_refused(make_stage: MakeStage) -> None:
    """A signature for S3 is not valid for SageMaker."""
    stage = make_stage(credentials=CREDENTIALS, access=AccessSettings(region="eu-west-1"))
    request = AWSRequest("POST", stage.proxy.runtime_url + PATH, data=b"{}")

    SigV4Auth(Signer("AKIAEXAMPLE", SECRET), "s3", "eu-west-1").add_auth(request)
    assert send(request.prepare()) == (403, "InvalidSignatureException")
    assert "valid region" in refused(stage.client(secret=SECRET))[2]


def test_a_session_belongs_to_the_caller_that_opened_it(guarded: Stage) -> None:
    """Another key with the id gets the same answer as for an invented id, even after the owner has used it."""
    session_id = make_session_id_of("AKIAEXAMPLE")

    guarded.client(secret=SECRET).invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId=session_id)
    status, code, _ = refused(guarded.client(key_id="AKIAOTHER", secret=OTHER_SECRET), SessionId=session_id)

    assert (status, code) == (400, "ValidationError")
    assert len(received(guarded)) == 1


def test_a_client_cannot_name_itself(guarded: Stage, stage: Stage) -> None:
    """Only the proxy writes X-Torchmoor-Principal, with and without access control."""
    name = {"X-Torchmoor-Principal": "somebody"}

    send(signed(guarded, **name))
    requests.post(stage.proxy.runtime_url + PATH, data=b"{}", headers=name, timeout=60)

    assert received(guarded)[0].headers["x-torchmoor-principal"] == principal_of("key", "AKIAEXAMPLE")
    assert "x-torchmoor-principal" not in received(stage)[0].headers


def test_openai_client_comes_in_with_a_token(guarded: Stage) -> None:
    """api_key is a token, or made of an access key; any other raises AuthenticationError with OpenAI's error object."""
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "llava", "choices": []}
    guarded.a.behave = guarded.b.behave = answering(body=json.dumps(body).encode())

    def client(key: str) -> openai.OpenAI:
        made = openai.OpenAI(base_url=f"{guarded.proxy.runtime_url}/v1", api_key=key, max_retries=0, timeout=60)
        guarded.close_later(made)
        return made

    assert client(TOKEN).chat.completions.create(model="llava", messages=MESSAGES).id == "1"
    assert received(guarded)[0].headers["x-torchmoor-principal"] == principal_of("token", "alice")
    assert [model.id for model in client(TOKEN).models.list()] == ["llava"]
    made = make_token("AKIAEXAMPLE", SECRET)
    assert client(made).chat.completions.create(model="llava", messages=MESSAGES).id == "1"
    assert received(guarded)[1].headers["x-torchmoor-principal"] == principal_of("key", "AKIAEXAMPLE")
    for ask in (
        lambda: client("wrong").chat.completions.create(model="llava", messages=MESSAGES),
        lambda: client("wrong").models.list(),
        lambda: client(make_token("AKIAEXAMPLE", OTHER_SECRET)).models.list(),
    ):
        with pytest.raises(openai.AuthenticationError) as caught:
            ask()
        assert caught.value.status_code == 401
        assert caught.value.code == "invalid_api_key"
    answer = requests.get(f"{guarded.proxy.runtime_url}/v1/models", timeout=60)
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "invalid_request_error")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert len(received(guarded)) == 2


@pytest.mark.parametrize(
    "path", ["/models", "/models/llava", "/api-description", "/workflows/x", "/metrics", "/cancel"]
)
def test_torchserves_management_is_not_behind_the_data_plane(guarded: Stage, path: str) -> None:
    """Such paths are unknown to callers with credentials and forbidden to others."""
    for method in ("GET", "POST", "PUT", "DELETE"):
        assert requests.request(method, guarded.proxy.runtime_url + path, timeout=60).status_code == 403
        answer = requests.request(
            method, guarded.proxy.runtime_url + path, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60
        )
        assert answer.status_code == 404
    assert received(guarded) == []


@pytest.mark.parametrize("path", ["/ping", "/health"])
def test_a_prober_needs_no_credentials(guarded: Stage, path: str) -> None:
    """The answer reveals only whether an instance is ready."""
    assert requests.get(guarded.proxy.runtime_url + path, timeout=60).status_code == 200


def test_nothing_is_told_before_a_signature_is_right(guarded: Stage) -> None:
    """A caller who knows only a key's id cannot learn whether an endpoint exists."""
    unknown = "/endpoints/other/invocations"

    assert send(signed(guarded, b"{}", path=unknown)) == (400, "ValidationError")
    assert send(signed(guarded, b"{}", path=unknown), body=b"[]") == (403, "InvalidSignatureException")
    assert send(signed(guarded, b"", path="/ping2", method="HEAD"))[0] == 404
    assert send(signed(guarded, b"a", path="/ping2", method="HEAD"), body=b"b")[0] == 403


def test_a_long_signed_body_is_refused(make_stage: MakeStage) -> None:
    """A long signed body is refused; with a token it is accepted."""
    access = AccessSettings(max_signed_body_bytes=1000)
    stage = make_stage(credentials=CREDENTIALS, access=access)

    assert "bearer token" in refused(stage.client(secret=SECRET), Body=b"x" * 1001)[2]
    assert send(signed(stage, b"x" * 1001), body=iter([b"x" * 1001])) == (400, "ValidationError")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = requests.post(stage.proxy.runtime_url + PATH, data=b"x" * 1001, headers=headers, timeout=60)
    assert answer.status_code == 200


@pytest.mark.parametrize("path", [PATH, "/v1/models", "/v1/chat/completions"])
@pytest.mark.parametrize("endpoints", [("llava", "llava"), ("llava", "notes")], ids=["one", "several"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_long_signed_body_is_refused_with_one_text(
    make_stage: MakeStage, path: str, endpoints: tuple[str, str], is_chunked: bool
) -> None:
    """Every path says which limit it is and what to do, whether the length comes with the head or not."""
    stage = make_stage(
        credentials=CREDENTIALS,
        access=AccessSettings(max_signed_body_bytes=1000),
        endpoints=dict(zip("ab", endpoints, strict=True)),
    )
    request = signed(stage, b"x" * 1001, path=path)
    headers = {name: value for name, value in request.headers.items() if name != "Content-Length"}

    body = iter([request.body]) if is_chunked else request.body
    answer = requests.post(request.url, data=body, headers=headers, timeout=60)

    assert answer.status_code == 400
    assert "A signed body may have up to 1000 bytes; a longer one needs a bearer token, if its API" in answer.text


SMALL = LimitSettings(max_body_bytes=1000, max_passthrough_body_bytes=1000, max_arriving_bytes=1500)


def head_of(stage: Stage, *, path: str = PATH, length: str = "Content-Length: 1000") -> bytes:
    """Return the head of a signed request with a body of 1000 times x."""
    request = signed(stage, b"x" * 1000, path=path)
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{stage.proxy.port}", length]
    lines += [f"{name}: {value}" for name, value in request.headers.items() if name.lower() != "content-length"]
    return "\r\n".join((*lines, "", "")).encode()


def until_held(stage: Stage, num_bytes: int) -> None:
    arriving = stage.proxy.data.parts.arriving
    stage.until(lambda: arriving.num_bytes == num_bytes, f"{num_bytes} bytes are held")


def test_declared_lengths_lock_nobody_out(make_stage: MakeStage) -> None:
    """Only received bytes count, and a client that disconnects frees them."""
    stage = make_stage(credentials=CREDENTIALS, limits=SMALL)

    with stage.socket() as slow, stage.socket() as chunked:
        slow.sendall(head_of(stage) + b"x" * 10)
        chunked.sendall(head_of(stage, length="Transfer-Encoding: chunked") + b"7\r\nxxxxxxx\r\n")
        until_held(stage, 17)
        stage.client(secret=SECRET).invoke_endpoint(EndpointName="llava", Body=b"x" * 1000)
        slow.sendall(b"x" * 990)
        assert read_answer(slow).startswith(b"HTTP/1.1 200")
        until_held(stage, 7)
    until_held(stage, 0)


@pytest.mark.parametrize("path", [PATH, "/endpoints/other/invocations", "/v1/chat/completions"])
def test_bodies_that_stall_make_room_for_one_that_arrives(make_stage: MakeStage, path: str) -> None:
    """The stalled one gets a retry hint at once; the others stay."""
    endpoints = {"a": "llava", "b": "second"}  # the model of an OpenAI request is in its body
    stage = make_stage(credentials=CREDENTIALS, limits=SMALL, endpoints=endpoints)

    with stage.socket() as stalled, stage.socket() as second, stage.socket() as third, stage.socket() as good:
        for number, client in enumerate((stalled, second, third), 1):
            client.sendall(head_of(stage, path=path) + b"x" * 400)
            until_held(stage, 400 * number)
        good.sendall(head_of(stage) + b"x" * 500)
        until_held(stage, 1300)
        refusal = read_answer(stalled)
        assert refusal.startswith(b"HTTP/1.1 503")
        assert b"retry-after: " in refusal.lower()
        good.sendall(b"x" * 500)
        assert read_answer(good).startswith(b"HTTP/1.1 200")
        until_held(stage, 800)

    metrics = stage.admin("/metrics").text
    assert 'CallerLimited_total{setting="max_arriving_bytes"} 1.0' in metrics


def test_a_connection_knows_its_clients_address(guarded: Stage) -> None:
    """Bodies that arrive count for it, unless their caller is verified."""
    with socket.create_connection(("127.0.0.1", guarded.proxy.port), DEADLINE_S, ("127.0.0.2", 0)) as client:
        client.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        read_answer(client)
        assert [each.source for each in guarded.proxy.data.server.connections] == ["127.0.0.2"]


def test_refusals_are_counted(guarded: Stage) -> None:
    refused(guarded.client(secret="wrong"))
    requests.post(guarded.proxy.runtime_url + PATH, timeout=60)

    metrics = guarded.admin("/metrics").text

    assert 'AccessDenied_total{error="InvalidSignatureException"} 1.0' in metrics
    assert 'AccessDenied_total{error="MissingAuthenticationTokenException"} 1.0' in metrics


def test_a_refusal_for_another_cause_is_not_counted_as_denied(make_stage: MakeStage) -> None:
    """A valid signature over a body that is too long is an invalid request, not refused access."""
    access = AccessSettings(max_signed_body_bytes=1000)
    stage = make_stage(access=access, credentials=CREDENTIALS)
    assert send(signed(stage, b"x" * 1001))[0] == 400

    metrics = stage.admin("/metrics").text

    assert "AccessDenied_total{" not in metrics


def test_signed_requests_are_spread_by_the_body_they_begin_with(make_stage: MakeStage) -> None:
    """A strategy that looks at the body sees it after the check as it would without one."""
    stage = make_stage(credentials=CREDENTIALS, strategy="PREFIX_AWARE")
    client = stage.client(secret=SECRET)

    for _ in range(6):
        client.invoke_endpoint(EndpointName="llava", Body=b"the same prompt" * 400)

    assert sorted((len(stage.a.received), len(stage.b.received))) == [0, 6]


def test_the_admin_plane_can_have_a_token(make_stage: MakeStage) -> None:
    """A scraper sends it as a bearer token, a browser as a password; probes need none."""
    stage = make_stage(credentials=Credentials(admin_token="admin-token-0123456789"))
    url = stage.proxy.admin_url

    for path in ("/healthz", "/livez"):
        assert requests.get(url + path, timeout=60).status_code == 200
    assert requests.get(f"{url}/readyz", timeout=60).status_code in (200, 503)  # before or after its probes
    for path in ("/instances", "/metrics", "/nothing"):
        answer = requests.get(url + path, timeout=60)
        assert (answer.status_code, answer.headers["www-authenticate"][:5]) == (401, "Basic")
        assert answer.json() == {"error": "Unauthorized."}
        assert requests.get(url + path, auth=("me", "wrong"), timeout=60).status_code == 401
        assert requests.get(url + path, headers={"Authorization": "Basic ???"}, timeout=60).status_code == 401
    assert requests.get(f"{url}/instances", auth=("me", "admin-token-0123456789"), timeout=60).status_code == 200
    bearer = {"Authorization": "Bearer admin-token-0123456789"}
    assert requests.get(f"{url}/metrics", headers=bearer, timeout=60).status_code == 200


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("tls")
    return [make_certificate(folder, name) for name in ("first", "second")]


def test_boto3_and_openai_speak_tls(make_stage: MakeStage, certificates: list[tuple[Path, Path]]) -> None:
    """Whole answers, streams and long bodies pass; only TLS 1.2 or later and HTTP/1.1 are accepted."""
    certificate, key = certificates[0]
    listen = LISTEN.replace(tls_certificate=str(certificate), tls_key=str(key))
    stage = make_stage(credentials=CREDENTIALS, listen=listen)
    client = stage.client(secret=SECRET, verify=str(certificate))

    assert stage.proxy.runtime_url.startswith("https://")
    for body in (b"{}", b"x" * 3_000_000):
        assert client.invoke_endpoint(EndpointName="llava", Body=body)["Body"].read() == b"{}"
    answer = client.invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"{}")
    assert b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]) == b"{}"
    assert refused(stage.client(secret="wrong", verify=str(certificate)))[1] == "InvalidSignatureException"
    assert stage.raw(b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n").find(b"200") < 0
    context = ssl.create_default_context(cafile=certificate)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with context.wrap_socket(stage.socket(), server_hostname="127.0.0.1") as sock:
        assert sock.selected_alpn_protocol() == "http/1.1"
        assert str(sock.version()) >= "TLSv1.2"


def test_a_load_names_the_reason_of_a_refused_certificate(
    make_stage: MakeStage, certificates: list[tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 3, as of `ask`, with the variable that helps."""
    certificate, key = certificates[0]
    listen = LISTEN.replace(tls_certificate=str(certificate), tls_key=str(key))
    stage = make_stage(credentials=CREDENTIALS, listen=listen)
    load = ["bench", "--url", stage.proxy.runtime_url, "--requests", "1", "--users", "1"]

    result = CliRunner().invoke(main, load)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    trusting = CliRunner().invoke(main, load)

    assert result.exit_code == 3
    assert "certificate refused: self-signed certificate (AWS_CA_BUNDLE names" in result.stderr
    assert trusting.exit_code == 4, "the certificate is trusted, and credentials are missing"


def test_progress_is_queried_with_the_certificates_that_boto3_trusts(
    certificates: list[tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While `ask` waits for an instance behind a private certificate, it shows the progress, too."""

    class Describing(QuietHandler):
        def do_GET(self) -> None:
            status = {"StatusMessage": "a is being started"}
            self.reply(200, json.dumps({"ProductionVariants": [{"VariantStatus": [status]}]}).encode())

    certificate, key = certificates[0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Describing)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    told: list[str] = []

    with run_http(server) as url:
        signer = signing.Signer(signing.Login(token=TOKEN))
        watch = EndpointWatch(url.replace("http", "https", 1), "llava", signer, told.append, patience_s=0.01)
        with watch.waiting():
            wait_until(lambda: told, "the progress is shown")

    assert told[0] == "a is being started"


def test_tls_clients_receive_only_answers(make_stage: MakeStage, certificates: list[tuple[Path, Path]]) -> None:
    """No session tickets: Python 3.11 clients can lose what they send while another thread receives tickets."""
    certificate, key = certificates[0]
    stage = make_stage(listen=LISTEN.replace(tls_certificate=str(certificate), tls_key=str(key)))
    context = ssl.create_default_context(cafile=certificate)
    with context.wrap_socket(stage.socket(), server_hostname="127.0.0.1") as sock:
        sock.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(sock).startswith(b"HTTP/1.1 200")
        assert sock.version() == "TLSv1.3"
        assert not sock.session.has_ticket


def test_the_admin_plane_speaks_tls_with_a_certificate_of_its_own(
    make_stage: MakeStage, certificates: list[tuple[Path, Path]]
) -> None:
    """The admin plane's token must not cross a network unencrypted; the data plane has its own certificate, or none."""
    certificate, key = map(str, certificates[0])
    stage = make_stage(
        listen=LISTEN.replace(admin_tls_certificate=certificate, admin_tls_key=key),
        credentials=Credentials(admin_token="admin-token-0123456789"),
    )
    bearer = {"Authorization": "Bearer admin-token-0123456789"}

    assert stage.proxy.admin_url.startswith("https://")
    answer = stage.admin("/instances", headers=bearer, verify=certificate)
    assert answer.status_code == 200


def test_connections_without_a_handshake_count(make_stage: MakeStage, certificates: list[tuple[Path, Path]]) -> None:
    """They hold descriptors, so one more client is refused, until they have left."""
    certificate, key = certificates[0]
    limits = LimitSettings(max_connections=1)
    stage = make_stage(listen=LISTEN.replace(tls_certificate=str(certificate), tls_key=str(key)), limits=limits)
    context = ssl.create_default_context(cafile=certificate)

    def ping() -> bytes:
        with context.wrap_socket(stage.socket(), server_hostname="127.0.0.1") as client:
            client.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            return read_answer(client)

    with stage.socket():
        assert ping().startswith(b"HTTP/1.1 503")

    wait_until(lambda: ping().startswith(b"HTTP/1.1 200"), "both are forgotten")


def test_a_stop_does_not_wait_for_handshakes(certificates: list[tuple[Path, Path]]) -> None:
    """A client that has sent nothing is disconnected at once."""
    certificate, key = certificates[0]
    context = ssl.create_default_context(cafile=certificate)
    listen = LISTEN.replace(tls_certificate=str(certificate), tls_key=str(key))
    with Stage(names=("a",), listen=listen) as stage, stage.socket() as silent:
        with context.wrap_socket(stage.socket(), server_hostname="127.0.0.1") as later:  # so both are accepted
            later.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_answer(later).startswith(b"HTTP/1.1 200")
        stage.loop.call_soon_threadsafe(stage.stopping.set)

        assert silent.recv(1) == b""


def test_handshakes_with_the_admin_plane_are_limited(
    make_stage: MakeStage, certificates: list[tuple[Path, Path]]
) -> None:
    """One above limits.max_admin_connections is closed."""
    certificate, key = map(str, certificates[0])
    stage = make_stage(
        listen=LISTEN.replace(admin_tls_certificate=certificate, admin_tls_key=key),
        limits=LimitSettings(max_admin_connections=1),
    )
    port = urlsplit(stage.proxy.admin_url).port

    with socket.create_connection(("127.0.0.1", port), timeout=60), pytest.raises(requests.ConnectionError):
        stage.admin("/livez", verify=certificate)

    def is_alive() -> bool:
        with suppress(requests.ConnectionError):
            return stage.admin("/livez", verify=certificate).status_code == 200
        return False

    wait_until(is_alive, "the first has left")


def test_a_renewed_certificate_is_taken_without_a_restart(
    make_stage: MakeStage, certificates: list[tuple[Path, Path]], tmp_path: Path
) -> None:
    """New connections get it and existing ones continue; a certificate and key that do not match change nothing."""
    certificate, key = tmp_path / "tls.pem", tmp_path / "tls.key"
    certificate.write_bytes(certificates[0][0].read_bytes())
    key.touch(0o600)
    key.write_bytes(certificates[0][1].read_bytes())
    stage = make_stage(listen=LISTEN.replace(tls_certificate=str(certificate), tls_key=str(key)))

    def shown() -> str:
        pem = ssl.get_server_certificate(("127.0.0.1", stage.proxy.port), timeout=60)
        return next(name for name, pair in zip("12", certificates, strict=True) if pair[0].read_text().strip() in pem)

    assert shown() == "1"
    old = stage.client(verify=str(certificates[0][0]))
    old.invoke_endpoint(EndpointName="llava", Body=b"{}")["Body"].read()
    certificate.write_bytes(certificates[1][0].read_bytes())
    stage.call(stage.proxy.reload_tls)
    assert shown() == "1"
    key.write_bytes(certificates[1][1].read_bytes())
    stage.call(stage.proxy.reload_tls)
    assert shown() == "2"
    old.invoke_endpoint(EndpointName="llava", Body=b"{}")


def test_a_renewed_certificate_may_have_another_kind_of_key(
    make_stage: MakeStage, certificates: list[tuple[Path, Path]], tmp_path: Path
) -> None:
    """New connections no longer get the old one, which OpenSSL would prefer."""
    certificate, key = certificates[0]
    rsa_certificate, rsa_key = make_certificate(tmp_path, "rsa", key_kind=("rsa:2048",))
    used_certificate, used_key = tmp_path / "tls.pem", tmp_path / "tls.key"
    used_certificate.write_bytes(certificate.read_bytes())
    used_key.touch(0o600)
    used_key.write_bytes(key.read_bytes())
    listen = LISTEN.replace(
        tls_certificate=str(used_certificate),
        tls_key=str(used_key),
        admin_tls_certificate=str(used_certificate),
        admin_tls_key=str(used_key),
    )
    stage = make_stage(listen=listen, credentials=Credentials(admin_token="admin-token-0123456789"))

    used_certificate.write_bytes(rsa_certificate.read_bytes())
    used_key.write_bytes(rsa_key.read_bytes())
    stage.call(stage.proxy.reload_tls)

    for url in (stage.proxy.runtime_url, stage.proxy.admin_url):
        shown = ssl.get_server_certificate(("127.0.0.1", urlsplit(url).port), timeout=60)
        assert rsa_certificate.read_text().strip() in shown


def test_many_signed_uploads_at_once_all_arrive(guarded: Stage) -> None:
    """Each body is verified and forwarded completely, regardless of the others."""
    failures: list[BaseException] = []

    def upload(number: int) -> None:
        try:
            client = guarded.client(secret=SECRET)
            body = bytes([number]) * 500_000
            client.invoke_endpoint(EndpointName="llava", Body=body)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert sorted(each.body[0] for each in received(guarded)) == list(range(8))
    assert all(len(set(each.body)) == 1 and len(each.body) == 500_000 for each in received(guarded))


def test_a_silent_connection_to_the_admin_plane_is_closed(make_stage: MakeStage) -> None:
    """A client that connects and sends nothing keeps no descriptor."""
    stage = make_stage(limits=LimitSettings(header_timeout_s=0.05))

    with socket.create_connection(("127.0.0.1", stage.proxy.admin_port), timeout=DEADLINE_S) as silent:
        assert silent.recv(1) == b""


def test_a_body_that_stops_arriving_at_the_admin_plane_ends_its_connection(make_stage: MakeStage) -> None:
    """Otherwise such clients keep all connections, and probes get 503."""
    stage = make_stage(limits=LimitSettings(body_timeout_s=0.05, max_admin_connections=1))
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: SageMaker.ListEndpoints\r\nContent-Length: 9\r\n\r\n{"

    with socket.create_connection(("127.0.0.1", stage.proxy.admin_port), timeout=DEADLINE_S) as slow:
        slow.sendall(head)
        answer = read_answer(slow)

    assert answer.startswith(b"HTTP/1.1 408")


def test_a_client_that_leaves_within_a_body_to_the_admin_plane_is_no_fault(
    make_stage: MakeStage, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has no traceback."""
    stage = make_stage(limits=LimitSettings(max_admin_connections=1))
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: SageMaker.ListEndpoints\r\nContent-Length: 9\r\n\r\n{"

    with socket.create_connection(("127.0.0.1", stage.proxy.admin_port), timeout=DEADLINE_S) as leaving:
        leaving.sendall(head)

    def is_free() -> bool:
        with suppress(requests.ConnectionError):
            return stage.admin("/livez").status_code == 200
        return False

    wait_until(is_free, "the client has left")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "line", [b"GET /\xff HTTP/1.1", b"GET / HTTP/1.1\r\nnot a field", b"POST / HTTP/1.1\r\nContent-Length: x"]
)
def test_a_request_to_the_admin_plane_that_cannot_be_read_is_no_fault(
    stage: Stage, caplog: pytest.LogCaptureFixture, line: bytes
) -> None:
    """Its client gets a 400, and the log has no traceback."""
    with socket.create_connection(("127.0.0.1", stage.proxy.admin_port), timeout=DEADLINE_S) as client:
        client.sendall(line + b"\r\nHost: localhost\r\n\r\n")
        assert b" 400 " in read_answer(client, to_end=True)

    assert "Traceback" not in caplog.text
