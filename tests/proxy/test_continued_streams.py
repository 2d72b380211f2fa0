"""Streams whose instance is lost go on at another one, with the real boto3 client or bytes on a socket."""

import json
from http.client import IncompleteRead
from typing import Any

import pytest
import requests
from botocore.exceptions import EventStreamError

from tests.proxy.conftest import MakeStage, ProxyClock, Stage, make_session_id
from tests.proxy.fake_instance import Behaviour, Gate, Received, Wire, answering, dying, refusing, silent
from torchmoor.config.limits import LimitSettings
from torchmoor.config.recovery import RecoverySettings
from torchmoor.config.routing import LateBindingSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.http.exchange import Exchange
from torchmoor.proxy.instances.instance import InstanceState
from torchmoor.proxy.routing.session_failover import rendezvous
from torchmoor.wire import headers
from torchmoor.wire.continuation import MAX_NOTE_BYTES, ContinuationRequest, PieceKind, mark_piece, split_request

BODY = json.dumps({"inputs": "größer", "stream": True}).encode()
WORDS = ("ein ", "größer", "er ", "Satz")
END = PieceKind.END
FAILURE = b'\x1e{"error": {"code": "InternalError", "message": "the engine failed"}}'


def marked(number: int) -> bytes:
    return mark_piece(WORDS[number].encode(), f"{number},", END if number == len(WORDS) - 1 else PieceKind.PART)


def saying(
    first: int,
    last: int = len(WORDS),
    then: bytes | None = None,
    content_type: str = "text/plain; charset=utf-8",
    start: str = "the start",
) -> Behaviour:
    """Return a behaviour that sends some of the words, or with `then` these bytes and a reset."""

    async def behave(request: Received, wire: Wire) -> None:
        is_marked = headers.CONTINUABLE in request.headers
        await wire.begin_stream(content_type, {headers.CONTINUABLE: start} if is_marked else {})
        for number in range(first, last):
            await wire.chunk(marked(number) if is_marked else WORDS[number].encode())
        if then is None:
            await wire.chunk(b"")
            return
        if then:
            await wire.chunk(then)
        wire.reset()

    return behave


def falling_silent(first: int, last: int) -> Behaviour:
    async def behave(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain", {headers.CONTINUABLE: "the start"})
        for number in range(first, last):
            await wire.chunk(marked(number))
        await wire.until_closed()

    return behave


def take_turns(stage: Stage, *behaviours: Behaviour) -> list[tuple[str, Received]]:
    """Set behaviours for requests in their order; return the received requests."""
    left, asked = list(behaviours), []

    def at(name: str) -> Behaviour:
        async def behave(request: Received, wire: Wire) -> None:
            asked.append((name, request))
            await left.pop(0)(request, wire)

        return behave

    for name, fake in stage.instances.items():
        fake.behave = at(name)
    return asked


def stream(stage: Stage, **arguments: Any) -> str:
    answer = stage.client().invoke_endpoint_with_response_stream(
        **{"EndpointName": "llava", "ContentType": "application/json", "Body": BODY, **arguments}
    )
    stage.close_later(answer["Body"])
    assert headers.CONTINUABLE not in answer["ResponseMetadata"]["HTTPHeaders"]
    return b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]).decode()


def counts(stage: Stage) -> tuple[int, int]:
    """Return the number of continued streams and of those that ended with an error."""
    (dispatcher,) = stage.proxy.data.dispatchers.all()
    return dispatcher.metrics.streams_continued, dispatcher.metrics.mid_stream_errors


def refused(stage: Stage) -> int:
    """Return the number of streams that a limit kept from being continued."""
    (dispatcher,) = stage.proxy.data.dispatchers.all()
    return dispatcher.metrics.continuations_refused


@pytest.fixture
def three(make_stage: MakeStage) -> Stage:
    return make_stage(names=("a", "b", "c"), are_journaled=True)


@pytest.mark.parametrize("then", [b"", marked(2)[:4], marked(2)[:-1]], ids=["", "in a mark", "in a piece"])
@pytest.mark.parametrize("session", [None, make_session_id("a")], ids=["stateless", "session"])
def test_a_stream_goes_on_where_it_was_cut(three: Stage, session: str | None, then: bytes) -> None:
    """The second instance gets the request with the notes of the pieces that the client has; nothing is sent twice."""
    asked = take_turns(three, saying(0, 2, then), saying(2))

    assert stream(three, **({"SessionId": session} if session else {})) == "".join(WORDS)

    (first, before), (second, after) = asked
    assert first != second
    assert before.body == BODY
    request, body = split_request(int(after.headers[headers.CONTINUATION]), after.body)
    assert (request, body) == (ContinuationRequest("application/json", "the start", "0,1,"), BODY)
    assert after.headers["content-type"] == "application/octet-stream"
    same = (headers.REQUEST_ID, headers.INVOCATION_ID, headers.CONTINUABLE, headers.ENDPOINT)
    assert [before.headers[name] for name in same] == [after.headers[name] for name in same]
    assert before.headers.get(headers.SESSION_ID) == after.headers.get(headers.SESSION_ID) == session
    assert counts(three) == (1, 0)


def test_the_instance_that_continues_a_stream_knows_tgis_route(three: Stage) -> None:
    """The bytes are those of a stream of one instance."""
    asked = take_turns(three, saying(0, 2, b""), saying(2))

    json_type = {"Content-Type": "application/json"}
    answer = requests.post(f"{three.proxy.runtime_url}/generate_stream", data=BODY, headers=json_type, timeout=60)

    assert answer.content.decode() == "".join(WORDS)
    assert [request.headers[headers.TGI_ROUTE] for _, request in asked] == [headers.GENERATE_STREAM] * 2
    assert headers.CONTINUATION in asked[1][1].headers
    assert counts(three) == (1, 0)


def test_pieces_that_arrive_together_are_one_part(three: Stage) -> None:
    """Pieces that an instance sends together, as when it is behind, become one part."""

    async def say_all_at_once(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain; charset=utf-8", {headers.CONTINUABLE: "the start"})
        await wire.chunk(marked(0) + marked(1) + marked(2))
        await wire.chunk(marked(3))
        await wire.chunk(b"")

    take_turns(three, say_all_at_once)
    answer = three.client().invoke_endpoint_with_response_stream(
        EndpointName="llava", ContentType="application/json", Body=BODY
    )

    parts = [event["PayloadPart"]["Bytes"].decode() for event in answer["Body"]]

    assert "".join(parts) == "".join(WORDS)
    assert parts[0].startswith("".join(WORDS[:3]))


@pytest.mark.parametrize("garbage", [b"no mark\n", b"fffffff \n", b"2000000! \nx", b"x" * (MAX_NOTE_BYTES + 1)])
def test_an_instance_that_breaks_the_form_of_its_pieces_is_lost(three: Stage, garbage: bytes) -> None:
    """An instance that breaks the form of its pieces is abandoned at once, not when it ends or falls silent."""

    async def breaking_off(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain", {headers.CONTINUABLE: "the start"})
        await wire.chunk(marked(0))
        await wire.chunk(garbage)
        await wire.until_closed()

    take_turns(three, breaking_off, saying(1))

    assert stream(three) == "".join(WORDS)
    assert counts(three) == (1, 0)


def test_a_piece_longer_than_what_may_be_kept_passes_on_in_parts(make_stage: MakeStage) -> None:
    """A piece beyond the budget is forwarded in parts; its answer is not continued, and its bytes no longer count."""
    stage = make_stage(limits=LimitSettings(max_continued_bytes=1000))
    long = b"y" * 5000
    half_way = Gate()

    async def behave(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain", {headers.CONTINUABLE: "the start"})
        piece = mark_piece(long, "1,", END)
        await wire.chunk(piece[:3000])
        await half_way.pass_through()
        await wire.chunk(piece[3000:])
        await wire.chunk(b"")

    for fake in stage.instances.values():
        fake.behave = behave
    answer = stage.client().invoke_endpoint_with_response_stream(
        EndpointName="llava", ContentType="application/json", Body=BODY
    )
    events = iter(answer["Body"])
    first = next(events)["PayloadPart"]["Bytes"]
    half_way.open()

    assert 0 < len(first) < 3000
    assert first + b"".join(event["PayloadPart"]["Bytes"] for event in events) == long


def test_a_second_loss_is_survived_and_a_third_is_not(make_stage: MakeStage) -> None:
    """Two losses are survived but not a third, so that a request that crashes instances does not crash all."""
    four = make_stage(names=("a", "b", "c", "d"))
    asked = take_turns(four, saying(0, 1, b""), saying(1, 2, b""), saying(2))
    assert stream(four) == "".join(WORDS)
    assert len({name for name, _ in asked}) == 3
    assert split_request(int(asked[2][1].headers[headers.CONTINUATION]), asked[2][1].body)[0].notes == "0,1,"

    take_turns(four, *(saying(number, number + 1, b"") for number in range(3)))
    with pytest.raises(EventStreamError):
        stream(four)
    four.until(lambda: counts(four) == (4, 1), "the broken stream is counted")
    assert refused(four) == 1


def test_instances_that_are_gone_do_not_count(make_stage: MakeStage) -> None:
    """A stream goes on although most instances are lost at once, as with their host: those never had the request."""
    stage = make_stage(names=("a", "b", "c", "d", "e"), are_journaled=True)
    session, others = make_session_id("a"), [stage.instance(name) for name in "bcde"]
    order = []
    while others:
        order.append(preferred := rendezvous(session, others))
        others.remove(preferred)
    *gone, spared = [each.name for each in order]
    for name in gone:
        stage.run(stage.instances[name].die())
    asked = take_turns(stage, saying(0, 2, b""), saying(2))

    assert stream(stage, SessionId=session) == "".join(WORDS)

    assert [name for name, _ in asked] == ["a", spared]
    assert {name for name in "abcde" if stage.instance(name).state is InstanceState.DOWN} == set(gone)


def test_instances_that_refuse_the_rest_for_now_do_not_count(make_stage: MakeStage) -> None:
    """The rest goes from instance to instance until one has room: those that refuse it have not begun it."""
    stage = make_stage(names=("a", "b", "c", "d", "e"))
    full = (
        refusing(429, "Overloaded", "full"),
        refusing(503, "JournalUnavailable", "down"),
        refusing(503, None, "none"),
    )
    asked = take_turns(stage, saying(0, 2, b""), *full, saying(2))

    assert stream(stage) == "".join(WORDS)

    assert len({name for name, _ in asked}) == 5
    failures = [stage.instance(name).breaker.num_failures for name, _ in asked]
    assert failures == [1, 0, 0, 1, 0]  # the stream's loss, and TorchServe without a worker


def test_a_client_that_leaves_while_its_stream_moves_frees_the_next_instance(three: Stage) -> None:
    """The instance that is to continue gets a cancel operation, as it has not answered yet."""
    asked = take_turns(three, saying(0, 2, b""), silent)
    with three.socket() as client:
        client.sendall(
            b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(BODY), BODY)
        )
        three.until(lambda: len(asked) == 2, "the rest was sent")

    next_name, request = asked[1]
    fake = three.instances[next_name]
    three.until(lambda: fake.cancelled == [request.headers[headers.REQUEST_ID]], "cancelled")


def test_losses_before_and_after_the_beginning_count_together(make_stage: MakeStage) -> None:
    """Losses before and after the first byte count together; after three, no fourth instance gets the request."""
    four = make_stage(names=("a", "b", "c", "d"))

    asked = take_turns(four, dying, saying(0, 1, b""), saying(1))
    assert stream(four) == "".join(WORDS)
    assert len({name for name, _ in asked}) == 3

    asked = take_turns(four, dying, saying(0, 1, b""), saying(1, 2, b""), saying(2))
    with pytest.raises(EventStreamError):
        stream(four)
    assert len(asked) == 3
    assert refused(four) == 1


def test_what_another_instance_refuses_is_tried_once_more_then_broken(three: Stage) -> None:
    """A refused continuation is tried once more; then the stream ends with the error of a lost instance."""
    conflict, other = refusing(409, "TurnConflict", "another prompt"), answering(body=b"a whole answer")
    take_turns(three, saying(0, 2, b""), refusing(429, "Overloaded", "full"), saying(2))
    assert stream(three) == "".join(WORDS)

    asked = take_turns(three, saying(0, 2, b""), conflict, other)
    with pytest.raises(EventStreamError) as caught:
        stream(three)
    assert "StreamBroken" in caught.value.response["Error"]["Message"]
    assert [three.instance(name).breaker.num_failures for name, _ in asked] == [2, 0, 0]  # a failure for each loss


def test_an_end_without_its_mark_is_a_loss(three: Stage) -> None:
    """An orderly end without the last piece is a loss; a reset after the last piece is not."""

    async def ending_early(request: Received, wire: Wire) -> None:
        await saying(0, 2)(request, wire)

    take_turns(three, ending_early, saying(2, len(WORDS), b""))

    assert stream(three) == "".join(WORDS)
    assert counts(three) == (1, 0)


def test_a_failure_that_the_instance_reports_is_shown_if_no_other_goes_on(make_stage: MakeStage) -> None:
    """A failure that a worker reports in the stream's form reaches the client only if no other instance continues."""
    failing = [saying(number, number + 1, mark_piece(FAILURE, "", PieceKind.FAILURE)) for number in range(2)]
    stage = make_stage()
    take_turns(stage, failing[0], saying(1))
    assert stream(stage) == "".join(WORDS)

    for second in (failing[1], refusing(409, "TurnConflict", "another prompt"), refusing(429, "Overloaded", "full")):
        take_turns(stage, failing[0], second)
        with pytest.raises(EventStreamError) as caught:
            stream(stage)
        assert "the engine failed" in caught.value.response["Error"]["Message"]


def test_a_silent_stream_goes_on_elsewhere(make_stage: MakeStage) -> None:
    """A stream whose instance hangs continues elsewhere after stream_idle_timeout_s."""
    stage = make_stage(timeouts=TimeoutSettings(sweep_interval_s=0.02, stream_idle_timeout_s=60))
    take_turns(stage, falling_silent(0, 2), saying(2))
    answer = stage.ask("POST", "/invocations", BODY, {"Content-Type": "application/json"})
    assert answer.read(len("ein größer".encode())).decode() == "ein größer"

    stage.pass_time(61)

    assert answer.read().decode() == "".join(WORDS[2:])


@pytest.mark.parametrize(
    "limits",
    [{"max_continued_bytes": len(BODY) + 3}, {"max_continued_total_bytes": len(BODY)}, {"max_continued_bytes": 0}],
)
def test_a_stream_above_the_limits_ends_as_before(make_stage: MakeStage, limits: dict[str, int]) -> None:
    """Without room for the request and its notes, the client gets the pieces so far and the error."""
    stage = make_stage(limits=LimitSettings(**limits))
    asked = take_turns(stage, saying(0, 2, b""))

    with pytest.raises(EventStreamError):
        stream(stage)

    [(_, request)] = asked
    is_on = limits != {"max_continued_bytes": 0}
    assert (headers.CONTINUABLE in request.headers) is is_on
    stage.until(lambda: counts(stage) == (0, 1), "the broken stream is counted")
    assert refused(stage) == is_on


def test_what_cannot_be_repeated_is_not_continued(make_stage: MakeStage) -> None:
    """A session without a journal, an opening and a form end with the error."""
    stage = make_stage(are_journaled=False)
    for arguments in (
        {"SessionId": make_session_id("a")},
        {"SessionId": "NEW_SESSION"},
        {"ContentType": "application/x-www-form-urlencoded"},
    ):
        asked = take_turns(stage, saying(0, 2, b""))
        with pytest.raises(EventStreamError):
            stream(stage, **arguments)
        assert (headers.CONTINUABLE in asked[0][1].headers) is ("ContentType" in arguments)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/endpoints/llava/invocations", "/invocations"])
def test_pieces_of_other_dialects_go_on_too(make_stage: MakeStage, path: str) -> None:
    """OpenAI's events and plain text are continued, too."""
    stage = make_stage()
    content_type = "text/event-stream" if path.startswith("/v1") else "text/plain"
    take_turns(stage, saying(0, 2, marked(2)[:5], content_type), saying(2, content_type=content_type, start="another"))

    answer = stage.ask("POST", path, BODY, {"Content-Type": "application/json"})

    assert answer.read().decode() == "".join(WORDS)
    assert answer.headers.get(headers.CONTINUABLE) is None


def test_a_stream_of_an_instance_that_is_down_goes_on_elsewhere(make_stage: MakeStage) -> None:
    """If probes find a hanging instance down, its stream continues elsewhere before stream_idle_timeout_s."""
    stage = make_stage()
    asked = take_turns(stage, falling_silent(0, 2), saying(2))
    answer = stage.ask("POST", "/invocations", BODY, {"Content-Type": "application/json"})
    assert answer.read(len("ein größer".encode())).decode() == "ein größer"

    stage.run(report_down(stage, asked[0][0]))

    assert answer.read().decode() == "".join(WORDS[2:])


async def report_down(stage: Stage, name: str) -> None:
    stage.registry.set_state(name, InstanceState.DOWN)


def test_a_continued_stream_makes_room_for_the_next_trial(make_stage: MakeStage) -> None:
    """The rest of a stream as the trial of a half-open breaker ends the trial as soon as the instance sends it."""
    stage = make_stage(recovery=RecoverySettings(max_failures=1, min_open_s=30), are_journaled=True)
    of_a, of_b, gate = make_session_id("a"), make_session_id("b"), Gate()

    async def rest(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain", {headers.CONTINUABLE: "the start"})
        await wire.chunk(marked(2))
        await gate.pass_through()
        await wire.chunk(marked(3))
        await wire.chunk(b"")

    asked = take_turns(stage, dying, answering(), saying(0, 2, b""), rest, answering())
    stage.client().invoke_endpoint(EndpointName="llava", SessionId=of_b, Body=BODY)
    stage.pass_time(31)
    fields = {"Content-Type": "application/json", "X-Amzn-SageMaker-Session-Id": of_a}
    answer = stage.ask("POST", "/endpoints/llava/invocations", BODY, fields)
    assert answer.read(len("".join(WORDS[:3]).encode())).decode() == "".join(WORDS[:3])

    stage.client().invoke_endpoint(EndpointName="llava", SessionId=of_b, Body=BODY)

    gate.open()
    assert answer.read().decode() == WORDS[3]
    assert [name for name, _ in asked] == ["b", "a", "a", "b", "b"]


def test_a_stream_waits_for_room_elsewhere(make_stage: MakeStage) -> None:
    """With late binding, the rest of a stream waits like a request; if the wait is too long, the stream breaks."""
    late = LateBindingSettings(max_waiting=8, max_wait_s=20)
    stage = make_stage(capacity=1, late_binding=late)
    gates = [Gate(), Gate()]

    def after(gate: Gate, then: Behaviour) -> Behaviour:
        async def behave(request: Received, wire: Wire) -> None:
            await gate.pass_through()
            await then(request, wire)

        return behave

    for is_in_time in (True, False):
        take_turns(stage, after(gates[0], answering()), saying(0, 2, b""), saying(2))
        with stage.socket() as busy:
            busy.sendall(b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            gates[0].wait_reached()
            answer = stage.ask("POST", "/invocations", BODY, {"Content-Type": "application/json"})
            stage.until(lambda: stage.proxy.data.dispatchers.all()[0].num_waiting, "the rest waits")
            if is_in_time:
                gates[0].open()
                assert answer.read().decode() == "".join(WORDS)
            else:
                stage.pass_time(30)
                with pytest.raises(IncompleteRead):
                    answer.read()
                assert sum(each.breaker.num_failures for each in stage.registry.instances()) == 2  # one for each loss
                gates[0].open()
            busy.recv(65536)
        gates.pop(0)


def test_the_rest_of_an_old_stream_waits_as_long_as_a_new_request(make_stage: MakeStage) -> None:
    """The time in which the first instance answered counts neither towards the wait's limit nor in the metric."""
    stage = make_stage(capacity=1, late_binding=LateBindingSettings(max_waiting=8, max_wait_s=20))
    busy_gate, stream_gate = Gate(), Gate()

    async def cut_later(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain", {headers.CONTINUABLE: "the start"})
        await wire.chunk(marked(0))
        await stream_gate.pass_through()
        wire.reset()

    take_turns(stage, busy_gate.behave, cut_later, saying(1))
    with stage.socket() as other:
        other.sendall(b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        busy_gate.wait_reached()
        answer = stage.ask("POST", "/invocations", BODY, {"Content-Type": "application/json"})
        stream_gate.wait_reached()
        stage.run(grow_older(stage, 100.0))
        stream_gate.open()
        stage.until(lambda: stage.proxy.data.dispatchers.all()[0].num_waiting, "the rest waits")
        stage.pass_time(15)
        busy_gate.open()
        assert answer.read().decode() == "".join(WORDS)
        other.recv(65536)
    assert stage.proxy.data.dispatchers.all()[0].metrics.queue_latency.sum < 50


def test_the_wait_for_an_instance_is_not_its_silence(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instance that goes on after a wait has the whole time that may pass between two pieces."""
    clock = ProxyClock()
    monkeypatch.setattr("torchmoor.proxy.http.exchange.monotonic", clock)
    stage = make_stage(capacity=1, late_binding=LateBindingSettings(max_waiting=8, max_wait_s=100))
    busy_gate, rest_gate = Gate(), Gate()

    async def go_on_later(request: Received, wire: Wire) -> None:
        await rest_gate.pass_through()
        await saying(2)(request, wire)

    take_turns(stage, busy_gate.behave, saying(0, 2, b""), go_on_later)
    with stage.socket() as other:
        other.sendall(b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        busy_gate.wait_reached()
        answer = stage.ask("POST", "/invocations", BODY, {"Content-Type": "application/json"})
        stage.until(lambda: stage.proxy.data.dispatchers.all()[0].num_waiting, "the rest waits")
        clock.ahead_s = 70.0
        busy_gate.open()
        rest_gate.wait_reached()
        stage.pass_time(70 + 50)
        rest_gate.open()
        assert answer.read().decode() == "".join(WORDS)
        other.recv(65536)


async def grow_older(stage: Stage, seconds: float) -> None:
    """Make the current streams appear to have begun earlier."""
    for connection in stage.proxy.data.server.connections:
        exchange = connection.exchange
        if isinstance(exchange, Exchange) and exchange.is_answered:
            exchange.complete_at -= seconds
            exchange.call.assignment.complete_at -= seconds
