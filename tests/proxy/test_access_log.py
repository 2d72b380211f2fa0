"""The access log of a running proxy: one line of JSON per request."""

import json
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EventStreamError

from tests.proxy.conftest import MakeStage, Stage, make_session_id
from tests.proxy.fake_instance import Gate, Received, Wire, answering, refusing, streaming
from tests.proxy.fake_many import FakeFleet
from tests.waiting import wait_until
from torchmoor.config.container import ContainerSettings
from torchmoor.config.credentials import Credentials
from torchmoor.config.limits import LimitSettings
from torchmoor.config.observe import ObserveSettings
from torchmoor.config.routing import MultiModelSettings
from torchmoor.proxy.http.eventstream import payload_part
from torchmoor.wire import headers
from torchmoor.wire.continuation import PieceKind, mark_piece

NEW_ID = make_session_id("a", nonce="qrstuvwxyzabcdef")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.jsonl"


@pytest.fixture
def stage(make_stage: MakeStage, path: Path) -> Stage:
    return make_stage(observe=logging_to(path))


@pytest.fixture(autouse=True)
def _write_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchmoor.proxy.observe.access_log.INTERVAL_S", 0.01)


def logging_to(path: Path) -> ObserveSettings:
    return ObserveSettings(access_log=str(path))


def lines(path: Path, count: int = 1) -> list[dict[str, Any]]:
    """Return the log's lines once it has `count` of them."""
    wait_until(lambda: path.read_bytes().count(b"\n") >= count, f"{count} lines in the access log")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == count
    return found


def test_line_says_where_a_request_went_and_how_long_it_took(stage: Stage, path: Path) -> None:
    """A line has caller, endpoint, instance, reason, result, sizes and times, and never a body."""
    body = b'{"prompt_text": "a secret prompt"}'
    stage.a.behave = stage.b.behave = answering(body=b'{"response_text": "a secret answer"}')

    answer = stage.client().invoke_endpoint(
        EndpointName="llava", Body=body, InferenceId="order-7", SessionId=make_session_id("a")
    )

    [line] = lines(path)
    assert line["request_id"] == answer["ResponseMetadata"]["RequestId"]
    assert line["inference_id"] == "order-7"
    assert (line["endpoint"], line["variant"], line["operation"]) == ("llava", "AllTraffic", "InvokeEndpoint")
    assert (line["instance"], line["routing_reason"], line["retries"]) == ("a", "session", 0)
    assert (line["status"], line["outcome"]) == (200, "answered")
    assert "error_type" not in line
    assert line["bytes_in"] == len(body)
    assert line["bytes_out"] > len(b'{"response_text": "a secret answer"}')
    assert 0 < line["upstream_ms"] <= line["total_ms"]
    assert 0 < line["first_byte_ms"] <= line["total_ms"]
    assert line["time"].endswith("Z")
    text = path.read_text()
    assert "secret" not in text
    assert make_session_id("a") not in text


def test_requests_that_the_proxy_answers_have_the_clients_id(stage: Stage, path: Path) -> None:
    """The log has the client's id, by which operators find a reported request, shortened if necessary."""
    client = stage.client()
    with pytest.raises(ClientError, match="not found"):
        client.invoke_endpoint(EndpointName="elsewhere", Body=b"{}", InferenceId="order-8")
    stage.http().request("POST", "/endpoints/llava/invocations", b"{}", {"X-Amzn-SageMaker-Inference-Id": "n" * 100})

    unknown, too_long = lines(path, 2)
    assert (unknown["status"], unknown["inference_id"]) == (400, "order-8")
    assert (too_long["status"], too_long["inference_id"]) == (400, "n" * 64)


def test_line_of_a_stream_has_its_tokens(stage: Stage, path: Path) -> None:
    """The computed prompt tokens are in the answer's head, the generated ones in the marked stream's last piece."""

    async def behave(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain", {headers.CONTINUABLE: "the start", "X-Torchmoor-Prefill-Tokens": "40"})
        await wire.chunk(mark_piece(b"a b", "17", PieceKind.END))
        await wire.chunk(b"")

    stage.a.behave = stage.b.behave = behave
    answer = stage.client().invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"{}")
    assert b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]) == b"a b"

    [line] = lines(path)
    assert (line["prefill_tokens"], line["generated_tokens"]) == (40, 17)


def test_number_that_cannot_be_read_harms_no_record(stage: Stage, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Python refuses to read a number this long as an integer."""
    stage.a.behave = stage.b.behave = answering(headers={"X-Torchmoor-Context-Tokens": "9" * 5000})

    for _ in range(3):
        answer = stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200

    wait_until(lambda: path.is_file() and len(path.read_text().splitlines()) == 3, "each request has a line")
    assert "request not recorded" not in caplog.text


def test_an_accepted_asynchronous_request_has_a_line(make_stage: MakeStage, path: Path, tmp_path: Path) -> None:
    """The line belongs to the answer 202; the request's own end is in the list of asynchronous requests."""
    stage = make_stage(observe=logging_to(path), async_folder=tmp_path)

    stage.client().invoke_endpoint_async(EndpointName="llava", Body=b"{}")

    [line] = lines(path)
    assert (line["status"], line["path"]) == (202, "/endpoints/llava/async-invocations")


def test_lines_of_one_session_share_a_hash(stage: Stage, path: Path) -> None:
    """The answer that opens a session has the hash too, so that a session can be followed without its id."""
    headers = {"X-Amzn-SageMaker-New-Session-Id": f"{NEW_ID}; Expires=2038-01-19T03:14:07Z"}
    stage.a.behave = stage.b.behave = answering(headers=headers)
    client = stage.client()

    client.invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId="NEW_SESSION")
    client.invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId=NEW_ID)
    stage.a.behave = stage.b.behave = answering()
    client.invoke_endpoint(EndpointName="llava", Body=b"{}")

    opening, turn, other = lines(path, 3)
    assert opening["session"] == turn["session"]
    assert turn["session"]
    assert "session" not in other


def test_one_inference_id_reaches_the_worker(stage: Stage, path: Path) -> None:
    """It is the client's id or, without one, the proxy's request id."""
    stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}", InferenceId="order-7")
    stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    found = lines(path, 2)
    received = sorted(
        (r for fake in stage.instances.values() for r in fake.received),
        key=lambda r: r.headers["x-torchmoor-request-id"],
    )
    assert [r.headers["x-amzn-sagemaker-inference-id"] for r in received] == [line["inference_id"] for line in found]
    assert found[1]["inference_id"] == found[1]["request_id"] == received[1].headers["x-torchmoor-request-id"]


def test_errors_are_named(stage: Stage, path: Path) -> None:
    """A model's error has its own status beside the proxy's, a retry is counted, and a refusal has a line."""
    stage.a.behave = stage.b.behave = refusing(400, "InvalidRequest", "no such thing")
    client = stage.client()
    with pytest.raises(ClientError):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}")
    stage.a.behave = stage.b.behave = refusing(503, None, "queue full")
    with pytest.raises(ClientError):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}")
    with pytest.raises(ClientError):
        client.invoke_endpoint(EndpointName="nobody", Body=b"{}")

    model, busy, unknown = lines(path, 3)
    assert (model["status"], model["error_type"], model["status_refused"]) == (424, "ModelError", 400)
    assert (busy["status"], busy["error_type"], busy["retries"]) == (503, "ServiceUnavailable", 1)
    assert (unknown["status"], unknown["error_type"], "endpoint" in unknown) == (400, "ValidationError", False)
    assert unknown["path"] == "/endpoints/nobody/invocations"


def test_answers_without_an_invocation_have_lines(make_stage: MakeStage, path: Path) -> None:
    """This includes requests that wait for a body or an operation and requests that no endpoint received."""
    settings = ContainerSettings(serves_models=True)
    stage = make_stage(
        observe=logging_to(path),
        endpoints={"a": "one", "b": "two"},
        multi_model=MultiModelSettings(),
        container=settings,
        prepare=FakeFleet(),
    )
    chat = {"model": "nobody", "messages": []}
    load = {"model_name": "m", "url": "/opt/ml/models/m/model"}
    for where, body in (("/v1/chat/completions", chat), ("/models", load), ("/models", "not an object")):
        stage.ask("POST", where, json.dumps(body), {"Content-Type": "application/json"}).read()

    unknown, loaded, refused = lines(path, 3)
    assert (unknown["path"], unknown["status"]) == ("/v1/chat/completions", 404)
    assert (loaded["path"], loaded["status"], "error_type" in loaded) == ("/models", 200, False)
    assert (refused["path"], refused["status"]) == ("/models", 400)


def test_line_names_the_model_wherever_the_request_does(make_stage: MakeStage, path: Path) -> None:
    """A header, the body of OpenAI's requests, or the path of the open inference protocol, which ignores the header."""
    stage = make_stage(observe=logging_to(path), multi_model=MultiModelSettings(), prepare=FakeFleet(("m1", "m2")))
    requests = (
        ("/endpoints/llava/invocations", {}, "m1"),
        ("/v1/chat/completions", {"model": "m1", "messages": []}, None),
        ("/v1/embeddings", {"model": "m1", "input": "x"}, None),
        ("/v2/models/m1/infer", {"inputs": []}, "m2"),
    )
    for where, body, header in requests:
        fields = {"Content-Type": "application/json"} | ({"X-Amzn-SageMaker-Target-Model": header} if header else {})
        stage.ask("POST", where, json.dumps(body), fields).read()

    found = lines(path, len(requests))
    assert [(line["status"], line["target_model"]) for line in found] == [(200, "m1")] * len(requests)


def test_line_names_the_adapter_that_only_the_body_names(make_stage: MakeStage, path: Path) -> None:
    """The adapter is logged if only the body names it; a request for the base model has no such field."""
    stage = make_stage(observe=logging_to(path), multi_model=MultiModelSettings(are_adapters=True))
    for model in ("llava/red", "llava"):
        stage.ask("POST", "/v1/chat/completions", json.dumps({"model": model, "messages": []})).read()

    adapter, base = lines(path, 2)
    assert (adapter["target_model"], "target_model" in base) == ("red", False)


def test_broken_stream_and_gone_client_are_told_apart(stage: Stage, path: Path) -> None:
    """A stream that its instance broke off has an error name; a request whose client left has no status."""

    async def break_off(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain")
        await wire.chunk(b"half")
        wire.reset()

    stage.a.behave = stage.b.behave = break_off
    answer = stage.client().invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"{}")
    stage.close_later(answer["Body"])
    with pytest.raises(EventStreamError):
        list(answer["Body"])
    gate = Gate()

    async def wait(request: Received, wire: Wire) -> None:
        await gate.pass_through()

    stage.a.behave = stage.b.behave = wait
    connection = stage.http()
    connection.request("POST", "/endpoints/llava/invocations", b"{}")
    assert gate.reached.wait(60)
    connection.close()

    broken, gone = lines(path, 2)
    gate.open()
    assert (broken["operation"], broken["outcome"]) == ("InvokeEndpointWithResponseStream", "broken")
    assert broken["error_type"] == "MidStreamError"
    assert (gone["outcome"], gone["status"]) == ("client gone", None)


def test_refused_for_its_size_while_it_is_sent(make_stage: MakeStage, path: Path) -> None:
    """The log includes answers that are sent before an instance is chosen."""
    stage = make_stage(observe=logging_to(path), limits=LimitSettings(max_body_bytes=100))
    with pytest.raises(ClientError):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"x" * 101)
    stage.raw(
        b"POST /endpoints/llava/invocations HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        b"65\r\n" + b"x" * 101 + b"\r\n0\r\n\r\n"
    )

    declared, chunked = lines(path, 2)
    assert (declared["status"], declared["error_type"]) == (400, "ValidationError")
    assert (chunked["status"], chunked["error_type"], chunked["bytes_in"]) == (400, "ValidationError", 101)


def test_credentials_are_never_logged(make_stage: MakeStage, path: Path) -> None:
    """The hash that instances receive identifies the caller; a refusal has its reason."""
    token = "a-token-that-nobody-guesses"
    stage = make_stage(observe=logging_to(path), credentials=Credentials(tokens={"app": token}))
    for given in (token, "wrong-token-of-some-length"):
        connection = stage.http()
        headers = {"Authorization": f"Bearer {given}"}
        connection.request("POST", "/endpoints/llava/invocations", b"{}", headers)
        connection.getresponse().read()

    good, bad = lines(path, 2)
    received = [r for fake in stage.instances.values() for r in fake.received]
    assert good["principal"] == received[0].headers["x-torchmoor-principal"]
    assert (bad["status"], "principal" in bad) == (403, False)
    assert "token" not in path.read_text()


def test_stream_counts_what_the_client_got(stage: Stage, path: Path) -> None:
    """bytes_out counts the whole answer as it was sent, including every frame of a stream."""
    stage.a.behave = stage.b.behave = streaming([b"one ", b"two"])
    answer = stage.client().invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"{}")
    assert b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]) == b"one two"

    [line] = lines(path)
    assert line["bytes_out"] > 2 * len(payload_part(b"one "))
    assert line["first_byte_ms"] <= line["total_ms"]


def test_log_goes_on_after_rotation(stage: Stage, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a rotation with SIGHUP, as logrotate does it, the next line is in the new file and none is lost.

    A log message says that nothing else is read again.
    """
    client = stage.client()
    client.invoke_endpoint(EndpointName="llava", Body=b"{}")
    lines(path)
    path.rename(path.with_suffix(".1"))

    stage.call(stage.proxy.on_hangup)
    wait_until(path.exists, "the new file")
    client.invoke_endpoint(EndpointName="llava", Body=b"{}")

    assert len(lines(path)) == len(lines(path.with_suffix(".1"))) == 1
    assert "any other change needs a restart" in caplog.text
