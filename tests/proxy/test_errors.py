"""Every row of the error mapping, as the botocore exception that the client sees."""

import pytest
from botocore.exceptions import ClientError

from tests.proxy.conftest import MakeStage, Stage, make_session_id
from tests.proxy.fake_instance import Received, Wire, answering, dying, refusing, silent
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.api.invocation import Invocation

OPERATIONS = ("invoke_endpoint", "invoke_endpoint_with_response_stream")


def refusal(stage: Stage, operation: str = "invoke_endpoint", **arguments: object) -> ClientError:
    with pytest.raises(ClientError) as caught:
        getattr(stage.client(), operation)(**{"EndpointName": "llava", "Body": b"{}", **arguments})
    return caught.value


def status_of(error: ClientError) -> int:
    return error.response["ResponseMetadata"]["HTTPStatusCode"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (404, "SessionUnknown"),
        (410, "SessionExpired"),
        (410, "SessionClosed"),
        (410, "SessionLost"),
        (400, "SessionIdMismatch"),
    ],
)
def test_session_errors_are_validation_errors(stage: Stage, operation: str, status: int, code: str) -> None:
    """A session error is 400 with the handler's message."""
    stage.a.behave = refusing(status, code, f"this is {code}")

    error = refusal(stage, operation, SessionId=make_session_id("a"))

    assert (400, "ValidationError", f"this is {code}") == (
        status_of(error),
        error.response["Error"]["Code"],
        error.response["Error"]["Message"],
    )
    assert stage.b.received == []


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("status", "code", "whose"),
    [
        (400, "InvalidJson", "client"),
        (403, "ImageUrlForbidden", "client"),
        (415, "NotAnImage", "client"),
        (500, "InternalError", "server"),
        (502, "ImageUnreachable", "server"),
        (404, None, "client"),
        (418, None, "client"),
    ],
)
def test_other_errors_are_model_errors(stage: Stage, operation: str, status: int, code: str | None, whose: str) -> None:
    """The answer is 424 with the model's own status and message; the request is not retried."""
    stage.a.behave = stage.b.behave = refusing(status, code, "the cause")

    error = refusal(stage, operation)

    assert (status_of(error), error.response["Error"]["Code"]) == (424, "ModelError")
    assert status == error.response["OriginalStatusCode"]
    assert "the cause" in error.response["OriginalMessage"]
    arn = "arn:aws:logs:us-east-1:000000000000:log-group:/aws/sagemaker/Endpoints/llava"
    assert error.response["LogStreamArn"] == arn
    expected = f"Received {whose} error ({status}) from primary with message"
    assert error.response["Error"]["Message"].startswith(expected)
    assert len(stage.a.received + stage.b.received) == 1


def test_model_error_is_the_modelled_exception(stage: Stage) -> None:
    """boto3's client.exceptions.ModelError catches a model error."""
    stage.a.behave = stage.b.behave = refusing(400, "InvalidRequest", "no")
    client = stage.client()

    with pytest.raises(client.exceptions.ModelError):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("status", "code"), [(429, "Overloaded"), (507, "OutOfMemory"), (503, None), (507, None)])
def test_instance_without_room_is_replaced_by_another(
    stage: Stage, operation: str, status: int, code: str | None
) -> None:
    """A request that is not a turn of a session goes to another instance with its whole body."""
    stage.a.behave = refusing(status, code, "full")

    answer = getattr(stage.client(), operation)(EndpointName="llava", Body=b"the body")

    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert (
        headers["x-torchmoor-instance"],
        headers["x-amzn-sagemaker-invoked-routing-reason"],
    ) == ("b", "retry")
    assert [b"the body"] == [seen.body for seen in stage.b.received] == [seen.body for seen in stage.a.received]
    list(answer["Body"])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("status", "code"), [(429, "Overloaded"), (507, "OutOfMemory"), (503, None), (507, None)])
def test_no_room_in_any_instance_is_service_unavailable(
    stage: Stage, operation: str, status: int, code: str | None
) -> None:
    """Every instance is asked once, then 503 with the handler's Retry-After."""
    stage.a.behave = stage.b.behave = refusing(status, code, "full", {"Retry-After": "7"})

    error = refusal(stage, operation)

    assert (
        status_of(error),
        error.response["Error"]["Code"],
        error.response["Error"]["Message"],
    ) == (503, "ServiceUnavailable", "full")
    assert error.response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "7"
    assert (len(stage.a.received), len(stage.b.received)) == (1, 1)


@pytest.mark.parametrize("waits", [(40, 3000), (3000, 40)])
@pytest.mark.parametrize("path", ["/endpoints/llava/invocations", "/v1/chat/completions"])
def test_full_endpoint_states_when_its_first_instance_has_room(stage: Stage, path: str, waits: tuple[int, int]) -> None:
    """Retry-After is the shortest of all refusals, in whatever order the instances were asked."""
    for fake, wait_s in zip((stage.a, stage.b), waits, strict=True):
        fake.behave = refusing(429, "Overloaded", "full", {"Retry-After": str(wait_s)})
    body = b'{"model": "llava", "messages": [{"role": "user", "content": "hi"}]}'

    answer = stage.raw(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    assert b"\r\nretry-after: 40\r\n" in answer.lower()
    assert (len(stage.a.received), len(stage.b.received)) == (1, 1)


def test_turn_of_a_session_is_not_sent_elsewhere_for_load(stage: Stage) -> None:
    """A turn is not sent to another instance for load, because that one does not hold the session."""
    stage.a.behave = refusing(429, "Overloaded", "full")

    error = refusal(stage, SessionId=make_session_id("a"))

    assert (status_of(error), stage.b.received) == (503, [])


def test_torchserves_own_413_is_a_validation_error(stage: Stage) -> None:
    """TorchServe's 413, which has no body, becomes a ValidationError."""
    stage.a.behave = stage.b.behave = answering(413, {"Connection": "close"}, b"")

    error = refusal(stage)

    assert (status_of(error), error.response["Error"]["Code"]) == (400, "ValidationError")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_model_that_does_not_answer_in_time_is_a_model_error(make_stage: MakeStage, operation: str) -> None:
    """The client gets 424 with status 0 and SageMaker's message, and the instance's connection is closed."""
    stage = make_stage(timeouts=TimeoutSettings(model_timeout_s=0.1, sweep_interval_s=0.02))

    stage.a.behave = stage.b.behave = silent

    error = refusal(stage, operation)

    assert (status_of(error), error.response["OriginalStatusCode"]) == (424, 0)
    expected = 'Received server error (0) from primary with message "Your invocation timed out while waiting'
    assert error.response["Error"]["Message"].startswith(expected)
    stage.until(lambda: stage.a.num_open + stage.b.num_open == 0, "the instance's connection closed")


def test_connection_lost_before_the_answer_is_retried_elsewhere(stage: Stage) -> None:
    """A request without a session is retried at another instance after a lost connection."""
    stage.a.behave = dying

    answer = stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    assert answer["ResponseMetadata"]["HTTPHeaders"]["x-torchmoor-instance"] == "b"
    assert stage.instance("a").is_ready  # a reset alone does not condemn an instance and its sessions


def test_connection_lost_before_the_answer_of_a_turn_is_service_unavailable(stage: Stage) -> None:
    """A turn that may already be recorded is not sent again."""
    stage.a.behave = dying

    error = refusal(stage, SessionId=make_session_id("a"))

    assert (status_of(error), len(stage.a.received), stage.b.received) == (503, 1, [])


@pytest.mark.parametrize("fault", ["reset", "no worker", "worker died"])
def test_turn_of_a_journaled_session_goes_on_elsewhere(make_stage: MakeStage, fault: str) -> None:
    """A turn goes to another instance, which adopts the session; its invocation id prevents a second answer."""
    stage = make_stage(are_journaled=True)

    stage.a.behave = dying if fault == "reset" else refusing(503 if fault == "no worker" else 500, None, fault)

    answer = stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId=make_session_id("a"))

    assert answer["ResponseMetadata"]["HTTPHeaders"]["x-torchmoor-instance"] == "b"
    first, second = stage.a.received[0], stage.b.received[0]
    assert first.headers["amz-sdk-invocation-id"] == second.headers["amz-sdk-invocation-id"] != ""


def test_turn_of_a_journaled_session_stays_where_it_is_refused(make_stage: MakeStage) -> None:
    """A turn that a busy instance refuses stays there, because moving its session would cost more than waiting."""
    stage = make_stage(are_journaled=True)
    stage.a.behave = refusing(429, "Overloaded", "full")

    error = refusal(stage, SessionId=make_session_id("a"))

    assert (status_of(error), stage.b.received) == (503, [])


def test_request_without_an_invocation_id_gets_one(stage: Stage) -> None:
    """A request without an invocation id, as from curl, gets one, by which the handler recognises a retry."""
    stage.ask("POST", "/endpoints/llava/invocations", b"{}").read()

    (received,) = [*stage.a.received, *stage.b.received]
    assert received.headers["amz-sdk-invocation-id"] == received.headers["x-torchmoor-request-id"]


def test_instance_that_refuses_connections_is_left_out(stage: Stage) -> None:
    """A refused connection means that nothing was sent, so even a turn goes to another instance; this one is DOWN."""
    stage.run(stage.a.die())

    answer = stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId=make_session_id("a"))

    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert (
        headers["x-torchmoor-instance"],
        headers["x-amzn-sagemaker-invoked-routing-reason"],
    ) == ("b", "session-failover")
    assert not stage.instance("a").is_ready


def test_no_instance_is_service_unavailable(stage: Stage) -> None:
    """Without an instance the answer is 503 with Retry-After, whatever failed."""
    stage.run(stage.a.die())
    stage.run(stage.b.die())

    for _ in range(2):
        error = refusal(stage)

        assert (status_of(error), error.response["Error"]["Code"]) == (503, "ServiceUnavailable")
        assert error.response["ResponseMetadata"]["HTTPHeaders"]["retry-after"]


def test_answer_that_is_not_http_is_a_lost_connection(stage: Stage) -> None:
    async def garbage(request: Received, wire: Wire) -> None:
        await wire.send(b"\x00\x01 what is this\r\n\r\n")
        await wire.until_closed()

    stage.a.behave = stage.b.behave = garbage

    error = refusal(stage)

    assert status_of(error) == 503


def test_fault_of_the_proxy_tells_an_id_and_nothing_else(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets 500 InternalFailure with an id, and the log has the cause under that id."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("a private detail")

    monkeypatch.setattr(stage.proxy.data.dispatchers, "choose", fail)

    error = refusal(stage)

    assert (status_of(error), error.response["Error"]["Code"]) == (500, "InternalFailure")
    assert "private" not in str(error.response)
    assert error.response["ResponseMetadata"]["RequestId"] in caplog.text
    assert "a private detail" in caplog.text


def test_asynchronous_request_to_an_endpoint_without_is_refused_clearly(stage: Stage) -> None:
    """The ValidationError says what the endpoint lacks."""
    with pytest.raises(ClientError) as caught:
        stage.client().invoke_endpoint_async(EndpointName="llava", InputLocation="s3://bucket/key")

    assert "has no AsyncInferenceConfig" in caught.value.response["Error"]["Message"]


def test_replay_needs_the_body_to_be_kept(make_stage: MakeStage) -> None:
    """A request whose body exceeds the limit for kept bodies is not retried; the client gets the first refusal."""
    from torchmoor.config.limits import LimitSettings

    stage = make_stage(limits=LimitSettings(max_replay_body_bytes=1000))
    stage.a.behave = stage.b.behave = refusing(429, "Overloaded", "full")

    error = refusal(stage, Body=bytes(1001))

    assert (status_of(error), len(stage.a.received + stage.b.received)) == (503, 1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_fault_of_the_proxy_is_answered(stage: Stage, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """A whole request that the proxy fails to place gets 500 at once, and the next one is served."""

    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(Invocation, "route", fail)
        error = refusal(stage, operation)

    assert status_of(error) == 500
    assert stage.a.received == stage.b.received == []
    assert stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")["ResponseMetadata"]["HTTPStatusCode"] == 200
