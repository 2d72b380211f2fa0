"""Instances that die, hang, fail or are drained: the outcome for their requests and sessions, over real sockets."""

import asyncio
import json
import socket

import pytest

from tests.proxy.conftest import CHUNKS_END, MakeStage, Stage, instance_of, make_session_id, read_answer, read_until
from tests.proxy.fake_instance import Behaviour, FakeInstance, Gate, Received, Wire, answering, dying, refusing, silent
from torchmoor.config.health import HealthSettings
from torchmoor.config.recovery import RecoverySettings
from torchmoor.config.routing import VariantSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.fleet.health import MAX_TRIES
from torchmoor.proxy.instances.breaker import BreakerState
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.routing.session_failover import place_of

OFTEN = HealthSettings(starting_interval_s=0.02, ready_interval_s=0.05, probe_timeout_s=10.0)
# Silence counts after the same 1.5 s as usual, but only a long series of late answers looks like it.
SILENCE = OFTEN.replace(probe_timeout_s=0.15, unanswered_before_down=10)


def hang(stage: Stage, fake: FakeInstance, behave: Behaviour = silent) -> None:
    """Make the instance answer neither requests nor probes."""
    fake.behave = behave
    stage.instance(fake.name).management_port = fake.port


def invoke(stage: Stage, *, session: str | None = None, stream: bool = False) -> socket.socket:
    """Send a request whose answer is read later."""
    sock = stage.socket()
    stage.close_later(sock)
    line = f"X-Amzn-SageMaker-Session-Id: {session}\r\n" if session else ""
    path = "invocations-response-stream" if stream else "invocations"
    sock.sendall(f"POST /endpoints/llava/{path} HTTP/1.1\r\nHost: x\r\n{line}Content-Length: 2\r\n\r\n{{}}".encode())
    return sock


def test_requests_of_an_instance_that_hangs_go_elsewhere(make_stage: MakeStage) -> None:
    """Requests at a hanging instance move once its probes go unanswered, before their own time-outs."""
    stage = make_stage(health=SILENCE, are_journaled=True)
    hang(stage, stage.a)

    answer = read_answer(invoke(stage, session=make_session_id("a")))

    assert instance_of(answer) == "b"
    assert b"session-failover" in answer
    assert stage.instance("a").state is InstanceState.DOWN
    stage.instance("a").management_port = None


def test_stream_of_an_instance_that_hangs_ends_with_an_error(make_stage: MakeStage) -> None:
    """A client that has received bytes gets the error as soon as its instance is found to hang."""
    stage = make_stage(health=SILENCE, are_journaled=True)

    async def half(request: Received, wire: Wire) -> None:
        if request.path.startswith("/models"):
            await wire.until_closed()
        await wire.begin_stream("text/plain")
        await wire.chunk(b"The ")
        await wire.until_closed()

    stage.a.behave = half
    sock = invoke(stage, session=make_session_id("a"), stream=True)
    stage.until(lambda: stage.a.received, "the request at the instance")
    hang(stage, stage.a, half)
    answer = read_until(sock, b"ModelStreamError")

    assert instance_of(answer) == "a"
    assert [r for r in stage.b.received if r.path.startswith("/predictions")] == []
    stage.instance("a").management_port = None


def test_stream_of_a_busy_instance_is_not_cut_off(make_stage: MakeStage) -> None:
    """An instance that streams without answering probes is slow, and its stream continues."""
    stage = make_stage(health=SILENCE, are_journaled=True)
    num_probes = 0

    async def busy(request: Received, wire: Wire) -> None:
        nonlocal num_probes
        if request.path.startswith("/models"):
            num_probes += 1
            await wire.until_closed()
            return
        await wire.begin_stream("text/plain")
        while num_probes < 2 * SILENCE.unanswered_before_down:
            await wire.chunk(b"on and ")
            await asyncio.sleep(0.01)
        await wire.chunk(b"on.")
        await wire.chunk(b"")

    stage.a.behave = busy
    sock = invoke(stage, session=make_session_id("a"), stream=True)
    stage.until(lambda: stage.a.received, "the request at the instance")
    hang(stage, stage.a, busy)
    answer = read_until(sock, CHUNKS_END)

    assert instance_of(answer) == "a"
    assert b"on." in answer
    assert b"ModelStreamError" not in answer
    stage.instance("a").management_port = None


def test_reset_makes_the_proxy_ask_the_instance_at_once(make_stage: MakeStage) -> None:
    """After a reset the proxy probes the instance at once instead of at the next interval."""
    stage = make_stage(are_journaled=True)

    async def worker_gone(request: Received, wire: Wire) -> None:
        if request.path.startswith("/models"):
            await wire.answer(body=b'[{"workers": [{"status": "UNLOADING"}]}]')
        else:
            wire.reset()

    hang(stage, stage.a, worker_gone)

    assert instance_of(read_answer(invoke(stage, session=make_session_id("a")))) == "b"

    stage.until(lambda: stage.instance("a").state is InstanceState.DOWN, "the verdict of a probe")
    stage.instance("a").management_port = None


@pytest.mark.parametrize("has_session", [False, True])
@pytest.mark.parametrize("num_lost", [2, 3])
def test_a_request_survives_the_loss_of_two_instances(
    make_stage: MakeStage, num_lost: int, *, has_session: bool
) -> None:
    """After two losses a third instance answers; after three, the request may be the cause and is not sent again."""
    stage = make_stage(names=("a", "b", "c", "d"), are_journaled=True)
    num_left = num_lost

    async def die_at_first(request: Received, wire: Wire) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left >= 0:
            wire.reset()
        else:
            await wire.answer()

    for fake in stage.instances.values():
        fake.behave = die_at_first

    answer = read_answer(invoke(stage, session=make_session_id("a") if has_session else None))

    received = [r for fake in stage.instances.values() for r in fake.received if r.path.startswith("/predictions")]
    assert len(received) == 3
    if num_lost == 2:
        instance_of(answer)
    else:
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"The instance that was to answer is gone." in answer


@pytest.mark.parametrize("status", [500, 507])
def test_a_request_that_kills_workers_kills_three_at_most(make_stage: MakeStage, status: int) -> None:
    """TorchServe answers for a dead worker; the third such answer of a request reaches the client."""
    stage = make_stage(names=("a", "b", "c", "d", "e"))
    for fake in stage.instances.values():
        fake.behave = refusing(status, None, "Worker died.")

    answer = read_answer(invoke(stage))

    received = [r for fake in stage.instances.values() for r in fake.received if r.path.startswith("/predictions")]
    assert len(received) == 3
    assert answer.startswith(b"HTTP/1.1 424" if status == 500 else b"HTTP/1.1 503")


def test_instance_that_fails_requests_gets_no_more(make_stage: MakeStage) -> None:
    """After consecutive failures an instance with good probes gets no requests for a while, then a trial."""
    recovery = RecoverySettings(max_failures=2, min_open_s=30, slow_start_s=30)
    stage = make_stage(health=OFTEN, recovery=recovery, are_journaled=True)
    stage.a.behave = dying
    session = make_session_id("a")
    for _ in range(2):
        assert instance_of(read_answer(invoke(stage, session=session))) == "b"
    assert stage.instance("a").breaker.state is BreakerState.OPEN
    row = stage.admin("/instances").json()["instances"][0]
    assert (row["breaker"], row["failures_in_a_row"]) == ("open", 2)
    num_tried = len(stage.a.received)

    assert instance_of(read_answer(invoke(stage, session=session))) == "b"

    assert len(stage.a.received) == num_tried
    stage.a.behave = answering()
    stage.pass_time(31)
    assert stage.instance("a").breaker.state is BreakerState.HALF_OPEN
    assert instance_of(read_answer(invoke(stage, session=session))) == "a"
    assert stage.instance("a").breaker.state is BreakerState.CLOSED
    assert stage.instance("a").share < 1.0
    stage.pass_time(31)
    assert stage.instance("a").share == 1.0


def test_a_trial_that_streams_makes_room_for_the_next(make_stage: MakeStage) -> None:
    """A long stream does not keep requests from an instance that answers again: the trial ends with its first piece."""
    stage = make_stage(recovery=RecoverySettings(max_failures=1, min_open_s=30), are_journaled=True)
    stage.a.behave = dying
    session, gate, end = make_session_id("a"), Gate(), Gate()
    assert instance_of(read_answer(invoke(stage, session=session))) == "b"

    async def long(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain")
        await gate.pass_through()
        await wire.chunk(b"on and on")
        await end.pass_through()
        await wire.chunk(b"")

    stage.a.behave = long
    stage.pass_time(31)
    trial = invoke(stage, session=session, stream=True)
    gate.wait_reached()
    assert instance_of(read_answer(invoke(stage, session=session))) == "b"
    gate.open()
    read_until(trial, b"on and on")
    stage.a.behave = answering()

    assert instance_of(read_answer(invoke(stage, session=session))) == "a"
    assert stage.instance("a").breaker.state is BreakerState.CLOSED
    end.open()
    read_until(trial, CHUNKS_END.lstrip())


def test_timeouts_open_the_breaker(make_stage: MakeStage) -> None:
    """Time-outs of a hanging worker behind a healthy TorchServe open the breaker."""
    stage = make_stage(
        recovery=RecoverySettings(max_failures=1),
        timeouts=TimeoutSettings(model_timeout_s=30, sweep_interval_s=0.02),
    )
    stage.a.behave = stage.b.behave = silent

    sock = invoke(stage, session=make_session_id("a"))
    stage.until(lambda: stage.a.received, "the request at the instance")
    stage.pass_time(31)
    read_answer(sock)

    assert stage.instance("a").breaker.state is BreakerState.OPEN
    assert stage.instance("b").breaker.num_failures == 0


def test_a_stream_that_takes_all_its_time_is_not_the_instances_failure(make_stage: MakeStage) -> None:
    """The client gets the error; only silence counts against the instance."""
    timeouts = TimeoutSettings(stream_total_timeout_s=30, stream_idle_timeout_s=60, sweep_interval_s=0.02)
    stage = make_stage(recovery=RecoverySettings(max_failures=1), timeouts=timeouts)

    async def long(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain")
        await wire.chunk(b"on and on")
        await wire.until_closed()

    stage.a.behave = stage.b.behave = long
    sock = invoke(stage, session=make_session_id("a"), stream=True)
    read_until(sock, b"on and on")
    stage.pass_time(31)
    answer = read_until(sock, CHUNKS_END)

    assert b"ModelStreamError" in answer
    assert (stage.instance("a").breaker.state, stage.instance("a").breaker.num_failures) == (BreakerState.CLOSED, 0)


def test_errors_of_the_handler_are_answers(make_stage: MakeStage) -> None:
    """A handler's errors do not count as failures, so that bad requests do not cut off an instance."""
    stage = make_stage(recovery=RecoverySettings(max_failures=1))
    stage.a.behave = stage.b.behave = refusing(500, "InternalError", "the model's own fault")

    assert read_answer(invoke(stage)).startswith(b"HTTP/1.1 424")

    assert [stage.instance(name).breaker.num_failures for name in "ab"] == [0, 0]


def test_retries_have_a_budget(make_stage: MakeStage) -> None:
    """After too many retries, the next request gets the first instance's refusal."""
    stage = make_stage(recovery=RecoverySettings(retry_burst=1, retry_fraction=0.001, max_failures=99))
    stage.a.behave = stage.b.behave = refusing(429, "Overloaded", "full")

    for num_asked in (2, 3):
        assert read_answer(invoke(stage)).startswith(b"HTTP/1.1 503")
        assert len(stage.a.received + stage.b.received) == num_asked

    metrics = stage.proxy.data.dispatchers.all()[0].metrics
    assert (metrics.retries, metrics.retries_refused) == (1, 2)


def test_a_loss_without_another_instance_costs_no_budget(make_stage: MakeStage) -> None:
    """Of two losses only the first uses the budget, because the second leaves no instance for a retry."""
    recovery = RecoverySettings(retry_burst=2, retry_fraction=0.001, max_failures=99)
    stage = make_stage(are_journaled=True, recovery=recovery)
    stage.a.behave = stage.b.behave = dying

    assert read_answer(invoke(stage)).startswith(b"HTTP/1.1 503")

    retries = stage.proxy.data.dispatchers.all()[0].retries
    assert [retries.try_take(1) for _ in range(2)] == [True, False]


def test_each_variant_has_its_own_budget(make_stage: MakeStage) -> None:
    """A turn with its id in the body counts for the variant drawn first, and its retry for its session's variant."""
    stage = make_stage(
        names=("a", "b", "c"),
        homes={"a": "drawn", "b": "home", "c": "home"},
        variants=(VariantSettings(name="drawn", model="llava"), VariantSettings(name="home", model="llava", weight=0)),
        are_journaled=True,
        recovery=RecoverySettings(retry_burst=4, max_failures=99),
    )
    session = make_session_id("b")
    for _ in range(40):
        assert read_answer(invoke(stage, session=session)).startswith(b"HTTP/1.1 200")
    stage.b.behave = dying
    assert read_answer(invoke(stage, session=session)).startswith(b"HTTP/1.1 200")

    assert stage.ask("POST", "/endpoints/llava/invocations", json.dumps({"session_id": session})).status == 200

    drawn, home = stage.proxy.data.dispatchers.all()
    assert (drawn.metrics.invocations, drawn.metrics.retries, home.metrics.retries) == (1, 1, 1)


def test_refused_connections_cost_no_budget(make_stage: MakeStage) -> None:
    """Refused connections do not use the budget, because nothing was sent."""
    stage = make_stage(are_journaled=True, recovery=RecoverySettings(retry_burst=1, retry_fraction=0.001))
    stage.proxy.data.dispatchers.all()[0].retries.try_take(0)
    stage.run(stage.a.die())

    assert instance_of(read_answer(invoke(stage, session=make_session_id("a")))) == "b"


def test_drained_instance_hands_its_sessions_over(make_stage: MakeStage) -> None:
    """With a journal running requests end there, the next turn goes elsewhere, and after a resume it returns."""
    stage = make_stage(are_journaled=True, health=OFTEN, recovery=RecoverySettings(slow_start_s=30))
    session = make_session_id("a")
    gate = Gate()
    stage.a.behave = gate.behave
    running = invoke(stage, session=session)
    gate.wait_reached()

    assert stage.admin("/instances/a/drain", "POST").json() == {"name": "a", "state": "draining", "outstanding": 1}

    assert instance_of(read_answer(invoke(stage, session=session))) == "b"
    assert instance_of(read_answer(invoke(stage))) == "b"
    gate.open()
    assert instance_of(read_answer(running)) == "a"
    assert stage.admin("/instances/a/resume", "POST").status_code == 200
    stage.pass_time(30)
    stage.until(lambda: stage.instance("a").is_ready and stage.instance("a").share == 1.0, "its return")
    assert instance_of(read_answer(invoke(stage, session=session))) == "a"


def test_drained_instance_keeps_its_sessions_without_a_journal(stage: Stage) -> None:
    """Without a journal a drained instance keeps its sessions, because no other instance knows them."""
    assert stage.admin("/instances/a/drain", "POST").status_code == 200

    assert instance_of(read_answer(invoke(stage, session=make_session_id("a")))) == "a"
    assert instance_of(read_answer(invoke(stage))) == "b"


def test_last_instance_serves_its_sessions_while_it_drains(make_stage: MakeStage) -> None:
    stage = make_stage(are_journaled=True, names=("a",))
    assert stage.admin("/instances/a/drain", "POST").status_code == 200

    assert instance_of(read_answer(invoke(stage, session=make_session_id("a")))) == "a"
    assert b"\r\nretry-after: 5\r\n" in read_answer(invoke(stage)).lower()


def test_drains_that_make_no_sense_are_refused(stage: Stage) -> None:
    """The proxy refuses to drain an unknown instance, and to resume one that does not drain."""
    assert stage.admin("/instances/x/drain", "POST").status_code == 404
    assert stage.admin("/instances/x/resume", "POST").status_code == 404
    assert stage.admin("/instances/a/resume", "POST").status_code == 409


def test_drain_outlives_the_instance_and_ends_by_word_only(make_stage: MakeStage) -> None:
    """A drained instance is probed, and returns drained under its name after being down, until it is resumed."""
    stage = make_stage(health=OFTEN)

    async def start_again() -> None:
        await stage.a.start()
        old = stage.instance("a")
        stage.registry.add(Instance(name="a", endpoint="llava", model="llava", port=old.port))

    assert stage.admin("/instances/a/drain", "POST").status_code == 200
    stage.run(stage.a.die())
    stage.until(lambda: stage.instance("a").state is InstanceState.DOWN, "the probe that finds it gone")
    stage.run(start_again())
    stage.until(lambda: stage.instance("a").state is InstanceState.DRAINING, "its return")

    assert instance_of(read_answer(invoke(stage))) == "b"
    assert stage.admin("/instances/a/resume", "POST").json() == {"name": "a", "state": "ready", "outstanding": 0}
    assert stage.instance("a").is_ready


def test_instance_that_is_down_can_be_drained_before_it_comes_back(make_stage: MakeStage) -> None:
    stage = make_stage(health=OFTEN)
    stage.run(stage.a.die())
    stage.until(lambda: stage.instance("a").state is InstanceState.DOWN, "the probe that finds it gone")

    assert stage.admin("/instances/a/drain", "POST").json() == {"name": "a", "state": "down", "outstanding": 0}

    stage.run(stage.a.start())
    stage.until(lambda: stage.instance("a").state is InstanceState.DRAINING, "its return")


def test_worker_that_hangs_is_found_and_comes_back(make_stage: MakeStage) -> None:
    """A hanging worker is found by its status operation, which it has answered before, although its probes are good."""
    stage = make_stage(health=OFTEN.replace(worker_timeout_s=0.2))
    status = answering(body=b'{"instance": "a", "sessions": {}}')
    seen: list[Received] = []

    async def answer(request: Received, wire: Wire) -> None:
        seen.append(request)
        await status(request, wire)

    async def answer_in_pieces(request: Received, wire: Wire) -> None:
        seen.append(request)
        await wire.begin_stream("application/json")
        for piece in (b'{"inst', b'ance": "a"', b"}"):
            await wire.chunk(piece)
            await asyncio.sleep(0)
        await wire.chunk(b"")

    async def fill_up(request: Received, wire: Wire) -> None:
        """Act as TorchServe with a full queue."""
        seen.append(request)
        await wire.answer(503)

    stage.a.on_status = answer_in_pieces  # b knows no status, so it never counts as hanging
    stage.until(lambda: len(seen) > MAX_TRIES, "a question that only a worker gets that has answered before")
    assert (seen[0].method, seen[0].path) == ("POST", "/predictions/llava")

    stage.a.on_status = silent
    stage.until(lambda: stage.instance("a").state is InstanceState.DOWN, "the silence is noticed")
    assert instance_of(read_answer(invoke(stage))) == "b"
    stage.a.on_status = fill_up
    num_seen = len(seen)
    stage.until(lambda: len(seen) > num_seen + 1, "more questions")
    assert stage.instance("a").state is InstanceState.DOWN
    stage.a.on_status = answer
    stage.until(lambda: stage.instance("a").is_ready, "its return")


def test_model_that_knows_no_status_is_asked_a_few_times_only(make_stage: MakeStage) -> None:
    """A model without the status operation is asked a few times only, because it may compute an answer each time."""
    stage = make_stage(health=OFTEN)
    asked: list[Received] = []

    async def refuse(request: Received, wire: Wire) -> None:
        asked.append(request)
        await wire.answer(500)

    stage.a.on_status = stage.b.on_status = refuse
    stage.until(lambda: min(stage.a.num_pings, stage.b.num_pings) > 3 * MAX_TRIES, "many probes")

    assert len(asked) <= 2 * MAX_TRIES
    assert stage.instance("a").is_ready
    assert stage.instance("b").is_ready


def test_page_of_elsewhere_cannot_drain(stage: Stage) -> None:
    """A page of another site cannot drain, although a browser would send the operator's password with its request."""
    assert stage.admin("/instances/a/drain", "POST", headers={"Origin": "http://elsewhere.example"}).status_code == 403
    own = f"http://127.0.0.1:{stage.proxy.admin_port}"
    assert stage.admin("/instances/a/drain", "POST", headers={"Origin": own}).status_code == 200


def test_sessions_return_by_and_by(make_stage: MakeStage) -> None:
    """A session returns to a returning instance once its place is below the instance's share."""
    stage = make_stage(are_journaled=True)
    sessions = [make_session_id("a", nonce=f"{letter * 16}") for letter in "abcdefghijkl"]
    at_home = []
    for share in (0.1, 0.5, 1.0):
        stage.instance("a").share = share
        homes = [instance_of(read_answer(invoke(stage, session=session))) for session in sessions]
        assert homes == ["a" if place_of(session) < share else "b" for session in sessions]
        at_home.append(homes.count("a"))

    assert at_home == sorted(at_home)
    assert at_home[0] < at_home[1] < at_home[2] == len(sessions)
