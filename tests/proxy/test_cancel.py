"""Cancellation: what the proxy sends to an instance when a client leaves or a request times out."""

import asyncio
import json
import socket
from contextlib import suppress
from time import monotonic

import pytest
from botocore.exceptions import ClientError

from tests.proxy.conftest import MakeStage, Stage, make_session_id, read_answer, read_until
from tests.proxy.fake_instance import FakeInstance, Gate, Received, Wire, dying, refusing, silent, streaming
from torchmoor.config.limits import LimitSettings
from torchmoor.config.timeouts import TimeoutSettings

BODY = b'{"type": "send_text_prompt"}'


def post(
    path: str = "/endpoints/llava/invocations", *, body: bytes = BODY, session: str | None = None, more: str = ""
) -> bytes:
    line = f"x-amzn-sagemaker-session-id: {session}\r\n" if session else ""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{line}{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def ask(stage: Stage, request: bytes, target: FakeInstance) -> socket.socket:
    """Send a request and return once the instance has received it completely."""
    before = len(target.received)
    sock = stage.send(request)
    stage.until(lambda: len(target.received) > before, "the request reached the instance")
    return sock


def ids(target: FakeInstance) -> list[str]:
    """Return the proxy's ids of the requests that the instance received."""
    return [request.headers["x-torchmoor-request-id"] for request in target.received]


@pytest.mark.parametrize(
    "path",
    [
        "/endpoints/llava/invocations",
        "/endpoints/llava/invocations-response-stream",
        "/invocations",
        "/predictions/llava?a=b",
    ],
)
def test_client_that_leaves_before_the_answer_is_told_to_the_instance(stage: Stage, path: str) -> None:
    """In every dialect one cancellation is sent on the request's own path with the id that the request carried."""
    stage.a.behave = silent
    sock = ask(stage, post(path), stage.a)

    sock.close()

    stage.until(lambda: stage.a.cancelled == ids(stage.a), "the cancellation")
    (cancel,) = stage.a.cancels
    assert (cancel.method, cancel.path) == ("POST", "/predictions/llava")
    stage.until(lambda: stage.outstanding() == 0, "the lease released")
    stage.until(lambda: stage.proxy.data.subrequests.num_running == 0, "the operation's end")
    assert stage.b.cancels == []


def test_cancellation_holds_no_lease(stage: Stage) -> None:
    """Routing sees an idle instance, however long the operation takes."""
    gate = Gate()
    stage.a.behave, stage.a.on_cancel = silent, gate.behave
    ask(stage, post(), stage.a).close()
    gate.wait_reached()

    stage.until(lambda: stage.outstanding() == 0, "the lease released")

    assert stage.proxy.data.subrequests.num_running == 1
    gate.open()
    stage.until(lambda: stage.proxy.data.subrequests.num_running == 0, "the operation's end")


def test_operations_use_the_pooled_connections(stage: Stage) -> None:
    """The connection of an operation serves the next operation, and then a request."""
    stage.a.behave = silent
    for _ in range(2):
        before = len(stage.a.cancels)
        ask(stage, post(session=make_session_id("a")), stage.a).close()
        stage.until(lambda: len(stage.a.cancels) > before, "the cancellation")  # noqa: B023
        stage.until(lambda: len(stage.instance("a").idle) == 1, "the connection went back")


def test_many_clients_that_leave_at_once_cost_few_operations(stage: Stage) -> None:
    """While one operation is in flight, further ids are collected and sent together with the next."""
    gate = Gate()
    stage.a.behave, stage.a.on_cancel = silent, gate.behave
    request = post(session=make_session_id("a"))
    socks = [ask(stage, request, stage.a) for _ in range(40)]
    socks[0].close()
    gate.wait_reached()

    for sock in socks[1:]:
        sock.close()
    stage.until(lambda: stage.outstanding() == 0, "all clients gone")
    gate.open()

    stage.until(lambda: sorted(stage.a.cancelled) == sorted(ids(stage.a)), "all cancellations")
    assert len(stage.a.cancels) == 2


def test_request_given_up_at_its_deadline_is_cancelled(make_stage: MakeStage) -> None:
    """The client gets a model time-out, and the model gets a cancellation."""
    stage = make_stage(timeouts=TimeoutSettings(model_timeout_s=0.2, sweep_interval_s=0.02))
    stage.a.behave = silent

    with pytest.raises(ClientError) as caught:
        stage.client().invoke_endpoint(EndpointName="llava", Body=BODY)

    assert caught.value.response["OriginalStatusCode"] == 0
    stage.until(lambda: stage.a.cancelled == ids(stage.a), "the cancellation")


def test_request_that_goes_elsewhere_after_a_reset_is_cancelled_where_it_was(stage: Stage) -> None:
    """A broken connection does not stop the work behind it; the second attempt is not cancelled."""
    stage.a.behave = dying

    stage.client().invoke_endpoint(EndpointName="llava", Body=BODY)

    stage.until(lambda: stage.a.cancelled == ids(stage.a), "the cancellation")
    assert ids(stage.a) == ids(stage.b)
    assert stage.b.cancelled == []


def test_client_that_leaves_during_the_second_attempt_ends_that_one(stage: Stage) -> None:
    """The instance that refused gets no cancellation; the instance that works on the request does."""
    stage.a.behave, stage.b.behave = refusing(429, "Overloaded", "full"), silent
    sock = ask(stage, post(), stage.b)

    sock.close()

    stage.until(lambda: stage.b.cancelled == ids(stage.b), "the cancellation")
    assert stage.a.cancels == []


def test_answered_request_is_never_cancelled(stage: Stage) -> None:
    """TorchServe itself notices a closed connection while it writes an answer."""

    async def endless(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain; charset=utf-8")
        while not wire.writer.is_closing():
            await wire.chunk(b"half")
            await asyncio.sleep(0)

    stage.client().invoke_endpoint(EndpointName="llava", Body=BODY)
    stage.a.behave = stage.b.behave = streaming([b"one", b"two"])
    with stage.socket() as sock:
        sock.sendall(post("/endpoints/llava/invocations-response-stream"))
        read_until(sock, b"two")
    stage.a.behave = stage.b.behave = endless
    with stage.socket() as sock:
        sock.sendall(post("/endpoints/llava/invocations-response-stream"))
        read_until(sock, b"half")

    stage.until(lambda: stage.outstanding() == 0, "all over")
    assert stage.a.cancels == stage.b.cancels == []


def test_request_that_was_not_sent_whole_is_not_cancelled(make_stage: MakeStage) -> None:
    """A request whose body has not arrived whole is at no instance, so nothing is cancelled."""
    stage = make_stage(limits=LimitSettings(max_body_bytes=1 << 20))
    with stage.socket() as sock:
        sock.sendall(post(body=b"x" * 100_000)[:50_000])
        stage.until(lambda: stage.proxy.data.parts.arriving.num_bytes, "the request is on its way")
        assert stage.outstanding() == 0

    stage.until(lambda: not stage.proxy.data.parts.arriving.num_bytes, "the client's end")
    assert stage.a.cancels == stage.b.cancels == []


def test_dead_instance_costs_no_more_than_one_attempt(stage: Stage) -> None:
    """A cancellation that cannot be delivered is dropped without an error."""
    stage.a.behave = silent
    sock = ask(stage, post(), stage.a)

    stage.run(stage.a.die())
    stage.until(lambda: stage.b.received, "the request went elsewhere")
    with suppress(OSError):
        read_answer(sock)
    sock.close()

    stage.until(lambda: stage.proxy.data.subrequests.num_running == 0, "the operation's end")
    assert stage.a.cancels == []


def test_operation_that_is_not_answered_ends_in_time(make_stage: MakeStage) -> None:
    """A hanging instance does not keep a connection, and the ids collected meanwhile are tried."""
    stage = make_stage(timeouts=TimeoutSettings(cancel_timeout_s=0.2, sweep_interval_s=0.02))
    stage.a.behave = stage.a.on_cancel = silent
    request = post(session=make_session_id("a"))
    first, second = ask(stage, request, stage.a), ask(stage, request, stage.a)

    first.close()
    stage.until(lambda: stage.a.cancels, "the cancellation")
    second.close()

    stage.until(lambda: stage.a.cancelled == ids(stage.a), "both cancellations")
    stage.until(lambda: stage.proxy.data.subrequests.num_running == 0, "both operations' end")


def test_client_cannot_cancel_through_the_proxy(stage: Stage) -> None:
    """The data plane removes the headers that only proxy and handler exchange."""
    more = "X-Torchmoor-Operation: cancel\r\nX-Torchmoor-Request-Id: mine\r\nX-Torchmoor-Timeout-Ms: 1\r\n"
    body = json.dumps({"request_ids": ["other"]}).encode()

    for path in ("/endpoints/llava/invocations", "/invocations", "/predictions/llava"):
        answer = stage.raw(post(path, body=body, more=more))
        assert answer.startswith(b"HTTP/1.1 200")

    received = stage.a.received + stage.b.received
    assert len(received) == 3
    for request in received:
        assert "x-torchmoor-operation" not in request.headers
        assert request.headers["x-torchmoor-request-id"] != "mine"
        assert int(request.headers["x-torchmoor-timeout-ms"]) > 1000
    assert stage.a.cancels == stage.b.cancels == []


def test_request_says_how_long_the_proxy_waits(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header carries the operation's limit plus a margin; a second attempt gets the time that is left."""
    stage = make_stage(timeouts=TimeoutSettings(model_timeout_s=50, stream_total_timeout_s=500))
    told: list[int] = []  # in milliseconds
    ahead_s = 0
    monkeypatch.setattr("torchmoor.proxy.http.exchange.monotonic", lambda: monotonic() + ahead_s)

    async def late_refusal(request: Received, wire: Wire) -> None:
        nonlocal ahead_s
        told.append(int(request.headers["x-torchmoor-timeout-ms"]))
        ahead_s += 20
        await refusing(429, "Overloaded", "full")(request, wire)

    client = stage.client()
    client.invoke_endpoint(EndpointName="llava", Body=BODY)
    client.invoke_endpoint_with_response_stream(EndpointName="llava", Body=BODY)["Body"].close()
    whole, streamed = sorted(
        int((stage.a.received + stage.b.received)[i].headers["x-torchmoor-timeout-ms"]) for i in (0, 1)
    )
    stage.a.behave = stage.b.behave = late_refusal
    assert stage.raw(post()).startswith(b"HTTP/1.1 503")
    first, second = told

    assert 1_000 < whole <= 51_000 < streamed <= 501_000  # a late body has used part of the time
    assert 1_000 < second <= first - 20_000
    assert first <= 51_000
