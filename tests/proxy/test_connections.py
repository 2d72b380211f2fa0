"""Failing connections: clients and instances that disconnect, stall or are slow."""

import asyncio
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from unittest.mock import patch

import pytest

from tests.certificates import make_certificate
from tests.proxy.conftest import LISTEN, MakeStage, Stage, make_session_id, read_answer
from tests.proxy.fake_instance import Gate, Received, Wire, answering, silent
from tests.waiting import DEADLINE_S, wait_until
from torchmoor.config.limits import LimitSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.http.client_state import has_unsent
from torchmoor.proxy.http.sweeper import LINGER_S
from torchmoor.proxy.instances.instance import InstanceState

CLOCK = "torchmoor.proxy.http.client_connection.monotonic"
POST = b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


def waiting(stage: Stage) -> None:
    stage.until(lambda: stage.a.received or stage.b.received, "the request at an instance")


def closed_upstream(stage: Stage) -> None:
    stage.until(lambda: stage.a.num_open + stage.b.num_open == 0, "the instance's connection closed")
    stage.until(lambda: stage.outstanding() == 0, "the lease released")


def test_client_that_resets_while_waiting_is_passed_on(stage: Stage) -> None:
    """A client's reset closes the instance's connection, so that its work stops, and releases the lease."""
    stage.a.behave = stage.b.behave = silent
    sock = stage.socket()
    sock.sendall(POST)
    waiting(stage)

    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()

    closed_upstream(stage)


def test_client_that_closes_while_waiting_is_passed_on(stage: Stage) -> None:
    """A client's close, which at first looks like a half-close, is detected by the probe."""
    stage.a.behave = stage.b.behave = silent
    sock = stage.socket()
    sock.sendall(POST)
    waiting(stage)

    sock.close()

    closed_upstream(stage)


def test_half_closed_client_still_gets_its_answer(stage: Stage) -> None:
    """A client that closes its sending side gets the answer; only interim answers show that it still reads."""
    gate = Gate()

    async def slow(request: Received, wire: Wire) -> None:
        await gate.pass_through()
        await wire.answer(body=b'"late"')

    stage.a.behave = stage.b.behave = slow
    with stage.socket() as sock:
        sock.sendall(POST)
        gate.wait_reached()
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(65536).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        gate.open()

        answer = read_answer(sock, to_end=True)

    while answer.startswith(b"HTTP/1.1 100"):
        answer = answer.partition(b"\r\n\r\n")[2]
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b'"late"')


def test_client_that_leaves_in_mid_upload_costs_no_instance_anything(stage: Stage) -> None:
    """An unfinished upload reaches no instance, and the proxy drops the received part."""
    sock = stage.socket()
    sock.sendall(b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\nhalf")
    stage.until(lambda: stage.proxy.data.parts.arriving.num_bytes == 4, "the exchange begun")

    sock.close()

    stage.until(lambda: not stage.proxy.data.parts.arriving.num_bytes, "the client's end")
    assert stage.a.received + stage.b.received == []


def test_client_that_leaves_in_mid_stream_is_passed_on(stage: Stage) -> None:
    """A client's disconnect in mid-stream closes the instance's connection while it still generates."""
    gone = threading.Event()

    async def endless(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain")
        try:
            while True:
                await wire.chunk(b"word " * 200)
        finally:
            gone.set()

    stage.a.behave = stage.b.behave = endless
    sock = stage.socket()
    sock.sendall(POST.replace(b"invocations ", b"invocations-response-stream "))
    assert sock.recv(1000).startswith(b"HTTP/1.1 200")

    sock.close()

    assert gone.wait(60)
    closed_upstream(stage)


def test_client_that_leaves_while_connecting_costs_nothing(make_stage: MakeStage) -> None:
    """A client's disconnect cancels a connection attempt to the instance."""
    stage = make_stage(timeouts=TimeoutSettings(connect_timeout_s=30, sweep_interval_s=0.02))
    # An address of the documentation range: packets go nowhere, or are refused at once.
    for name in ("a", "b"):
        stage.instance(name).host = "192.0.2.1"
    sock = stage.socket()
    sock.sendall(POST)
    stage.until(lambda: stage.proxy.data.dispatchers.all()[0].metrics.invocations == 1, "the request taken")

    sock.close()

    stage.until(lambda: not stage.proxy.data.server.connections, "the client's connection forgotten")


def test_slow_reader_holds_the_instance_back(stage: Stage) -> None:
    """For a client that does not read, the proxy buffers a limited amount and loses nothing."""
    num_pieces, piece = 400, bytes(65536)
    progress = [0]

    async def big(request: Received, wire: Wire) -> None:
        await wire.begin_stream("application/octet-stream")
        for _ in range(num_pieces):
            await wire.chunk(piece)
            progress[0] += 1
        await wire.chunk(b"")

    stage.a.behave = stage.b.behave = big
    sock = stage.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    sock.sendall(POST.replace(b"Host: x", b"Host: x\r\nConnection: close"))
    stage.until(lambda: any(c.is_write_paused for c in stage.proxy.data.server.connections), "back-pressure")
    assert progress[0] < num_pieces

    answer = read_answer(sock, to_end=True)
    sock.close()

    assert answer.endswith(b"0\r\n\r\n")
    assert len(answer) > num_pieces * len(piece)
    assert num_pieces == progress[0]


def test_slow_reader_of_a_broken_answer_is_cut_off(stage: Stage) -> None:
    """The connection ends, although the client could send another request once it has read."""

    async def endless(request: Received, wire: Wire) -> None:
        await wire.begin_stream("application/octet-stream")
        while True:
            await wire.chunk(bytes(65536))

    stage.a.behave = stage.b.behave = endless
    with stage.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.sendall(POST)
        stage.until(lambda: any(c.is_write_paused for c in stage.proxy.data.server.connections), "back-pressure")
        stage.set_state(InstanceState.DOWN)
        stage.until(lambda: not stage.proxy.data.server.connections, "the connection ended")
    assert stage.faults == []


def test_reader_that_stops_for_good_is_cut_off(make_stage: MakeStage) -> None:
    """The idle time-out closes the connection of a client that has stopped reading."""
    stage = make_stage(timeouts=TimeoutSettings(stream_idle_timeout_s=0.2, sweep_interval_s=0.02))

    async def endless(request: Received, wire: Wire) -> None:
        await wire.begin_stream("application/octet-stream")
        while True:
            await wire.chunk(bytes(65536))

    stage.a.behave = stage.b.behave = endless
    with stage.socket() as sock:
        sock.sendall(POST.replace(b"invocations ", b"invocations-response-stream "))
        waiting(stage)

        closed_upstream(stage)


def test_slow_instance_does_not_hold_the_upload_back(stage: Stage) -> None:
    """The proxy reads an upload that the instance does not read yet, and notices the client's disconnect."""
    gate = Gate()

    class Unread:
        """An instance that reads nothing before the gate opens."""

        async def serve(self, reader: object, writer: object) -> None:
            writer.transport.pause_reading()
            await gate.pass_through()
            writer.transport.resume_reading()
            await original(reader, writer)

    original = stage.a.serve
    stage.run(stage.b.die())
    stage.run(stage.a.die())
    stage.a.serve = Unread().serve
    stage.run(stage.a.start())
    body = bytes(32 << 20)
    head = b"POST /predictions/llava HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)

    with stage.socket() as leaving, stage.socket() as sock:
        for client in (leaving, sock):
            client.sendall(head + body)
        stage.until(lambda: stage.outstanding() == 2, "both at the instance")
        leaving.close()
        stage.until(lambda: stage.outstanding() == 1, "one client gone")

        gate.open()
        answer = read_answer(sock)

    assert answer.startswith(b"HTTP/1.1 200")
    assert len(body) in [len(each.body) for each in stage.a.received]


def test_connections_to_instances_are_kept_and_reused(stage: Stage) -> None:
    """A hundred consecutive requests need at most one connection per instance."""
    connection = stage.http()

    for _ in range(100):
        connection.request("POST", "/endpoints/llava/invocations", b"{}")
        assert connection.getresponse().read() == b"{}"

    assert (stage.a.num_connections, stage.b.num_connections) == (1, 1)
    assert 50 == len(stage.a.received) == len(stage.b.received)


def test_stale_connection_is_replaced_before_any_byte(stage: Stage) -> None:
    """A pooled connection that the instance has closed is replaced without an error, also for a turn."""
    stage.a.behave = answering()
    session = {"X-Amzn-SageMaker-Session-Id": make_session_id("a")}
    connection = stage.http()
    connection.request("POST", "/endpoints/llava/invocations", b"1", session)
    connection.getresponse().read()

    async def close_at_the_next_request(request: Received, wire: Wire) -> None:
        if request.connection == 1:
            wire.reset()
        else:
            await wire.answer()

    stage.a.behave = close_at_the_next_request
    connection.request("POST", "/endpoints/llava/invocations", b"2", session)
    answer = connection.getresponse()

    assert (answer.status, answer.headers["x-torchmoor-instance"]) == (200, "a")
    assert [(seen.connection, seen.body) for seen in stage.a.received] == [(1, b"1"), (1, b"2"), (2, b"2")]
    assert stage.instance("a").is_ready


@pytest.mark.parametrize(
    "beginning", [b"HTTP/1.1 200 OK\r\nContent", b"HTTP/1.1 100 Continue\r\n\r\n", b"no HTTP\r\n\r\n"]
)
def test_a_turn_whose_answer_has_begun_is_not_sent_again(stage: Stage, beginning: bytes) -> None:
    """A pooled connection that is lost after the first byte of an answer was not stale: the turn may be done."""
    session = {"X-Amzn-SageMaker-Session-Id": make_session_id("a")}
    connection = stage.http()
    connection.request("POST", "/endpoints/llava/invocations", b"1", session)
    connection.getresponse().read()

    async def begin_and_reset(request: Received, wire: Wire) -> None:
        await wire.send(beginning)
        wire.writer.close()

    stage.a.behave = begin_and_reset
    connection.request("POST", "/endpoints/llava/invocations", b"2", session)
    answer = connection.getresponse()

    assert answer.status == 503
    assert [(seen.connection, seen.body) for seen in stage.a.received] == [(1, b"1"), (1, b"2")]


def test_idle_connection_that_the_instance_closes_leaves_the_pool(stage: Stage) -> None:
    async def answer_and_close(request: Received, wire: Wire) -> None:
        await wire.answer()
        wire.writer.close()

    stage.a.behave = stage.b.behave = answer_and_close
    connection = stage.http()

    for _ in range(4):
        connection.request("POST", "/endpoints/llava/invocations", b"{}")
        assert connection.getresponse().read() == b"{}"

    stage.until(lambda: not stage.instance("a").idle and not stage.instance("b").idle, "the pool empty")


def test_unused_connection_is_closed_after_a_while(make_stage: MakeStage) -> None:
    """An idle connection is closed after pool_idle_timeout_s."""
    stage = make_stage(timeouts=TimeoutSettings(pool_idle_timeout_s=0.05, sweep_interval_s=0.02))
    stage.ask("POST", "/endpoints/llava/invocations", b"{}").read()

    stage.until(lambda: stage.a.num_open + stage.b.num_open == 0, "the pooled connection closed")


def test_connection_that_nobody_takes_is_closed(make_stage: MakeStage) -> None:
    """A connection that is established just after its client has left is closed."""
    stage = make_stage(timeouts=TimeoutSettings(pool_idle_timeout_s=0.05, sweep_interval_s=0.02))

    stage.run(stage.proxy.data.server.parts.connector.connect(stage.instance("a")))

    stage.until(lambda: stage.a.num_open == 0, "the connection closed")


@pytest.mark.parametrize(
    "extra",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nOTHER",  # a second answer
        b"garbage",
    ],
)
def test_bytes_after_an_answer_never_reach_the_next_client(stage: Stage, extra: bytes) -> None:
    """A connection with bytes after an answer is closed, so that they never reach the next client."""

    async def chatty(request: Received, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmine" + extra)

    stage.a.behave = stage.b.behave = chatty
    connection = stage.http()

    for _ in range(6):
        connection.request("POST", "/endpoints/llava/invocations", b"{}")
        assert connection.getresponse().read() == b"mine"


def test_trailers_of_an_answer_are_dropped(stage: Stage) -> None:
    """Trailers appear neither in this answer nor in the connection's next one."""

    async def with_trailer(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain")
        await wire.chunk(b"text")
        await wire.send(b"0\r\nX-Evil: 1\r\n\r\n")

    stage.a.behave = stage.b.behave = with_trailer
    connection = stage.http()

    for _ in range(4):
        connection.request("POST", "/endpoints/llava/invocations", b"{}")
        answer = connection.getresponse()
        assert answer.read() == b"text"
        assert "x-evil" not in answer.headers
    assert (stage.a.num_connections, stage.b.num_connections) == (1, 1)


def test_interim_answers_are_not_passed_on(stage: Stage) -> None:
    """100 and 103 from an instance are swallowed, with their fields."""

    async def interim(request: Received, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nX-Early: 1\r\n\r\n")
        await wire.answer()

    stage.a.behave = stage.b.behave = interim
    answer = stage.ask("POST", "/endpoints/llava/invocations", b"{}")

    assert (answer.status, answer.headers["x-early"]) == (200, None)


def test_answer_that_ends_with_its_connection_is_whole(stage: Stage) -> None:
    """Without Content-Length and chunks, the end of the connection ends the body."""

    async def until_close(request: Received, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it")
        wire.writer.close()

    stage.a.behave = stage.b.behave = until_close

    assert stage.ask("POST", "/endpoints/llava/invocations", b"{}").read() == b"all of it"


def test_endless_head_of_an_answer_is_a_lost_connection(stage: Stage) -> None:
    """An endless head of an answer counts as a lost connection, so that the proxy's memory is limited."""

    async def endless(request: Received, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while True:
            await wire.send(b"x" * 65536)

    stage.a.behave = stage.b.behave = endless

    assert stage.ask("POST", "/endpoints/llava/invocations", b"{}").status == 503


def test_answer_before_the_body_has_ended_reaches_the_client(stage: Stage) -> None:
    """An answer before the body's end, such as a refusal, reaches the client, and the rest of the body is dropped."""

    async def refuse_early(reader: object, writer: object) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await Wire(reader, writer).answer(413, {"Connection": "close"}, b"")
        await reader.read()
        writer.close()

    for fake in (stage.a, stage.b):
        stage.run(fake.die())
        fake.serve = refuse_early
        stage.run(fake.start())

    with stage.socket() as sock:
        sock.sendall(
            b"POST /predictions/llava HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n" + bytes(8_000_000)
        )
        answer = read_answer(sock)

    assert answer.startswith(b"HTTP/1.1 413")


def test_too_many_connections_are_refused(make_stage: MakeStage) -> None:
    """A connection beyond the limit gets a 503, with a Retry-After as every 503 has, and is closed."""
    stage = make_stage(limits=LimitSettings(max_connections=1))

    with stage.socket() as first, stage.socket() as second:
        answer = read_answer(second, to_end=True)
        first.sendall(POST)

        assert answer.startswith(b"HTTP/1.1 503")
        assert b"\r\nretry-after: 1\r\n" in answer
        assert read_answer(first).startswith(b"HTTP/1.1 200")


def test_stopping_lets_running_exchanges_end(make_stage: MakeStage) -> None:
    """A stop finishes running answers and closes idle connections at once."""
    gate = Gate()
    with Stage(names=("a",)) as stage:
        stage.a.behave = gate.behave
        with stage.socket() as busy, stage.socket() as idle:
            idle.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_answer(idle).startswith(b"HTTP/1.1 200")  # so that the proxy has accepted it
            busy.sendall(POST)
            gate.wait_reached()
            stage.loop.call_soon_threadsafe(stage.stopping.set)
            assert idle.recv(1) == b""
            gate.open()

            answer = read_answer(busy)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"\r\nconnection: close\r\n" in answer


def test_stopping_cuts_no_answer_that_is_written() -> None:
    """A client that reads its answers late gets them whole before the stop."""
    request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
    with Stage(names=("a",)) as stage, stage.socket() as sock:
        sock.sendall(request)
        num_bytes = len(read_answer(sock))
        sock.sendall(request * 500)
        stage.until(lambda: any(c.is_write_paused for c in stage.proxy.data.server.connections), "answers unread")

        stopping = asyncio.run_coroutine_threadsafe(stage.proxy.data.server.stop(grace_s=DEADLINE_S), stage.loop)
        stage.until(lambda: stage.proxy.data.server.is_stopping, "the proxy stops")
        answers = read_answer(sock, to_end=True)
        sock.close()
        stopping.result(DEADLINE_S)

    assert answers
    assert len(answers) % num_bytes == 0


class SlowClients:
    """Clients of a stage whose answers wait in the proxy, because neither side's system buffers much."""

    def __init__(self, make_stage: MakeStage, folder: Path, *, has_tls: bool, **settings: object) -> None:
        listen, self._context = LISTEN, None
        if has_tls:
            certificate, key = make_certificate(folder, "tls")
            listen = LISTEN.replace(tls_certificate=str(certificate), tls_key=str(key))
            self._context = ssl.create_default_context(cafile=certificate)
        self.stage = make_stage(listen=listen, **settings)
        self.stage.a.behave = self.stage.b.behave = answering(body=bytes(60_000))
        self.server = self.stage.proxy.data.server

    @contextmanager
    def ask(self, more_fields: bytes = b"") -> Iterator[socket.socket]:
        """Send a request, and yield the connection once the proxy has written its answer."""
        with ExitStack() as stack:
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(DEADLINE_S)
            sock.connect(("127.0.0.1", self.stage.proxy.port))
            if self._context is not None:
                sock = stack.enter_context(self._context.wrap_socket(sock, server_hostname="127.0.0.1"))
            sock.sendall(POST[:10])
            self.stage.until(lambda: self.server.connections, "the connection")
            [connection] = self.server.connections
            with socket.socket(fileno=os.dup(connection.transport.get_extra_info("socket").fileno())) as own:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            num_answered = self.num_answered
            sock.sendall(POST[10:-4] + more_fields + POST[-4:])
            self.stage.until(lambda: self.num_answered > num_answered, "the answer written")
            yield sock

    @property
    def num_answered(self) -> int:
        return self.stage.proxy.data.dispatchers.all()[0].metrics.num_sent

    def until_gone(self) -> None:
        self.stage.until(lambda: not self.server.connections, "the connection ended")

    def begin_stop(self) -> Future[None]:
        """Begin to stop the server, which may take as long as it wants."""
        stopping = asyncio.run_coroutine_threadsafe(self.server.stop(grace_s=10 * DEADLINE_S), self.stage.loop)
        self.stage.until(lambda: self.server.is_stopping, "the server stops")
        return stopping


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_closed_connection_has_as_long_as_an_idle_one_for_its_answer(
    make_stage: MakeStage, tmp_path: Path, has_tls: bool
) -> None:
    """A slow client gets its whole answer; one that reads nothing is cut off by the keep-alive time-out.

    A stop does not wait for it as long.
    """
    clients, closing = SlowClients(make_stage, tmp_path, has_tls=has_tls), b"Connection: close\r\n"

    with clients.ask(closing) as slow:
        clients.stage.pass_time(30)
        assert read_answer(slow, to_end=True).endswith(bytes(60_000))
    clients.until_gone()
    with clients.ask(closing):
        clients.stage.pass_time(90)
        clients.until_gone()
    with clients.ask(closing):
        stopping = clients.begin_stop()

        def is_cut_off() -> bool:
            clients.stage.pass_time(10)
            return not clients.server.connections

        wait_until(is_cut_off, "the silent client cut off by the stop")
        stopping.result(DEADLINE_S)


def test_a_closed_connection_has_time_for_its_answer_although_idle_ones_have_little(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    """An operator may close idle connections early."""
    clients = SlowClients(make_stage, tmp_path, has_tls=False, limits=LimitSettings(keep_alive_timeout_s=0.01))

    with clients.ask(b"Connection: close\r\n") as slow:
        clients.stage.pass_time(1)
        assert read_answer(slow, to_end=True).endswith(bytes(60_000))


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("more_fields", [b"", b"Connection: close\r\n"])
@pytest.mark.parametrize("late_s", [0, 2 * LINGER_S])
def test_stopping_cuts_no_answer_that_waits_for_its_client(
    make_stage: MakeStage, tmp_path: Path, has_tls: bool, more_fields: bytes, late_s: float
) -> None:
    """A transport with TLS does not say that bytes wait, however long ago the answer has ended."""
    clients = SlowClients(make_stage, tmp_path, has_tls=has_tls)

    with clients.ask(more_fields) as slow:
        with patch(CLOCK, lambda: monotonic() + late_s):
            stopping = clients.begin_stop()
        assert read_answer(slow, to_end=True).endswith(bytes(60_000))
    stopping.result(DEADLINE_S)


def test_stopping_waits_for_no_client_that_has_its_answer(make_stage: MakeStage, tmp_path: Path) -> None:
    """A connection with TLS ends at once although the client, which does not read, does not close it."""
    clients = SlowClients(make_stage, tmp_path, has_tls=True)

    with clients.ask() as idle:
        assert read_answer(idle).endswith(bytes(60_000))
        [connection] = clients.server.connections
        clients.stage.until(lambda: not has_unsent(connection.transport), "the answer received")
        with patch(CLOCK, lambda: monotonic() + 2 * LINGER_S):
            stopping = clients.begin_stop()
        stopping.result(DEADLINE_S)


def test_stopping_ends_with_its_grace() -> None:
    """An answer that exceeds the grace time is cut, because the platform would kill the process."""
    gate = Gate()

    async def endless(request: Received, wire: Wire) -> None:
        await gate.pass_through()

    with Stage(names=("a",), timeouts=TimeoutSettings(sweep_interval_s=0.02, stop_grace_s=0.05)) as stage:
        stage.a.behave = endless
        with stage.socket() as busy:
            busy.sendall(POST)
            gate.wait_reached()
            stage.loop.call_soon_threadsafe(stage.stopping.set)

            assert busy.recv(1) == b""
            gate.open()
