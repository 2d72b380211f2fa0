"""WebSocket connections to the Responses API: order, bounds, ends, access, and clients that break the rules."""

import gc
import json
import socket
import ssl
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.certificates import make_certificate
from tests.proxy.conftest import LISTEN, MakeStage, Stage, read_answer
from tests.proxy.fake_instance import Gate, Received, Wire, answering, streaming
from tests.proxy.test_access import CREDENTIALS, TOKEN
from tests.proxy.test_metrics import scrape, value
from tests.waiting import DEADLINE_S, wait_until
from torchmoor.config.credentials import Credentials
from torchmoor.config.limits import LimitSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.config.websocket import WebSocketSettings

OpenSocket = Callable[..., ClientConnection]
PATH = "/v1/responses"
HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def event(kind: str, **values: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **values}).encode())


def response(number: int, status: str = "completed") -> dict[str, Any]:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": f"answer {number}"}]}
    return {"id": f"resp_{number}", "status": status, "previous_response_id": None, "output": [said]}


class Responses:
    """Instances that answer each request with a short stream. gate: waited for after the first event."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.gate: Gate | None = None
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        for fake in stage.instances.values():
            fake.behave = self.behave

    async def behave(self, request: Received, wire: Wire) -> None:
        self.bodies.append(json.loads(request.body))
        self.headers.append(request.headers)
        number = len(self.bodies)
        await wire.begin_stream("text/event-stream")
        await wire.chunk(event("response.created", response=response(number, "in_progress")))
        if self.gate is not None:
            await self.gate.pass_through()
        data = event("response.completed", response=response(number))
        await wire.chunk(data[:40])  # an event in two pieces
        await wire.chunk(data[40:])
        await wire.chunk(b"")


@pytest.fixture
def responses(stage: Stage) -> Responses:
    return Responses(stage)


@pytest.fixture
def open_socket() -> Iterator[OpenSocket]:
    """Yield a function that opens a client's connections; they are closed before a stage that is named before it."""
    with ExitStack() as stack:

        def open_one(stage: Stage, path: str = PATH, **options: Any) -> ClientConnection:
            address = stage.proxy.runtime_url.replace("http", "ws", 1) + path
            return stack.enter_context(connect(address, open_timeout=DEADLINE_S, close_timeout=DEADLINE_S, **options))

        yield open_one


def send(connection: ClientConnection, **body: Any) -> None:
    connection.send(json.dumps({"type": "response.create", "model": "llava", "input": "x", **body}))


def receive(connection: ClientConnection) -> Any:
    return json.loads(connection.recv(timeout=DEADLINE_S))


def ask(connection: ClientConnection, **body: Any) -> Any:
    """Send a message, and return its last event."""
    send(connection, **body)
    while True:
        last = receive(connection)
        if last["type"] in ("response.completed", "response.failed", "error"):
            return last


def closed(connection: ClientConnection) -> ConnectionClosed:
    """Read until the proxy has closed the connection, and return how."""
    try:
        while True:
            connection.recv(timeout=DEADLINE_S)
    except ConnectionClosed as error:
        return error


def closed_inside_a_message(stage: Stage, connection: ClientConnection) -> ConnectionClosed:
    """Let the time pass for which the proxy waits for the rest of the message, which is not sent."""
    stage.until(lambda: connection.protocol.close_rcvd is not None, "the proxy's close frame has arrived")
    stage.pass_time(6)
    return closed(connection)


def test_messages_are_answered_in_order(stage: Stage, responses: Responses, open_socket: OpenSocket) -> None:
    """Each is a streamed request with the connection's fields, and one at a time runs."""
    responses.gate = Gate()
    connection = open_socket(stage, additional_headers={"x-amzn-sagemaker-custom-attributes": "c"})
    for text in ("1", "2", "3"):
        send(connection, input=text)
    responses.gate.wait_reached()
    stage.until(lambda: stage.outstanding() == 1, "one request runs")
    responses.gate.open()
    kinds = [receive(connection)["type"] for _ in range(6)]

    assert kinds == ["response.created", "response.completed"] * 3
    assert [body["input"] for body in responses.bodies] == ["1", "2", "3"]
    assert all(body["stream"] is True and "type" not in body for body in responses.bodies)
    assert [each["x-torchmoor-resource"] for each in responses.headers] == ["POST responses"] * 3
    assert len({each["x-amzn-sagemaker-custom-attributes"] for each in responses.headers}) == 1
    assert not any(name.startswith("sec-websocket") for each in responses.headers for name in each)


def test_unstored_response_is_sent_again_with_the_next_input(
    stage: Stage, responses: Responses, open_socket: OpenSocket
) -> None:
    """An unstored response is sent again with the next input; a failed continuation drops it.

    A key keeps the connection's requests at one instance.
    """
    connection = open_socket(stage)
    first = ask(connection, store=False)["response"]
    second = ask(connection, store=False, input="y", previous_response_id=first["id"])["response"]
    for fake in stage.instances.values():
        fake.behave = answering(
            400, {"X-Torchmoor-Error": "InvalidRequest"}, b'{"error": {"message": "no", "code": 1}}'
        )
    failed = ask(connection, store=False, previous_response_id=second["id"])
    for fake in stage.instances.values():
        fake.behave = responses.behave
    ask(connection, store=False, input="z", previous_response_id=second["id"])

    _, again, last = responses.bodies
    assert [item.get("content") for item in again["input"]] == ["x", first["output"][0]["content"], "y"]
    assert "previous_response_id" not in again
    assert second["previous_response_id"] == first["id"]
    assert (failed["status"], failed["error"]["message"]) == (400, "no")
    assert (last["input"], last["previous_response_id"]) == ("z", second["id"])
    assert len({each["x-session-id"] for each in responses.headers}) == 1


def test_lanes_keep_their_own_unstored_responses(stage: Stage, responses: Responses, open_socket: OpenSocket) -> None:
    """Events and errors have the name of their lane; another lane may continue its response, and leaves it there."""
    connection = open_socket(stage)
    first = ask(connection, store=False, input="a", stream_id="one")
    second = ask(connection, store=False, input="b", stream_id="two")
    fork = ask(connection, store=False, input=7, stream_id="two", previous_response_id=first["response"]["id"])
    third = ask(connection, store=False, input="c", stream_id="one", previous_response_id=first["response"]["id"])
    fourth = ask(connection, store=False, input="d", previous_response_id=second["response"]["id"])

    assert [each.get("stream_id") for each in (first, second, fork, third, fourth)] == [
        "one",
        "two",
        "two",
        "one",
        None,
    ]
    assert fork["type"] == "error"
    asked = [[item["content"] for item in body["input"] if item.get("role") == "user"] for body in responses.bodies[2:]]
    assert asked == [["a", "c"], ["b", "d"]]
    assert not any("stream_id" in body for body in responses.bodies)


def test_names_of_lanes_are_limited(stage: Stage, responses: Responses, open_socket: OpenSocket) -> None:
    connection = open_socket(stage)

    wrong = [ask(connection, stream_id=name)["error"]["code"] for name in ("", "a b", "x" * 257, 7)]
    names = [ask(connection, stream_id=f"lane-{number % 32}").get("stream_id") for number in range(33)]
    refused = ask(connection, stream_id="another")

    assert wrong == ["invalid_stream_id"] * 4
    assert names == [f"lane-{number % 32}" for number in range(33)]
    assert (refused["error"]["code"], refused["stream_id"]) == ("websocket_stream_limit_reached", "another")
    assert ask(connection)["type"] == "response.completed"


@pytest.mark.parametrize("left_out", [{"input": None}, {"input": []}])
def test_unstored_response_is_continued_without_input(
    stage: Stage, responses: Responses, open_socket: OpenSocket, left_out: dict[str, Any]
) -> None:
    """An unstored response can be continued without input, like a stored one over HTTP.

    Input of another type is refused.
    """
    connection = open_socket(stage)
    first = ask(connection, store=False)["response"]
    wrong = ask(connection, store=False, input=7, previous_response_id=first["id"])
    ask(connection, store=False, previous_response_id=first["id"], **left_out)

    _, again = responses.bodies
    assert (wrong["status"], wrong["error"]["message"]) == (400, "'input' must be a text or a list of items.")
    assert [item.get("content") for item in again["input"]] == ["x", first["output"][0]["content"]]
    assert "previous_response_id" not in again


def test_held_bytes_are_limited(make_stage: MakeStage, open_socket: OpenSocket) -> None:
    """A response that is too long is not kept; a connection whose messages are too long in total ends."""
    stage = make_stage(websocket=WebSocketSettings(max_held_bytes=2_250))
    responses = Responses(stage)
    connection = open_socket(stage)
    first = ask(connection, store=False, input="x" * 1_800)["response"]
    ask(connection, store=False, previous_response_id=first["id"])
    assert responses.bodies[-1]["previous_response_id"] == first["id"]  # passed on: the instance does not know it
    connection.socket.sendall(masked(b"x" * 3_000)[:2_300])
    assert closed_inside_a_message(stage, connection).rcvd.code == 1013


def test_long_and_binary_messages_end_the_connection(make_stage: MakeStage, open_socket: OpenSocket) -> None:
    stage = make_stage(websocket=WebSocketSettings(max_message_bytes=1_000))
    long: Any
    for long, code in (("x" * 1_001, 1009), (iter(["x" * 600] * 2), 1009), (b"{}", 1003)):
        connection = open_socket(stage)
        with suppress(ConnectionClosed):  # maybe before everything is sent
            connection.send(long)
        error = closed(connection)
        assert error.rcvd.code == code


def test_a_message_of_many_frames_takes_no_more_memory_than_its_bytes(stage: Stage, responses: Responses) -> None:
    """A message in many small frames takes no more memory than its bytes; 16 MiB in frames of two bytes took 640 MB."""
    num_frames = 20_000
    with stage.socket() as sock:
        sock.sendall(HANDSHAKE)
        assert read_head(sock).startswith(b"HTTP/1.1 101")
        sockets = stage.proxy.data.application.sockets
        tracemalloc.start()
        try:
            sock.sendall(frame(1, b"xy", is_last=False) + frame(0, b"xy", is_last=False) * (num_frames - 1))
            stage.until(lambda: sockets.budget.used_bytes == 8 * num_frames, "all frames received")
            gc.collect()
            num_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
    assert 2 * num_frames <= num_bytes < 10 * num_frames


def test_a_frame_that_begins_behind_another_is_counted(stage: Stage, responses: Responses) -> None:
    """The bytes of a frame that stalls after another one count towards the limit."""
    with stage.socket() as sock:
        sock.sendall(HANDSHAKE)
        assert read_head(sock).startswith(b"HTTP/1.1 101")
        sockets = stage.proxy.data.application.sockets

        sock.sendall(frame(9, b"") + frame(1, b"x" * 100)[:60])

        stage.until(lambda: sockets.budget.used_bytes == 54, "the bytes behind the head of the frame are counted")
    stage.check_clean()


def test_too_many_connections_are_refused(make_stage: MakeStage, open_socket: OpenSocket) -> None:
    stage = make_stage(websocket=WebSocketSettings(max_connections=1))
    Responses(stage)
    connection = open_socket(stage)
    with pytest.raises(InvalidStatus) as caught:
        open_socket(stage)
    assert caught.value.response.status_code == 503
    connection.close()
    stage.check_clean()
    assert ask(open_socket(stage))["type"] == "response.completed"


def frame(opcode: int, payload: bytes, *, is_last: bool = True, is_masked: bool = True) -> bytes:
    """Return a frame with a mask of zeros, or without one."""
    assert len(payload) < 126
    head = bytes((opcode | (0x80 if is_last else 0), len(payload) | (0x80 if is_masked else 0)))
    return head + (b"\0\0\0\0" if is_masked else b"") + payload


@pytest.mark.parametrize(
    "frames",
    [
        frame(0, b"continued"),  # of nothing
        frame(1, b"begun", is_last=False) + frame(1, b"again"),
        frame(1, b"{}", is_masked=False),
        frame(9, b"ping", is_last=False),
        frame(3, b"reserved"),
        bytes((0xC1, 0x82)) + b"\0\0\0\0{}",  # compressed, without an agreement
    ],
)
def test_frames_out_of_order_end_the_connection(stage: Stage, responses: Responses, frames: bytes) -> None:
    with stage.socket() as sock:
        sock.sendall(HANDSHAKE)
        assert read_head(sock).startswith(b"HTTP/1.1 101")
        sock.sendall(frames)
        received = read_to_end(sock)
    assert received[0] == 0x88  # a close frame
    assert struct.unpack(">H", received[2:4])[0] == 1002


def test_frames_before_the_handshake_is_answered_end_the_connection(stage: Stage, responses: Responses) -> None:
    with stage.socket() as sock:
        sock.sendall(HANDSHAKE + frame(1, b"{}"))
        with suppress(ConnectionError):
            assert read_to_end(sock).partition(b"\r\n\r\n")[2] == b""
    stage.check_clean()
    assert responses.bodies == []


def test_cut_connection_stops_its_answer(stage: Stage, responses: Responses, open_socket: OpenSocket) -> None:
    """A cut connection closes the instance's connection, and nothing is left."""
    responses.gate = Gate()
    connection = open_socket(stage)
    send(connection)
    responses.gate.wait_reached()
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.socket.shutdown(socket.SHUT_RDWR)
    stage.until(lambda: stage.outstanding() == 0, "the lease released")
    responses.gate.open()


def test_broken_answer_is_an_error_and_the_connection_goes_on(
    stage: Stage, responses: Responses, open_socket: OpenSocket
) -> None:
    async def break_off(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/event-stream")
        await wire.chunk(event("response.created", response=response(1, "in_progress")))
        wire.reset()

    for fake in stage.instances.values():
        fake.behave = break_off
    connection = open_socket(stage)
    broken = ask(connection)
    for fake in stage.instances.values():
        fake.behave = responses.behave
    assert broken["type"] == "error"
    assert ask(connection)["type"] == "response.completed"


@pytest.mark.parametrize("message", ["[" * 100_000, '{"a": ' * 100_000, "{}", "7"])
def test_odd_message_is_refused_and_the_connection_goes_on(
    stage: Stage, responses: Responses, message: str, open_socket: OpenSocket
) -> None:
    connection = open_socket(stage)
    connection.send(message)
    assert receive(connection)["error"]["type"] == "invalid_request_error"
    assert ask(connection)["type"] == "response.completed"


def test_values_of_messages_are_limited(make_stage: MakeStage, open_socket: OpenSocket) -> None:
    """The values of one message, and of all in progress, are limited, because parsing multiplies their bytes."""
    stage = make_stage(websocket=WebSocketSettings(max_message_values=1_000, max_held_bytes=120_000))
    responses = Responses(stage)
    connection = open_socket(stage)
    refused = ask(connection, input=[{}] * 1_000, stream_id="one")
    assert (refused["error"]["type"], refused["stream_id"]) == ("invalid_request_error", "one")
    assert "JSON values" in refused["error"]["message"]

    responses.gate = Gate()
    many = [{}] * 450
    send(connection, input=many)
    responses.gate.wait_reached()
    other = open_socket(stage)
    busy = ask(other, input=many, stream_id="two")
    assert (busy["status"], busy["error"]["type"], busy["stream_id"]) == (503, "server_error", "two")
    responses.gate.open()
    while receive(connection)["type"] != "response.completed":
        pass
    assert ask(other, input=many)["type"] == "response.completed"


def test_message_that_does_not_arrive_whole_ends_its_connection(make_stage: MakeStage, open_socket: OpenSocket) -> None:
    """The bytes of an incomplete message count for all connections, also if the client keeps answering pings."""
    websocket = WebSocketSettings(ping_interval_s=1_000, idle_timeout_s=1_000)
    stage = make_stage(websocket=websocket, limits=LimitSettings(body_timeout_s=60))
    responses = Responses(stage)
    connection = open_socket(stage)
    responses.gate = Gate()
    send(connection)
    responses.gate.wait_reached()
    connection.socket.sendall(masked(b"x" * 3_000)[:2_000])
    sockets = stage.proxy.data.application.sockets
    stage.until(lambda: sockets.budget.used_bytes > 2_000, "a part of the next message has arrived")
    responses.gate.open()
    while receive(connection)["type"] != "response.completed":
        pass
    stage.pass_time(50)
    stage.pass_time(61)
    closing = closed_inside_a_message(stage, connection).rcvd
    assert (closing.code, closing.reason) == (1008, "The message did not arrive in time.")


def test_pings_between_messages_are_not_counted(stage: Stage, responses: Responses, open_socket: OpenSocket) -> None:
    connection = open_socket(stage)
    for _ in range(20):
        assert connection.ping(b"x" * 125).wait(DEADLINE_S)
    assert stage.proxy.data.application.sockets.budget.used_bytes == 0
    stage.pass_time(61)
    assert ask(connection)["type"] == "response.completed"


@pytest.mark.parametrize(
    "data",
    [
        b'event: a\ndata: {"response": 7}\n\n',
        b'event: a\ndata: {"response": {"status": "completed"\n\n',
        b"data: [DONE]\n\n",
        b": comment\n\nevent: a\n\n",
        b"no event",
    ],
)
def test_odd_answer_is_an_error_and_the_connection_goes_on(
    stage: Stage, responses: Responses, data: bytes, open_socket: OpenSocket
) -> None:
    """An odd answer, such as that of a model without chat, becomes an error, and the connection stays open."""
    connection = open_socket(stage)
    for fake in stage.instances.values():
        fake.behave = streaming([data], "text/event-stream")
    send(connection)
    while '"type": "error"' not in str(connection.recv(timeout=DEADLINE_S)):
        pass
    for fake in stage.instances.values():
        fake.behave = responses.behave
    assert ask(connection)["type"] == "response.completed"


def test_flooding_client_is_held_back(stage: Stage, responses: Responses, open_socket: OpenSocket) -> None:
    """While an answer is written the proxy does not read, so a flooding client's bytes stay in its own socket."""
    responses.gate = Gate()
    connection = open_socket(stage)
    send(connection)
    responses.gate.wait_reached()
    flood = masked(json.dumps({"type": "response.create", "model": "llava", "input": "x" * 60_000}).encode()) * 2_000
    connection.socket.settimeout(1)
    with pytest.raises(TimeoutError):  # all buffers on the way are full
        connection.socket.sendall(flood)
    stage.until(lambda: stage.proxy.data.application.sockets.budget.used_bytes < 2_000_000, "little is held")
    connection.socket.shutdown(socket.SHUT_RDWR)
    responses.gate.open()


def test_client_that_does_not_read_its_events_is_disconnected(make_stage: MakeStage) -> None:
    """A client that does not read is disconnected, after backpressure to the instance."""
    stage = make_stage(timeouts=TimeoutSettings(sweep_interval_s=0.02, stream_idle_timeout_s=60))
    sent: list[int] = []

    async def flood(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/event-stream")
        while True:
            await wire.chunk(event("response.output_text.delta", delta="x" * 60_000))
            sent.append(1)

    for fake in stage.instances.values():
        fake.behave = flood
    with stage.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(HANDSHAKE)
        read_head(sock)
        sock.sendall(masked(b'{"type": "response.create", "model": "llava", "input": "x"}'))
        server = stage.proxy.data.server
        stage.until(
            lambda: sent and any(each.transport.get_write_buffer_size() > 60_000 for each in server.connections),
            "the client's buffers are full",
        )
        stage.pass_time(61)
        stage.until(lambda: not server.connections, "the client is disconnected")


def test_slow_reader_is_not_disconnected_for_a_pong_that_the_proxy_does_not_read(stage: Stage) -> None:
    """While a client does not read its events, the proxy does not read its pong either, so the pong is not late."""
    gate = Gate()

    async def flood(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/event-stream")
        await wire.chunk(event("response.created", response=response(1, "in_progress")))
        await gate.pass_through()
        while True:
            await wire.chunk(event("response.output_text.delta", delta="x" * 60_000))

    for fake in stage.instances.values():
        fake.behave = flood
    server = stage.proxy.data.server
    with stage.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(HANDSHAKE)
        read_head(sock)
        sock.sendall(masked(b'{"type": "response.create", "model": "llava", "input": "x"}'))
        assert b"response.created" in sock.recv(4096)
        stage.pass_time(21)
        assert sock.recv(2) == b"\x89\x00"  # a ping
        gate.open()
        stage.until(
            lambda: any(each.transport.get_write_buffer_size() > 60_000 for each in server.connections),
            "the client's buffers are full",
        )

        stage.pass_time(21)

        assert [each.transport.is_closing() for each in server.connections] == [False]
    stage.until(lambda: not server.connections, "the client has left")


def test_silent_client_is_pinged_and_then_disconnected(stage: Stage, responses: Responses) -> None:
    with stage.socket() as sock:
        sock.sendall(HANDSHAKE)
        read_head(sock)
        stage.pass_time(21)
        assert sock.recv(2) == b"\x89\x00"  # a ping
        stage.pass_time(21)
        stage.until(lambda: not stage.proxy.data.server.connections, "the client is disconnected")


@pytest.mark.parametrize(
    ("setting", "code", "first"),
    [("idle_timeout_s", 1000, None), ("max_lifetime_s", 1001, "websocket_connection_limit_reached")],
)
def test_idle_and_old_connections_are_closed(
    make_stage: MakeStage, setting: str, code: int, first: str | None, open_socket: OpenSocket
) -> None:
    """Idle and old connections are closed, the old ones with the error that clients expect."""
    stage = make_stage(websocket=WebSocketSettings(**{setting: 10.0}))
    Responses(stage)
    connection = open_socket(stage)
    assert ask(connection)["type"] == "response.completed"
    stage.pass_time(11)
    if first is not None:
        assert receive(connection)["error"]["code"] == first
    assert closed(connection).rcvd.code == code


def test_stopping_proxy_closes_between_two_responses(open_socket: OpenSocket) -> None:
    """The running response ends first; a waiting message is not begun."""
    with Stage(timeouts=TimeoutSettings(stop_grace_s=DEADLINE_S)) as stage:
        stop_and_look(stage, open_socket)


def stop_and_look(stage: Stage, open_socket: OpenSocket) -> None:
    responses = Responses(stage)
    responses.gate = Gate()
    idle, busy = open_socket(stage), open_socket(stage)
    send(busy)
    send(busy)
    responses.gate.wait_reached()
    stage.loop.call_soon_threadsafe(stage.stopping.set)
    with pytest.raises(ConnectionClosed) as caught:
        idle.recv(timeout=DEADLINE_S)
    responses.gate.open()

    assert caught.value.rcvd.code == 1001
    assert [receive(busy)["type"] for _ in range(2)] == ["response.created", "response.completed"]
    assert closed(busy).rcvd.code == 1001
    assert len(responses.bodies) == 1


def test_open_connections_are_a_metric(stage: Stage, responses: Responses, open_socket: OpenSocket) -> None:
    """The metric falls when a connection ends, breaks the rules or vanishes; refused connections never count."""

    def count() -> float:
        return value(scrape(stage), "WebSocketConnections", "WebSocketConnections")

    assert count() == 0
    ending, breaking, vanishing = open_socket(stage), open_socket(stage), stage.socket()
    vanishing.sendall(HANDSHAKE)
    read_head(vanishing)
    assert ask(ending)["type"] == "response.completed"
    with pytest.raises(InvalidStatus):
        open_socket(stage, "/v1/conversations")
    assert count() == 3

    ending.close()
    wait_until(lambda: count() == 2, "one has ended")
    breaking.send(b"no text")
    assert closed(breaking).rcvd.code == 1003
    wait_until(lambda: count() == 1, "one is closed")
    vanishing.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
    vanishing.close()
    wait_until(lambda: count() == 0, "none is left")


def test_callers_need_a_token_which_is_checked_for_each_message(make_stage: MakeStage, open_socket: OpenSocket) -> None:
    """A revoked token ends the access of open connections, because it is checked for each message."""
    stage = make_stage(credentials=CREDENTIALS)
    responses = Responses(stage)
    with pytest.raises(InvalidStatus) as caught:
        open_socket(stage)
    assert caught.value.response.status_code == 401
    connection = open_socket(stage, additional_headers={"Authorization": f"Bearer {TOKEN}"})
    assert ask(connection)["type"] == "response.completed"
    assert "x-torchmoor-principal" in responses.headers[0]
    assert "authorization" not in responses.headers[0]

    async def change_tokens() -> None:
        stage.proxy.data.gate.take(Credentials(tokens={"bob": "token-of-bob-0123456789"}))

    stage.run(change_tokens())
    refused = ask(connection)
    assert (refused["status"], refused["error"]["code"]) == (401, "invalid_api_key")


def test_connections_are_encrypted_with_tls(make_stage: MakeStage, tmp_path: Path, open_socket: OpenSocket) -> None:
    """TLS connections carry long messages and end orderly."""
    certificate, key = make_certificate(tmp_path, "tls")
    listen = LISTEN.replace(tls_certificate=str(certificate), tls_key=str(key))
    stage = make_stage(listen=listen, websocket=WebSocketSettings(max_lifetime_s=10.0))
    Responses(stage)
    connection = open_socket(stage, ssl=ssl.create_default_context(cafile=certificate))
    assert ask(connection, input="x" * 1_000_000)["type"] == "response.completed"
    stage.pass_time(11)
    assert receive(connection)["error"]["code"] == "websocket_connection_limit_reached"
    assert closed(connection).rcvd.code == 1001


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/conversations", 400), ("/endpoints/other/openai/v1/responses", 404), ("/ping", 400)]
)
def test_other_paths_are_not_upgraded(stage: Stage, path: str, status: int, open_socket: OpenSocket) -> None:
    with pytest.raises(InvalidStatus) as caught:
        open_socket(stage, path)
    assert caught.value.response.status_code == status


@pytest.mark.parametrize(
    "handshake",
    [
        HANDSHAKE.replace(b"Version: 13", b"Version: 8"),
        HANDSHAKE.replace(b"AAAAAAAA", b""),
        HANDSHAKE.replace(b"websocket\r\n", b"websocket, other\r\n"),
        HANDSHAKE.replace(b"GET", b"POST"),
        HANDSHAKE.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n{}"),
    ],
)
def test_wrong_handshakes_are_refused(stage: Stage, handshake: bytes) -> None:
    with stage.socket() as sock:
        sock.sendall(handshake)
        answer = read_answer(sock, to_end=True)
    assert answer.startswith(b"HTTP/1.1 400 ")  # a 426 would have to name the protocol


def masked(payload: bytes) -> bytes:
    """Return a text frame with a mask of zeros, of any length."""
    if len(payload) < 126:
        return frame(1, payload)
    return bytes((0x81, 0xFF)) + struct.pack(">Q", len(payload)) + b"\0\0\0\0" + payload


def read_head(sock: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\r\n\r\n"):
        piece = sock.recv(1)
        assert piece
        received += piece
    return received


def read_to_end(sock: socket.socket) -> bytes:
    received = b""
    while piece := sock.recv(65_536):
        received += piece
    return received
