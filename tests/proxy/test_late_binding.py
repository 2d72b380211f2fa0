"""Late binding over real sockets: which requests wait, their order, and how a wait ends."""

import asyncio
import socket
from time import monotonic

import pytest

from tests.proxy.conftest import MakeStage, Stage, make_session_id, read_answer
from tests.proxy.fake_instance import FakeInstance, Received, Wire, answering, dying, refusing
from torchmoor.config.limits import LimitSettings
from torchmoor.config.routing import LateBindingSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.instances.instance import InstanceState

LATE = LateBindingSettings(max_waiting=8, max_wait_s=20)


class Held:
    """Makes an instance hold its requests until the test releases them one by one, by their bodies."""

    def __init__(self, stage: Stage, *fakes: FakeInstance) -> None:
        self._stage = stage
        self._let_go: dict[bytes, asyncio.Event] = {}
        for fake in fakes:
            fake.behave = self._behave

    async def _behave(self, request: Received, wire: Wire) -> None:
        event = self._let_go.setdefault(request.body, asyncio.Event())
        await event.wait()
        await wire.answer(body=request.body)

    def let_go(self, body: bytes) -> None:
        self._stage.call(lambda: self._let_go.setdefault(body, asyncio.Event()).set())


def send(stage: Stage, body: bytes, *, session: str | None = None, more: str = "") -> socket.socket:
    """Send a request; return once it is at an instance or waiting."""
    before = taken(stage)
    sock = stage.socket()
    stage.close_later(sock)
    line = f"X-Amzn-SageMaker-Session-Id: {session}\r\n" if session else ""
    head = f"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\n{line}{more}Content-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    stage.until(lambda: taken(stage) > before, "the request taken")
    return sock


def taken(stage: Stage) -> int:
    return stage.outstanding() + waiting(stage)


def waiting(stage: Stage) -> int:
    return stage.proxy.data.dispatchers.all()[0].num_waiting


def received(fake: FakeInstance) -> list[bytes]:
    return [request.body for request in fake.received]


def status(sock: socket.socket) -> int:
    return int(read_answer(sock).split(b" ")[1])


def late(make_stage: MakeStage, **options: object) -> Stage:
    """Return two instances that take one request at a time."""
    return make_stage(**{"capacity": 1, "late_binding": LATE, "names": ("a", "b"), **options})


def test_request_waits_and_goes_to_whichever_instance_frees_first(make_stage: MakeStage) -> None:
    """A request goes to the first free instance, not to the one that looked best on arrival."""
    stage = late(make_stage)
    held = Held(stage, stage.a, stage.b)
    socks = {body: send(stage, body) for body in (b"1", b"2", b"3")}
    stage.until(lambda: (received(stage.a), received(stage.b)) == ([b"1"], [b"2"]), "one at each instance")
    assert waiting(stage) == 1

    held.let_go(b"2")
    stage.until(lambda: len(stage.b.received) == 2, "the third at b")

    assert received(stage.b) == [b"2", b"3"]
    assert waiting(stage) == 0
    for body in (b"1", b"3"):
        held.let_go(body)
    assert {status(sock) for sock in socks.values()} == {200}
    assert stage.proxy.data.dispatchers.all()[0].metrics.queue_latency.counts.count(1) == 1


def test_turn_waits_for_its_own_instance_and_blocks_nobody(make_stage: MakeStage) -> None:
    """A later request without a session passes a waiting turn; at its own instance the turn goes first."""
    stage = late(make_stage)
    held = Held(stage, stage.a, stage.b)
    send(stage, b"a1", session=make_session_id("a"))
    send(stage, b"b1", session=make_session_id("b"))
    send(stage, b"new 1")
    send(stage, b"turn", session=make_session_id("a"))
    send(stage, b"new 2")
    assert waiting(stage) == 3

    held.let_go(b"b1")
    stage.until(lambda: len(stage.b.received) == 2, "the first new one at b")
    held.let_go(b"a1")
    stage.until(lambda: len(stage.a.received) == 2, "the turn at a")

    assert (received(stage.a), received(stage.b)) == ([b"a1", b"turn"], [b"b1", b"new 1"])
    for body in (b"new 1", b"turn"):
        held.let_go(body)
    stage.until(lambda: waiting(stage) == 0, "all taken")
    held.let_go(b"new 2")


def test_callers_take_turns(make_stage: MakeStage) -> None:
    """Callers take turns, so three earlier requests of one do not delay another's first."""
    stage = late(make_stage, names=("a",))
    held = Held(stage, stage.a)
    signed = "Authorization: AWS4-HMAC-SHA256 Credential={}/20260101/us-east-1/sagemaker/aws4_request, Signature=x\r\n"
    send(stage, b"0")
    for number in (1, 2, 3):
        send(stage, b"many %d" % number, more=signed.format("MANY"))
    send(stage, b"few", more=signed.format("FEW"))
    send(stage, b"token", more="Authorization: Bearer secret\r\n")

    for body in (b"0", b"many 1", b"few", b"token", b"many 2", b"many 3"):
        held.let_go(body)
        stage.until(lambda body=body: body in received(stage.a), "its turn")

    stage.until(lambda: stage.outstanding() == 0, "all answered")
    assert received(stage.a) == [b"0", b"many 1", b"few", b"token", b"many 2", b"many 3"]


def test_full_queue_is_service_unavailable_at_once(make_stage: MakeStage) -> None:
    """A full queue is counted and refused with Retry-After; waiting requests are not affected."""
    stage = late(make_stage, names=("a",), late_binding=LateBindingSettings(max_waiting=1, max_wait_s=20))
    held = Held(stage, stage.a)
    first, second = send(stage, b"1"), send(stage, b"2")

    refused = stage.raw(b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n3")

    assert refused.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in refused
    assert b"Too many requests wait" in refused
    held.let_go(b"1")
    held.let_go(b"2")
    assert (status(first), status(second)) == (200, 200)
    assert stage.proxy.data.dispatchers.all()[0].metrics.no_capacity == 1


def test_waiting_bytes_are_bounded_too(make_stage: MakeStage) -> None:
    """The bytes of waiting requests are limited; a small request still fits."""
    stage = late(make_stage, names=("a",), limits=LimitSettings(max_waiting_bytes=100_000))
    held = Held(stage, stage.a)
    send(stage, b"1")

    head = b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 100001\r\n\r\n"
    refused = stage.raw(head + b"x" * 100_001)
    small = send(stage, b"2")

    assert refused.startswith(b"HTTP/1.1 503")
    assert stage.proxy.data.dispatchers.waiting_bytes.used_bytes == 1
    held.let_go(b"1")
    held.let_go(b"2")
    assert status(small) == 200


@pytest.mark.parametrize("session", [None, "a"])
def test_wait_ends_with_its_deadline(make_stage: MakeStage, session: str | None) -> None:
    """A wait ends with 503 and Retry-After on a reusable connection, without a request to an instance."""
    stage = late(make_stage, names=("a",))
    held = Held(stage, stage.a)
    send(stage, b"1")

    sock = send(stage, b"2", session=make_session_id(session) if session else None)
    stage.pass_time(LATE.max_wait_s + 1)
    answer = read_answer(sock)

    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after" in answer
    assert b"was free in time" in answer
    assert b"connection: close" not in answer
    stage.until(lambda: waiting(stage) == 0, "its place freed")
    held.let_go(b"1")
    stage.until(lambda: stage.outstanding() == 0, "the first answered")
    assert received(stage.a) == [b"1"]


def test_wait_after_a_failure_is_no_answer_of_that_instance(make_stage: MakeStage) -> None:
    """If no other instance frees in time, the first instance's failure counts, but the refusal is not its answer."""
    stage = late(make_stage)
    held = Held(stage, stage.b)
    stage.a.behave = dying
    send(stage, b"other", session=make_session_id("b"))
    sock = send(stage, b"1")
    stage.until(lambda: waiting(stage) == 1, "the request waits for b")

    stage.pass_time(21)

    assert status(sock) == 503
    assert stage.instance("a").breaker.num_failures == 1
    held.let_go(b"other")


def test_model_timeout_counts_the_wait_as_well(make_stage: MakeStage) -> None:
    """The model's time-out is what the wait has left of the client's."""
    stage = late(make_stage, names=("a",), timeouts=TimeoutSettings(model_timeout_s=30, sweep_interval_s=0.02))
    held = Held(stage, stage.a)

    first, second = send(stage, b"1"), send(stage, b"2")
    stage.pass_time(31)

    assert status(first) == 424
    assert status(second) in (424, 503)
    stage.until(lambda: stage.outstanding() == 0, "both over")
    third, fourth = send(stage, b"3"), send(stage, b"4")
    held.let_go(b"3")
    assert status(third) == 200
    stage.until(lambda: received(stage.a)[-1] == b"4", "the fourth after its wait")
    stage.pass_time(31)
    assert status(fourth) == 424


def test_client_that_leaves_while_it_waits_gives_its_place_up(make_stage: MakeStage) -> None:
    """A waiting request whose client disconnects is removed, and the next one moves up."""
    stage = late(make_stage, names=("a",))
    held = Held(stage, stage.a)
    send(stage, b"1")
    leaving, staying = send(stage, b"2"), send(stage, b"3")

    leaving.close()
    stage.until(lambda: waiting(stage) == 1, "its place free")
    held.let_go(b"1")
    held.let_go(b"3")

    assert status(staying) == 200
    assert received(stage.a) == [b"1", b"3"]


def test_large_body_is_read_while_its_request_waits(make_stage: MakeStage) -> None:
    """A waiting request's body is read whole, so that its client's disconnect is noticed."""
    stage = late(make_stage, names=("a",))
    held = Held(stage, stage.a)
    send(stage, b"1")
    body = bytes(range(256)) * 8192
    sock = send(stage, body)
    assert waiting(stage) == 1

    held.let_go(b"1")
    held.let_go(body)

    answer = read_answer(sock)
    assert answer.endswith(body)
    assert received(stage.a) == [b"1", body]


def test_chunked_body_arrives_before_its_request_waits(make_stage: MakeStage) -> None:
    """A chunked body is read before its request waits, so that the queue knows its length."""
    stage = late(make_stage, names=("a",))
    held = Held(stage, stage.a)
    send(stage, b"1")
    body = bytes(range(256)) * 4096
    with stage.socket() as sock:
        sock.sendall(b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        sock.sendall(b"%x\r\n%b\r\n" % (len(body), body))
        stage.until(lambda: stage.proxy.data.parts.arriving.num_bytes == len(body), "the body there")
        assert waiting(stage) == 0
        sock.sendall(b"0\r\n\r\n")
        stage.until(lambda: waiting(stage) == 1, "the request waiting")
        assert stage.proxy.data.dispatchers.waiting_bytes.used_bytes == len(body)
        held.let_go(b"1")
        held.let_go(body)
        assert read_answer(sock).endswith(body)

    assert received(stage.a) == [b"1", body]


def test_turns_move_on_when_their_instance_goes_down(make_stage: MakeStage) -> None:
    """Turns that wait or run at an instance that goes down move to the one that adopts their session."""
    stage = late(make_stage)
    held = Held(stage, stage.a, stage.b)
    running = send(stage, b"a1")
    send(stage, b"b1")
    session = make_session_id("a")
    socks = [send(stage, b"turn 1", session=session), send(stage, b"turn 2", session=session)]

    stage.set_state(InstanceState.DOWN, "a")
    stage.until(lambda: waiting(stage) == 3, "the running request waiting too")
    for body in (b"b1", b"turn 1", b"turn 2", b"a1"):
        held.let_go(body)

    for sock in socks:
        answer = read_answer(sock)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"invoked-routing-reason: session-failover" in answer
    assert read_answer(running).endswith(b"a1")
    assert received(stage.b) == [b"b1", b"turn 1", b"turn 2", b"a1"]


def test_turns_are_refused_when_nobody_is_left_to_take_them(make_stage: MakeStage) -> None:
    """Turns whose instance is down are refused if there is no other."""
    stage = late(make_stage, names=("a",))
    held = Held(stage, stage.a)
    send(stage, b"1")
    turn = send(stage, b"turn", session=make_session_id("a"))

    stage.set_state(InstanceState.DOWN, "a")

    assert status(turn) == 503
    held.let_go(b"1")


def test_instance_that_becomes_ready_takes_what_waits(make_stage: MakeStage) -> None:
    """A new ready instance gets waiting requests without the end of another request."""
    stage = late(make_stage)
    held = Held(stage, stage.a, stage.b)
    stage.set_state(InstanceState.DOWN, "b")
    send(stage, b"1")
    sock = send(stage, b"2")
    assert waiting(stage) == 1

    stage.set_state(InstanceState.READY, "b")
    held.let_go(b"2")

    assert status(sock) == 200
    assert received(stage.b) == [b"2"]
    held.let_go(b"1")


def test_draining_instance_serves_its_turns_and_nothing_else(make_stage: MakeStage) -> None:
    stage = late(make_stage)
    held = Held(stage, stage.a, stage.b)
    send(stage, b"a1")
    send(stage, b"b1")
    turn, new = send(stage, b"turn", session=make_session_id("a")), send(stage, b"new")

    stage.set_state(InstanceState.DRAINING, "a")
    for body in (b"a1", b"turn"):
        held.let_go(body)
    assert status(turn) == 200
    assert waiting(stage) == 1
    held.let_go(b"b1")
    held.let_go(b"new")

    assert status(new) == 200
    assert (received(stage.a), received(stage.b)) == ([b"a1", b"turn"], [b"b1", b"new"])


def test_request_whose_instance_cannot_take_it_waits_for_another(make_stage: MakeStage) -> None:
    """A retry waits like every other request, with its whole body, and never for the instance that failed it."""
    stage = late(make_stage)
    held = Held(stage, stage.b)
    stage.a.behave = refusing(503, None, "no worker")
    stage.set_state(InstanceState.DOWN, "a")
    send(stage, b"b1")
    stage.set_state(InstanceState.READY, "a")

    sock = send(stage, b"body" * 1000)
    stage.until(lambda: len(stage.a.received) == 1 and waiting(stage) == 1, "refused by a, waiting for b")
    stage.a.behave = answering()
    held.let_go(b"b1")
    held.let_go(b"body" * 1000)

    assert status(sock) == 200
    assert received(stage.b) == [b"b1", b"body" * 1000]
    assert len(stage.a.received) == 1


def test_request_to_an_instance_that_died_waits_for_another(make_stage: MakeStage) -> None:
    """After a refused connection the instance is down and its capacity gone; the request waits for another one."""
    stage = late(make_stage)
    held = Held(stage, stage.b)
    stage.set_state(InstanceState.DOWN, "a")
    send(stage, b"b1")
    stage.run(stage.a.die())
    stage.set_state(InstanceState.READY, "a")

    sock = send(stage, b"body" * 1000)
    stage.until(lambda: not stage.instance("a").is_ready and waiting(stage) == 1, "a found dead")
    held.let_go(b"b1")
    held.let_go(b"body" * 1000)

    assert status(sock) == 200
    assert stage.instance("a").outstanding == 0


def test_no_ready_instance_is_refused_at_once(make_stage: MakeStage) -> None:
    """Without a ready instance a request is refused at once, since none is likely to be ready in time."""
    stage = late(make_stage)
    for name in ("a", "b"):
        stage.set_state(InstanceState.DOWN, name)

    for session in (None, make_session_id("a")):
        line = f"X-Amzn-SageMaker-Session-Id: {session}\r\n" if session else ""
        head = f"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\n{line}Content-Length: 1\r\n\r\nx"
        answer = stage.raw(head.encode())
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"No instance of the endpoint is ready" in answer


def test_instance_that_is_removed_lets_its_turns_go(make_stage: MakeStage) -> None:
    """Turns of a removed instance are released, and so are the leases of its running requests at their ends."""
    stage = late(make_stage)
    held = Held(stage, stage.a, stage.b)
    first = send(stage, b"a1")
    turn = send(stage, b"turn", session=make_session_id("a"))

    stage.call(stage.registry.remove, "a")
    stage.until(lambda: received(stage.b) == [b"turn"], "the turn at b")
    held.let_go(b"turn")
    held.let_go(b"a1")

    assert (status(turn), status(first)) == (200, 200)


def test_streams_hold_their_place_until_their_end(make_stage: MakeStage) -> None:
    """A stream occupies its instance until its last byte, not only until the first."""
    stage = late(make_stage, names=("a",))
    go_on = asyncio.Event()

    async def stream(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain")
        await wire.chunk(b"first")
        await go_on.wait()
        await wire.chunk(b"")

    stage.a.behave = stream
    client = stage.client()
    answer = client.invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"1")
    events = iter(answer["Body"])
    assert next(events)["PayloadPart"]["Bytes"] == b"first"
    stage.a.behave = answering()
    second = send(stage, b"2")
    assert waiting(stage) == 1

    stage.call(go_on.set)

    assert list(events) == []
    assert status(second) == 200


@pytest.mark.parametrize(("waited_s", "num_failures"), [(20, 1), (40, 0)])
def test_a_time_out_after_a_long_wait_is_not_the_instances_failure(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, waited_s: float, num_failures: int
) -> None:
    """An instance that had less than half of the time for its answer is not taken out for the missing rest."""
    stage = late(make_stage, names=("a",))
    held = Held(stage, stage.a)
    first, second = send(stage, b"first"), send(stage, b"second")
    monkeypatch.setattr("torchmoor.proxy.dispatch.assignment.monotonic", lambda: monotonic() + waited_s)

    held.let_go(b"first")
    stage.until(lambda: received(stage.a) == [b"first", b"second"], "the second at the instance")
    stage.pass_time(stage.settings.timeouts.model_timeout_s + 1)

    assert [status(first), status(second)] == [200, 424]
    assert stage.instance("a").breaker.num_failures == num_failures
