"""HTTP strictness: a malformed request gets one answer, and none of its bytes reach an instance."""

import itertools
import socket
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.proxy.conftest import MakeStage, Stage, read_answer
from tests.proxy.fake_instance import Gate, Received, Wire, answering
from torchmoor.config.limits import LimitSettings
from torchmoor.proxy.http.client_connection import ClientConnection

LINE = b"POST /endpoints/llava/invocations HTTP/1.1\r\n"
HEAD = LINE + b"Host: x\r\n"
GOOD = HEAD + b"Content-Length: 2\r\n\r\n{}"


def refused(answer: bytes, status: int = 400) -> None:
    """Assert that there is one refusal, and then the end of the connection."""
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"connection: close" in answer.lower()
    assert answer.count(b"HTTP/1.1 ") == 1


def connections_of(stage: Stage) -> set[ClientConnection]:
    """Return the clients' connections on the proxy's side."""
    return stage.proxy.data.server.connections


@pytest.fixture(scope="module")
def shared() -> object:
    with Stage() as running:
        running.a.behave = running.b.behave = answering(body=b'"probe"')
        yield running
        running.check_clean()


def test_an_offer_of_http_2_is_ignored(shared: Stage) -> None:
    """Java's client offers HTTP/2 with each request; the proxy ignores it and forwards nothing of it."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n"
    with shared.socket() as sock:
        for _ in range(2):
            sock.sendall(HEAD + offer + b"Content-Length: 2\r\n\r\n{}")
            answer = read_answer(sock)
            assert answer.startswith(b"HTTP/1.1 200 "), answer
    seen = (shared.a.received + shared.b.received)[-1]
    assert seen.body == b"{}"
    assert not {"upgrade", "http2-settings", "connection"} & seen.headers.keys()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n", 400),
        (HEAD + b"Expect: something\r\nContent-Length: 2\r\n\r\n{}", 417),
        (b"POST /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (HEAD + b"".join(b"X%d: a\r\n" % n for n in range(5000)) + b"\r\n", 431),
        (HEAD + b"X: " + b"a" * 20_000, 431),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * 20_000, 431),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;a=" + b"a" * 20_000 + b"\r\n{}\r\n0\r\n\r\n", 431),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"nonsense\r\n\r\n", 400),
    ],
)
def test_bad_request_is_refused_once_and_closes(shared: Stage, request_bytes: bytes, status: int) -> None:
    """A bad request is refused and nothing after it is served. tests/unit/torchmoor/http has each rule."""
    num_before = [len(fake.received) for fake in (shared.a, shared.b)]
    with shared.socket() as sock:
        sock.sendall(request_bytes + (b"" if request_bytes.endswith((b"aa", b"\x03")) else GOOD))
        answer = read_answer(sock, to_end=True)

    refused(answer, status)
    new = [
        seen for fake, before in zip((shared.a, shared.b), num_before, strict=True) for seen in fake.received[before:]
    ]
    assert not any(seen.body for seen in new)


def test_smuggled_request_never_reaches_an_instance(stage: Stage) -> None:
    """CL.TE, TE.CL and TE.TE smuggling in the usual spellings reaches no instance."""
    smuggled = b"GET /predictions/llava/secret HTTP/1.1\r\nHost: x\r\n\r\n"
    attacks = [
        HEAD + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (len(smuggled) + 5) + smuggled,
        HEAD
        + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(smuggled)
        + smuggled
        + b"\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-encoding: x\r\n\r\n0\r\n\r\n" + smuggled,
        HEAD + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + smuggled,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0;\n\r\n\r\n" + smuggled,
    ]
    for attack in attacks:
        with stage.socket() as sock:
            sock.sendall(attack)
            answer = read_answer(sock, to_end=True)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501")), attack

    assert not any("secret" in seen.path for seen in stage.a.received + stage.b.received)


def test_connection_header_cannot_remove_what_the_proxy_adds(stage: Stage) -> None:
    """Headers named by Connection are removed from the client's headers, not from the proxy's."""
    with stage.socket() as sock:
        sock.sendall(
            HEAD + b"Connection: X-Torchmoor-Endpoint, X-Amzn-SageMaker-Session-Id\r\n"
            b"X-Amzn-SageMaker-Session-Id: NEW_SESSION\r\nContent-Length: 2\r\n\r\n{}"
        )
        assert read_answer(sock).startswith(b"HTTP/1.1 200")

    [seen] = stage.a.received + stage.b.received
    assert seen.headers["x-torchmoor-endpoint"] == "llava"
    assert "x-amzn-sagemaker-session-id" not in seen.headers


def test_trailers_of_a_request_are_dropped(stage: Stage) -> None:
    """Trailers reach neither their request nor the next one."""
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Torchmoor-Principal: evil\r\n\r\n"
    with stage.socket() as sock:
        for request in (chunked, GOOD):
            sock.sendall(request)
            assert read_answer(sock).startswith(b"HTTP/1.1 200")

    for seen in stage.a.received + stage.b.received:
        assert seen.body == b"{}"
        assert "x-torchmoor-principal" not in seen.headers


def test_chunked_body_over_the_limit_is_refused(make_stage: MakeStage) -> None:
    """The limit also applies to bodies without a declared length."""
    stage = make_stage(limits=LimitSettings(max_body_bytes=1000))

    with stage.socket() as sock:
        sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            sock.sendall(b"190\r\n" + bytes(400) + b"\r\n")
        answer = read_answer(sock, to_end=True)

    refused(answer)
    assert b"ValidationError" in answer


def test_chunk_extensions_are_dropped(stage: Stage) -> None:
    """A body arrives without its chunk extensions."""
    with stage.socket() as sock:
        sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\n{}\r\n0;c\r\n\r\n")
        assert read_answer(sock).startswith(b"HTTP/1.1 200")

    [seen] = stage.a.received + stage.b.received
    assert seen.body == b"{}"


def test_slow_head_is_timed_out(make_stage: MakeStage) -> None:
    """A slow head gets 408 and the end of the connection, however its bytes arrive."""
    stage = make_stage(limits=LimitSettings(header_timeout_s=30))

    with stage.socket() as sock:
        sock.sendall(b"POST /endpo")
        stage.until(lambda: any(not each.is_idle for each in connections_of(stage)), "the request begun")
        stage.pass_time(31)
        answer = read_answer(sock, to_end=True)

    refused(answer, 408)


def test_silent_connection_is_closed(make_stage: MakeStage) -> None:
    """A connection without a byte is closed without an answer."""
    stage = make_stage(limits=LimitSettings(header_timeout_s=30))

    with stage.socket() as sock:
        stage.until(lambda: connections_of(stage), "the connection")
        stage.pass_time(31)
        assert sock.recv(1) == b""


def test_slow_body_is_timed_out(make_stage: MakeStage) -> None:
    """The instance's connection is closed, too, so that a partial body is never taken for a whole one."""
    stage = make_stage(limits=LimitSettings(body_timeout_s=30))

    with stage.socket() as sock:
        sock.sendall(HEAD + b"Content-Length: 10\r\n\r\nhalf")
        stage.until(lambda: any(each.exchange is not None for each in connections_of(stage)), "the head read")
        stage.pass_time(31)
        answer = read_answer(sock, to_end=True)

    refused(answer, 408)
    assert stage.a.received + stage.b.received == []


def test_idle_connection_is_closed_after_its_time(make_stage: MakeStage) -> None:
    """An idle connection is closed after keep_alive_timeout_s."""
    stage = make_stage(limits=LimitSettings(keep_alive_timeout_s=30))

    with stage.socket() as sock:
        sock.sendall(GOOD)
        assert read_answer(sock).startswith(b"HTTP/1.1 200")
        stage.pass_time(31)
        assert sock.recv(1) == b""


def test_expectation_is_met_before_the_body_comes(stage: Stage) -> None:
    """The client gets 100 Continue and then the answer; the instance does not see the expectation."""
    with stage.socket() as sock:
        sock.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"{}")
        assert read_answer(sock).startswith(b"HTTP/1.1 200")

    [seen] = stage.a.received + stage.b.received
    assert "expect" not in seen.headers


def test_expectation_of_a_refused_request_is_not_met(stage: Stage) -> None:
    """A refused client gets its error before it has sent the body."""
    with stage.socket() as sock:
        sock.sendall(HEAD.replace(b"llava", b"nobody") + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        answer = read_answer(sock, to_end=True)

    refused(answer)


@pytest.mark.parametrize(("path", "status"), [(b"/ping", 200), (b"/predictions/llava", 404), (b"/nothing", 404)])
def test_head_is_answered_without_a_body(stage: Stage, path: bytes, status: int) -> None:
    """HEAD gets an answer without a body, and the connection's next answer is read correctly."""
    with stage.socket() as sock:
        sock.sendall(b"HEAD %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
        sock.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while answer.count(b"\r\n\r\n") < 2:
            answer += sock.recv(65536)

    assert answer.startswith(b"HTTP/1.1 %d" % status)
    lines = answer.partition(b"\r\n\r\n")[2].split(b"\r\n")
    assert lines[1].startswith(b"date: ")
    assert lines[:1] + lines[2:] == [b"HTTP/1.1 200 OK", b"content-length: 0", b"", b""]


def test_keep_alive_serves_many_requests_on_one_connection(stage: Stage) -> None:
    """One connection serves many requests, with heads and bodies cut anywhere."""
    with stage.socket() as sock:
        for cut in range(1, len(GOOD), 7):
            sock.sendall(GOOD[:cut])
            sock.sendall(GOOD[cut:])
            assert read_answer(sock).endswith(b"{}")


def test_connection_close_is_honoured(stage: Stage) -> None:
    with stage.socket() as sock:
        sock.sendall(GOOD.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        answer = read_answer(sock, to_end=True)

    assert b"connection: close" in answer.lower()
    assert answer.endswith(b"{}")


def test_pipelined_request_is_refused_by_closing(stage: Stage) -> None:
    """Only the first of two pipelined requests is answered, and the client may repeat the other."""
    gate = Gate()

    async def slow(request: Received, wire: Wire) -> None:
        await gate.pass_through()
        await wire.answer(body=b'"first"')

    stage.a.behave = stage.b.behave = slow
    with stage.socket() as sock:
        sock.sendall(GOOD + GOOD + GOOD)
        gate.wait_reached()
        gate.open()
        answer = read_answer(sock, to_end=True)

    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer.lower()
    assert len(stage.a.received + stage.b.received) == 1


def test_pipelined_replies_of_the_proxy_come_in_order(stage: Stage) -> None:
    """Pipelined requests that the proxy answers itself are answered in order."""
    with stage.socket() as sock:
        sock.sendall(
            b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n" * 3
            + b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        answer = read_answer(sock, to_end=True)

    statuses = [line.split()[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
    assert statuses == [b"200", b"200", b"200", b"404"]


def test_absolute_target_is_a_path(stage: Stage) -> None:
    """An absolute target is accepted (RFC 9112 3.2.2); its authority is ignored."""
    with stage.socket() as sock:
        sock.sendall(GOOD.replace(b"/endpoints", b"http://elsewhere/endpoints", 1))
        assert read_answer(sock).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("line", "answered"),
    [
        (b"GET http://elsewhere?a=b", b"No operation GET /."),
        (b"GET http://elsewhere", b"No operation GET /."),
        (b"OPTIONS *", b"No operation OPTIONS *."),
    ],
)
def test_targets_without_a_path_are_valid(stage: Stage, line: bytes, answered: bytes) -> None:
    """An absolute target may lack its path (RFC 9112 3.2.2), and OPTIONS may ask about the server (3.2.4)."""
    with stage.socket() as sock:
        sock.sendall(line + b" HTTP/1.1\r\nHost: x\r\n\r\n" + GOOD.replace(b"Host:", b"Connection: close\r\nHost:"))
        answer = read_answer(sock, to_end=True)

    assert answer.startswith(b"HTTP/1.1 404")
    assert answered in answer
    assert b"HTTP/1.1 200" in answer


@pytest.mark.parametrize("line", [b"GET *", b"OPTIONS **", b"GET http://elsewhere#a", b"GET elsewhere:80"])
def test_other_targets_are_refused(stage: Stage, line: bytes) -> None:
    with stage.socket() as sock:
        sock.sendall(line + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(sock, to_end=True).startswith(b"HTTP/1.1 400")


def test_reset_in_every_phase_leaves_nothing_behind(stage: Stage) -> None:
    for cut in range(0, len(GOOD), 5):
        with stage.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(GOOD[:cut])
            stage.until(lambda: connections_of(stage), "the connection")
        stage.until(lambda: not connections_of(stage), "the connection forgotten")


FRAGMENTS = [
    GOOD,
    HEAD,
    b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
    b"2\r\n{}\r\n",
    b"0\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Expect: 100-continue\r\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b"\0",
    b": ",
]
GARBAGE = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=40)), max_size=8).map(b"".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=GARBAGE, cuts=st.lists(st.integers(0, 400), max_size=6))
def test_no_bytes_crash_the_proxy_or_cross_requests(shared: Stage, data: bytes, cuts: list[int]) -> None:
    """After any bytes in any pieces, the connection is answered or closed and the next client is served correctly."""
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    with shared.socket() as sock, shared.socket() as other:
        try:
            for start, end in itertools.pairwise(places):
                sock.sendall(data[start:end])
            sock.shutdown(socket.SHUT_WR)
            answer = read_answer(sock, to_end=True)
        except ConnectionError:
            answer = b""
        other.sendall(GOOD.replace(b"{}", b"ok"))
        other_answer = read_answer(other)

    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert other_answer.startswith(b"HTTP/1.1 200")
    assert other_answer.endswith(b'"probe"')
    assert all(seen.body in (b"{}", b"ok", b"") or seen.body in data for seen in shared.a.received + shared.b.received)


def test_a_connection_of_http10_ends_with_its_answer(stage: Stage) -> None:
    """The connection of an HTTP/1.0 request ends with its answer, which the client reads to the end."""
    with stage.socket() as client:
        client.sendall(b"GET /ping HTTP/1.0\r\n\r\n")

        answer = read_answer(client, to_end=True)

    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(("num_bytes", "status"), [(8192, b"404"), (8193, b"414")])
def test_a_target_has_at_most_8192_bytes(stage: Stage, num_bytes: int, status: bytes) -> None:
    answer = stage.raw(b"GET /" + b"a" * (num_bytes - 1) + b" HTTP/1.1\r\nHost: x\r\n\r\n")

    assert answer.split(b" ", 2)[1] == status
