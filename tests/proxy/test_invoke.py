"""InvokeEndpoint with the real boto3 client: what is forwarded, added and refused."""

import json

import pytest
from botocore.exceptions import ClientError

from tests.proxy.conftest import MakeStage, Stage, make_session_id
from tests.proxy.fake_instance import Gate, answering, streaming
from torchmoor.config.limits import LimitSettings


def invoke(stage: Stage, **arguments: object) -> dict[str, object]:
    return stage.client().invoke_endpoint(**{"EndpointName": "llava", "Body": b"{}", **arguments})


def refusal(stage: Stage, **arguments: object) -> ClientError:
    with pytest.raises(ClientError) as caught:
        invoke(stage, **arguments)
    return caught.value


def test_answer_reaches_the_client_and_says_where_it_ran(stage: Stage) -> None:
    """The answer has the instance's body, content type and receipts, and the proxy's variant."""
    stage.a.behave = stage.b.behave = answering(
        headers={
            "X-Torchmoor-Cache-Tier": "kv",
            "X-Amzn-SageMaker-Custom-Attributes": "mine",
            "ts_stream_next": "true",
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "1",
        },
        body=b'{"ok": 1}',
    )

    answer = stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}", ContentType="application/json")

    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert answer["Body"].read() == b'{"ok": 1}'
    assert answer["ContentType"] == "application/json"
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    assert answer["CustomAttributes"] == "mine"
    assert headers["x-torchmoor-cache-tier"] == "kv"
    assert headers["x-torchmoor-instance"] in ("a", "b")
    assert headers["x-amzn-sagemaker-invoked-routing-reason"] == "least-outstanding-requests"
    assert answer["ResponseMetadata"]["RequestId"]
    assert "x-hop" not in headers
    assert "ts_stream_next" not in headers


def test_request_reaches_the_instance_without_credentials_or_forged_headers(stage: Stage) -> None:
    """The instance gets the body, the API's headers and the proxy's, without credentials or forged headers."""
    answer = stage.ask(
        "POST",
        "/endpoints/llava/invocations",
        b'{"x": 1}',
        {
            "Content-Type": "application/json",
            "Accept": "text/plain",
            "X-Amzn-SageMaker-Custom-Attributes": "c",
            "X-Amzn-SageMaker-Inference-Id": "inference-1",
            "amz-sdk-invocation-id": "invocation-1",
            "Authorization": "AWS4 secret",
            "X-Amz-Security-Token": "secret",
            "X-Torchmoor-Principal": "forged",
            "X-Torchmoor-Operation": "status",
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "1",
        },
    )
    answer.read()

    [seen] = stage.a.received + stage.b.received
    assert (seen.method, seen.path, seen.body) == ("POST", "/predictions/llava", b'{"x": 1}')
    assert seen.headers["content-type"] == "application/json"
    assert seen.headers["accept"] == "text/plain"
    assert seen.headers["x-amzn-sagemaker-custom-attributes"] == "c"
    assert seen.headers["x-amzn-sagemaker-inference-id"] == "inference-1"
    assert seen.headers["amz-sdk-invocation-id"] == "invocation-1"
    assert seen.headers["x-torchmoor-endpoint"] == "llava"
    assert answer.headers["x-amzn-requestid"] == seen.headers["x-torchmoor-request-id"]
    for name in ("authorization", "x-amz-security-token", "x-torchmoor-principal", "x-torchmoor-operation", "x-hop"):
        assert name not in seen.headers


@pytest.mark.parametrize("suffix", ["", "-response-stream"])
def test_request_id_of_the_answer_is_the_proxys(stage: Stage, suffix: str) -> None:
    """The instance's own request id does not reach the client."""
    stage.a.behave = stage.b.behave = answering(headers={"X-Amzn-RequestId": "of-the-instance"})

    answer = stage.ask("POST", f"/endpoints/llava/invocations{suffix}", b"{}")
    answer.read()

    [seen] = stage.a.received + stage.b.received
    assert answer.headers.get_all("x-amzn-requestid") == [seen.headers["x-torchmoor-request-id"]]


def test_request_without_an_inference_id_gets_the_request_id(stage: Stage) -> None:
    """The request id replaces a missing inference id, so that one id goes from client to worker."""
    answer = invoke(stage)

    [seen] = stage.a.received + stage.b.received
    request_id = answer["ResponseMetadata"]["RequestId"]
    assert request_id == seen.headers["x-torchmoor-request-id"] == seen.headers["x-amzn-sagemaker-inference-id"]


def test_opening_tells_the_new_session_id(stage: Stage) -> None:
    """NEW_SESSION reaches the instance unchanged; either of its two headers becomes NewSessionId."""
    for header in ("X-Amzn-SageMaker-Session-Id", "X-Amzn-SageMaker-New-Session-Id"):
        value = "ts-seq-x; Expires=2030-01-01T00:00:00Z"
        stage.a.behave = stage.b.behave = answering(headers={header: value})

        answer = invoke(stage, SessionId="NEW_SESSION")

        assert value == answer["NewSessionId"]
        seen = (stage.a.received + stage.b.received)[0]
        assert seen.headers["x-amzn-sagemaker-session-id"] == "NEW_SESSION"


def test_turns_of_a_session_go_to_its_instance(stage: Stage) -> None:
    for name in ("b", "b", "a", "b"):
        answer = invoke(stage, SessionId=make_session_id(name))

        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        assert (name, "session") == (
            headers["x-torchmoor-instance"],
            headers["x-amzn-sagemaker-invoked-routing-reason"],
        )
    assert (len(stage.a.received), len(stage.b.received)) == (1, 3)


def test_closing_tells_the_closed_session_id(stage: Stage) -> None:
    """The handler's header with the closed session's id is forwarded."""
    stage.a.behave = answering(headers={"X-Amzn-SageMaker-Closed-Session-Id": make_session_id("a")})

    answer = invoke(stage, SessionId=make_session_id("a"))

    assert make_session_id("a") == answer["ClosedSessionId"]


@pytest.mark.parametrize(
    "session_id",
    [
        make_session_id("a")[:-1] + "a",
        make_session_id("a", endpoint="other"),
        make_session_id("a", key=b"another key of 16"),
        make_session_id("a").replace("-a-", "-b-"),
        "made-up",
    ],
)
def test_forged_session_id_is_refused_by_the_proxy(stage: Stage, session_id: str) -> None:
    """An id that was not minted for this endpoint with a known key reaches no instance."""
    error = refusal(stage, SessionId=session_id)

    assert (error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]) == (
        400,
        "ValidationError",
    )
    assert stage.a.received + stage.b.received == []


def test_session_whose_instance_is_unknown_moves_to_one_that_all_proxies_agree_on(stage: Stage) -> None:
    """A session of an unknown instance always moves to the same other one, by rendezvous hashing."""
    names = {
        invoke(stage, SessionId=make_session_id("gone"))["ResponseMetadata"]["HTTPHeaders"]["x-torchmoor-instance"]
        for _ in range(3)
    }

    assert len(names) == 1


def test_unknown_endpoint_is_named_as_the_service_names_it(stage: Stage) -> None:
    """An unknown endpoint is a ValidationError with SageMaker's message."""
    error = refusal(stage, EndpointName="nobody")

    assert error.response["Error"]["Code"] == "ValidationError"
    assert error.response["Error"]["Message"] == "Endpoint nobody of account 000000000000 not found."  # prose: allow


def test_body_over_the_limit_is_a_validation_error_that_boto3_sees(make_stage: MakeStage) -> None:
    """The refusal is readable although the client is still sending."""
    stage = make_stage(limits=LimitSettings(max_body_bytes=100_000))

    for num_bytes in (100_001, 20_000_000):
        error = refusal(stage, Body=bytes(num_bytes))

        assert error.response["Error"]["Code"] == "ValidationError"
        assert "limit of 100000 bytes" in error.response["Error"]["Message"]
    assert stage.a.received + stage.b.received == []


def test_streamed_answer_of_the_whole_operation_passes_as_a_body(stage: Stage) -> None:
    """InvokeEndpoint joins what the instance streams into one body."""
    stage.a.behave = stage.b.behave = streaming([b"one ", b"two"])

    answer = invoke(stage)

    assert answer["Body"].read() == b"one two"


def test_new_work_goes_to_the_instance_with_the_fewest_outstanding(stage: Stage) -> None:
    """While one instance is busy, the other gets all new requests."""
    gate = Gate()
    stage.a.behave = gate.behave
    first = stage.http()
    first.request("POST", "/endpoints/llava/invocations", b"{}", {"X-Amzn-SageMaker-Session-Id": make_session_id("a")})
    gate.wait_reached()

    for _ in range(3):
        invoke(stage)

    assert (len(stage.a.received), len(stage.b.received)) == (1, 3)
    gate.open()
    assert first.getresponse().status == 200


def test_no_room_anywhere_is_service_unavailable(make_stage: MakeStage) -> None:
    """If all instances are at capacity the answer is 503 with Retry-After."""
    stage = make_stage(capacity=1, names=("a",))
    gate = Gate()
    stage.a.behave = gate.behave
    first = stage.http()
    first.request("POST", "/endpoints/llava/invocations", b"{}")
    gate.wait_reached()

    error = refusal(stage)

    assert error.response["Error"]["Code"] == "ServiceUnavailable"
    assert error.response["ResponseMetadata"]["HTTPHeaders"]["retry-after"]
    gate.open()
    first.getresponse().read()


@pytest.mark.parametrize("path", ["/nothing", "/endpoints/llava", "/endpoints/llava/other", "/"])
def test_unknown_path_is_an_unknown_operation(stage: Stage, path: str) -> None:
    """An unknown path gets 404 with a JSON body and the error's type."""
    answer = stage.ask("POST", path, b"{}")

    assert (answer.status, answer.headers["x-amzn-errortype"]) == (404, "UnknownOperationException")
    assert "Message" in json.loads(answer.read())
