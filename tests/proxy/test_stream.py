"""InvokeEndpointWithResponseStream with the real boto3 client, whose decoder checks every frame."""

import json

import pytest
from botocore.exceptions import BotoCoreError, ConnectionClosedError, EventStreamError

from tests.proxy.conftest import MakeStage, Stage, make_session_id, read_answer
from tests.proxy.fake_instance import Behaviour, Gate, Received, Wire, answering, streaming
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.dispatch.recent_decisions import DecisionQuery


def invoke(stage: Stage, **arguments: object) -> dict[str, object]:
    answer: dict[str, object] = stage.client().invoke_endpoint_with_response_stream(
        **{"EndpointName": "llava", "Body": b"{}", **arguments}
    )
    stage.close_later(answer["Body"])
    return answer


def parts(answer: dict[str, object]) -> list[bytes]:
    return [event["PayloadPart"]["Bytes"] for event in answer["Body"]]


def test_each_flushed_piece_is_one_part(stage: Stage) -> None:
    """Parts are sent while the instance still writes, and the content type has its own header."""
    gates = [Gate(), Gate()]

    async def paced(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain; charset=utf-8", {"X-Torchmoor-Cache-Tier": "kv"})
        await wire.chunk(b"ein ")
        await gates[0].pass_through()
        await wire.chunk("größer".encode())
        await gates[1].pass_through()
        await wire.chunk(b"")

    stage.a.behave = stage.b.behave = paced
    answer = invoke(stage)
    events = iter(answer["Body"])

    first = next(events)["PayloadPart"]["Bytes"]
    gates[0].open()
    second = next(events)["PayloadPart"]["Bytes"]
    gates[1].open()

    assert (b"ein ", "größer".encode(), []) == (first, second, list(events))
    assert answer["ContentType"] == "text/plain; charset=utf-8"
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    assert headers["content-type"] == "application/vnd.amazon.eventstream"
    assert headers["x-torchmoor-cache-tier"] == "kv"
    assert "ts_stream_next" not in headers


def test_each_event_is_one_part(stage: Stage) -> None:
    """Server-sent events that arrive together are parts of their own, which LiteLLM needs; a cut event may be two."""

    async def joined(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/event-stream; charset=utf-8")
        await wire.chunk(b"data: 1\n\ndata: 2\n\ndata: [DO")
        await wire.chunk(b"NE]\n\n")
        await wire.chunk(b"")

    stage.a.behave = stage.b.behave = joined

    first, second, *cut = parts(invoke(stage))

    assert (first, second, b"".join(cut)) == (b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n")


def test_whole_answer_is_framed_too(stage: Stage) -> None:
    """An answer with Content-Length becomes an event stream, too."""
    stage.a.behave = stage.b.behave = answering(body=b'{"response_text": "red"}')

    answer = invoke(stage)

    assert b"".join(parts(answer)) == b'{"response_text": "red"}'
    assert answer["ContentType"] == "application/json"


def test_empty_answer_is_an_empty_stream(stage: Stage) -> None:
    """An empty answer becomes a stream without parts and with an orderly end."""
    stage.a.behave = stage.b.behave = answering(body=b"")

    assert parts(invoke(stage)) == []


def test_an_answer_without_content_is_an_empty_stream(stage: Stage) -> None:
    """An instance's 204 has no body and no length, and the connection stays usable."""

    async def say_nothing(request: Received, wire: Wire) -> None:
        await wire.head(204, {})

    stage.a.behave = stage.b.behave = say_nothing
    answer = invoke(stage)

    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 204
    assert parts(answer) == []


def test_accept_travels_under_its_other_name(stage: Stage) -> None:
    """X-Amzn-SageMaker-Accept becomes the instance's Accept."""
    invoke(stage, Accept="application/jsonlines")

    [seen] = stage.a.received + stage.b.received
    assert seen.headers["accept"] == "application/jsonlines"


def test_a_session_can_be_opened_and_continued_by_stream(stage: Stage) -> None:
    """The session's id is in a header, because the stream operation has no NewSessionId member."""
    value = make_session_id("b") + "; Expires=2030-01-01T00:00:00Z"
    stage.a.behave = stage.b.behave = answering(headers={"X-Amzn-SageMaker-Session-Id": value})

    opened = invoke(stage, SessionId="NEW_SESSION")
    asked = invoke(stage, SessionId=make_session_id("b"))

    assert value == opened["ResponseMetadata"]["HTTPHeaders"]["x-amzn-sagemaker-new-session-id"]
    assert asked["ResponseMetadata"]["HTTPHeaders"]["x-torchmoor-instance"] == "b"
    assert b"{}" == b"".join(parts(opened)) == b"".join(parts(asked))


def mark(message: str) -> bytes:
    return b"\x1e" + json.dumps({"error": {"code": "InternalError", "message": message}}).encode()


@pytest.mark.parametrize(
    "tail",
    [
        [b"some text" + mark("boom")],
        [b"some text", mark("boom")],
        [b"some text\x1e", mark("boom")[1:8], mark("boom")[8:]],
        [b"some text", *(bytes([byte]) for byte in mark("boom"))],
    ],
)
def test_handlers_late_error_is_a_model_stream_error(stage: Stage, tail: list[bytes]) -> None:
    """The mark and what follows are never shown as text, however the pieces are cut."""
    stage.a.behave = stage.b.behave = streaming(tail)
    text: list[bytes] = []

    with pytest.raises(EventStreamError) as caught:
        text.extend(event["PayloadPart"]["Bytes"] for event in invoke(stage)["Body"])

    assert b"".join(text) == b"some text"
    assert caught.value.response["Error"]["Code"] == "ModelStreamError"
    assert "InternalError: boom" in caught.value.response["Error"]["Message"]
    assert_noted_as_broken(stage)


def assert_noted_as_broken(stage: Stage) -> None:
    """Assert that the only answer counts as one that broke off, and not as a failure of its instance."""
    stage.until(lambda: stage.outstanding() == 0, "the answer ended")
    [row] = stage.run(stage.proxy.data.find_decisions(DecisionQuery(error="MidStreamError")))["decisions"]
    assert (row["outcome"], row["status"]) == ("broken", 200)
    assert stage.proxy.data.dispatchers.all()[0].metrics.mid_stream_errors == 1
    assert [stage.instance(name).breaker.num_failures for name in "ab"] == [0, 0]


@pytest.mark.parametrize("tail", [[b"some text" + mark("boom")], [b"some text", mark("boom")[:9], mark("boom")[9:]]])
def test_handlers_late_error_is_one_for_who_did_not_ask_for_a_stream(stage: Stage, tail: list[bytes]) -> None:
    """A late error under InvokeEndpoint truncates the body, which every client treats as a failure."""
    stage.a.behave = stage.b.behave = streaming(tail)

    with pytest.raises(ConnectionClosedError):
        stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    assert_noted_as_broken(stage)


def test_text_without_an_error_is_whole_for_who_did_not_ask_for_a_stream(stage: Stage) -> None:
    """Text with the mark's byte but without an error arrives whole under InvokeEndpoint."""
    stage.a.behave = stage.b.behave = streaming([b"some ", b"te\x1ext"])

    assert stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")["Body"].read() == b"some te\x1ext"


@pytest.mark.parametrize(
    ("pieces", "content_type"),
    [([b"\x1ebinary"], "application/octet-stream"), ([b"a\x1eb", b"c"], "text/plain; charset=utf-8")],
)
def test_mark_without_an_error_behind_it_is_data(stage: Stage, pieces: list[bytes], content_type: str) -> None:
    """The error mark applies to plain text only."""
    stage.a.behave = stage.b.behave = streaming(pieces, content_type)

    assert b"".join(parts(invoke(stage))) == b"".join(pieces)


def dying(after: list[bytes]) -> Behaviour:
    async def behave(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain; charset=utf-8")
        for piece in after:
            await wire.chunk(piece)
        await wire.writer.drain()
        wire.writer.close()  # in mid-answer, after what was written

    return behave


def test_death_in_mid_stream_is_a_model_stream_error(stage: Stage) -> None:
    """The client gets the pieces so far, once, then an error with StreamBroken."""
    stage.a.behave = stage.b.behave = dying([b"half an ans"])
    text: list[bytes] = []

    with pytest.raises(EventStreamError) as caught:
        text.extend(event["PayloadPart"]["Bytes"] for event in invoke(stage)["Body"])

    assert b"".join(text) == b"half an ans"
    assert caught.value.response["Error"]["Code"] == "ModelStreamError"
    assert "StreamBroken" in caught.value.response["Error"]["Message"]
    assert len(stage.a.received + stage.b.received) == 1
    assert stage.proxy.data.dispatchers.all()[0].metrics.mid_stream_errors == 1


def test_silence_in_mid_stream_is_a_model_stream_error(make_stage: MakeStage) -> None:
    """The idle time-out ends the stream with ModelInvocationTimeExceeded."""
    stage = make_stage(timeouts=TimeoutSettings(stream_idle_timeout_s=0.1, sweep_interval_s=0.02))

    async def stuck(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain")
        await wire.chunk(b"start")
        await wire.until_closed()

    stage.a.behave = stage.b.behave = stuck

    with pytest.raises(EventStreamError) as caught:
        parts(invoke(stage))

    assert "ModelInvocationTimeExceeded" in caught.value.response["Error"]["Message"]
    stage.until(lambda: stage.a.num_open + stage.b.num_open == 0, "the instance's connection closed")


def test_whole_operation_cuts_the_connection_when_the_instance_dies(stage: Stage) -> None:
    """Without frames a cut connection is the only way to show that the answer is incomplete."""
    stage.a.behave = stage.b.behave = dying([b"half"])

    answer = stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")
    with pytest.raises(BotoCoreError):
        answer["Body"].read()


def test_http10_client_sees_a_reset_when_the_instance_dies(stage: Stage) -> None:
    """Without chunks, the usual end of the connection would make half an answer look whole."""
    stage.a.behave = stage.b.behave = dying([b"half"])

    with stage.socket() as sock:
        sock.sendall(b"POST /predictions/llava HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        with pytest.raises(ConnectionResetError):
            read_answer(sock, to_end=True)


def test_http10_client_gets_a_stream_until_close(stage: Stage) -> None:
    """An HTTP/1.0 client, which does not know chunks, gets the stream until the connection's end."""
    stage.a.behave = stage.b.behave = streaming([b"one ", b"two"])

    answer = stage.raw(b"POST /predictions/llava HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")

    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == b"one two"
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
