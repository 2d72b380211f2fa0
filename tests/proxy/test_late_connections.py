"""Instances that are slow to accept connections, and a proxy that is itself delayed: no request is lost."""

import asyncio
import errno
import socket
import time
from collections.abc import Iterator
from http.client import IncompleteRead
from pathlib import Path

import pytest

from tests.proxy.conftest import CHUNKS_END, MakeStage, Stage, make_session_id, read_answer, read_until
from tests.proxy.fake_instance import Gate, Received, Wire
from tests.proxy.test_async import submit, until_there
from tests.proxy.test_continued_streams import BODY, WORDS, saying, take_turns
from tests.proxy.test_faults import instance_of, invoke
from torchmoor.config.health import HealthSettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.fleet.health import HELD_UP_S
from torchmoor.proxy.dispatch.assignment import MAX_REPEATS
from torchmoor.proxy.http.upstream import UpstreamConnection
from torchmoor.proxy.instances.instance import InstanceState

SHORT = TimeoutSettings(connect_timeout_s=0.3, sweep_interval_s=0.02)


@pytest.fixture
def full_port() -> Iterator[int]:
    """Yield a port with a full queue, which drops later connections' packets as on a busy machine."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        yield full.getsockname()[1]
        for each in waiting:
            each.close()


def num_retries(stage: Stage) -> int:
    return stage.proxy.data.dispatchers.all()[0].metrics.retries


def end_of_stream(stage: Stage) -> float:
    """Return when the one running exchange times out."""
    [client] = [each for each in stage.proxy.data.server.connections if each.exchange is not None]
    return client.deadline


def test_connection_that_is_not_made_in_time_takes_nobody_out(make_stage: MakeStage, full_port: int) -> None:
    """A connection that is not established in time, as after one lost packet, does not make the instance DOWN."""
    stage = make_stage(timeouts=SHORT, are_journaled=True)
    stage.instance("a").port = full_port
    assert instance_of(read_answer(invoke(stage, session=make_session_id("b")))) == "b"  # needs no connection later

    answer = read_answer(invoke(stage, session=make_session_id("a")))

    assert instance_of(answer) == "b"
    assert stage.instance("a").state is InstanceState.READY
    assert stage.instance("a").breaker.num_failures == 1


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "error",
    [socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), OSError(errno.ENETUNREACH, "Unreachable")],
    ids=str,
)
def test_an_address_that_is_not_found_takes_nobody_out(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """While DNS does not answer, running streams go on, and other requests use the connections that there are."""
    stage = make_stage(are_journaled=True)
    gate = Gate()

    async def stream(request: Received, wire: Wire) -> None:
        await wire.begin_stream("text/plain")
        await wire.chunk(b"begun")
        await gate.pass_through()
        await wire.chunk(b"")

    assert instance_of(read_answer(invoke(stage, session=make_session_id("b")))) == "b"  # needs no connection later
    stage.a.behave = stream
    running = invoke(stage, session=make_session_id("a"))
    gate.wait_reached()

    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(stage.proxy.data.parts.connector, "connect", fail)
    assert instance_of(read_answer(invoke(stage, session=make_session_id("a")))) == "b"
    assert stage.instance("a").breaker.num_failures == 1
    gate.open()
    read_until(running, CHUNKS_END)

    assert stage.instance("a").state is InstanceState.READY


@pytest.mark.interpreted
def test_fault_of_the_proxy_while_it_connects_is_logged_and_ends_the_request(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client does not wait until its request's time is over."""
    stage = make_stage()

    async def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    with monkeypatch.context() as patched:
        patched.setattr(stage.proxy.data.parts.connector, "connect", fail)
        answer = read_answer(invoke(stage))

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert "connection not opened instance=" in caplog.text
    assert "RuntimeError: a fault" in caplog.text
    assert instance_of(read_answer(invoke(stage))) in ("a", "b")


@pytest.mark.interpreted
def test_fault_of_the_proxy_while_it_sends_is_logged_and_ends_the_request(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client does not wait until its request's time is over, and the connection is closed."""
    stage = make_stage()

    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    with monkeypatch.context() as patched:
        patched.setattr(UpstreamConnection, "send", fail)
        answer = read_answer(invoke(stage))

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert "request not sent instance=" in caplog.text
    assert "RuntimeError: a fault" in caplog.text
    assert instance_of(read_answer(invoke(stage))) in ("a", "b")
    stage.until(lambda: sum(len(fake.tasks) for fake in stage.instances.values()) == 1, "only that one is open")


@pytest.mark.parametrize(("names", "session"), [("a", None), ("a", "a"), ("ab", "a")])
def test_request_that_only_one_instance_can_answer_waits_for_it(
    make_stage: MakeStage, full_port: int, names: str, session: str | None
) -> None:
    """Without a journal a turn waits for its instance, which may still exist, since no other knows the session."""
    stage = make_stage(timeouts=SHORT, names=tuple(names))
    port, stage.instance("a").port = stage.instance("a").port, full_port
    sock = invoke(stage, session=None if session is None else make_session_id(session))
    stage.until(lambda: num_retries(stage) >= 2, "tried again")

    stage.instance("a").port = port

    assert instance_of(read_answer(sock)) == "a"
    assert [fake.name for fake in stage.instances.values() if fake.received] == ["a"]
    stage.until(lambda: stage.instance("a").breaker.num_failures == 0, "the answer counts as a success")


@pytest.mark.parametrize("is_back", [True, False])
def test_the_rest_of_a_stream_waits_for_the_only_instance_that_is_left(
    make_stage: MakeStage, full_port: int, is_back: bool
) -> None:
    """The rest of a stream waits for a connection to the only other instance, as a request does, until that is down."""
    stage = make_stage(timeouts=SHORT, are_journaled=True)
    port, stage.instance("b").port = stage.instance("b").port, full_port
    take_turns(stage, saying(0, 2, b""), saying(2))
    fields = {"Content-Type": "application/json", "X-Amzn-SageMaker-Session-Id": make_session_id("a")}
    answer = stage.ask("POST", "/invocations", BODY, fields)
    stage.until(lambda: num_retries(stage) > 1, "tried once")
    ends_at = end_of_stream(stage)
    stage.until(lambda: num_retries(stage) > 1 + MAX_REPEATS, "tried again")
    assert end_of_stream(stage) == ends_at, "the longest silence does not begin again"

    if is_back:
        stage.instance("b").port = port
        assert answer.read().decode() == "".join(WORDS)
    else:
        stage.set_state(InstanceState.DOWN, "b")
        with pytest.raises(IncompleteRead):
            answer.read()


def test_request_that_waits_is_refused_once_its_instance_is_gone(make_stage: MakeStage, full_port: int) -> None:
    """A waiting request is refused once probes find its instance down."""
    stage = make_stage(timeouts=SHORT, names=("a",))
    stage.instance("a").port = full_port
    sock = invoke(stage)
    stage.until(lambda: num_retries(stage) >= 1, "tried again")

    stage.set_state(InstanceState.DOWN, "a")

    answer = read_answer(sock)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"The instance that was to answer is gone." in answer


def hold_up(seconds: float) -> None:
    """Block the calling thread for this time, as if other processes used all processors."""
    time.sleep(seconds)


def test_time_in_which_the_proxy_is_held_up_is_not_the_instances(make_stage: MakeStage) -> None:
    """The time in which the proxy was delayed does not count towards a connection's time-out."""
    stage = make_stage(timeouts=SHORT)

    async def connect() -> UpstreamConnection:
        connecting = asyncio.create_task(stage.proxy.data.parts.connector.connect(stage.instance("a")))
        await asyncio.sleep(0)  # it begins
        hold_up(2 * SHORT.connect_timeout_s)
        return await connecting

    stage.call(stage.run(connect()).close)


def test_silence_while_the_proxy_is_held_up_takes_nobody_down(make_stage: MakeStage) -> None:
    """The time in which the proxy was delayed does not count as a probe's silence."""
    # A probe's time-out is longer than a delay that counts, so that a busy test machine does not matter either.
    often = HealthSettings(starting_interval_s=0.02, ready_interval_s=0.05, probe_timeout_s=2 * HELD_UP_S)
    stage = make_stage(health=often.replace(unanswered_before_down=1))
    num_probes, states = 0, set()

    async def answer_and_hold_up(request: Received, wire: Wire) -> None:
        nonlocal num_probes
        num_probes += 1
        await wire.answer(body=b'[{"workers": [{"status": "READY"}]}]')
        if num_probes == 2:
            hold_up(often.probe_timeout_s + HELD_UP_S)  # this is the proxy's thread

    stage.a.behave = answer_and_hold_up
    stage.run(record_states(stage, states))
    stage.instance("a").management_port = stage.a.port

    stage.until(lambda: num_probes == 4, "two probes after it")

    stage.instance("a").management_port = None
    assert states == set()


async def record_states(stage: Stage, states: set[InstanceState]) -> None:
    stage.registry.listen(lambda instance: states.add(instance.state))


def test_asynchronous_request_that_is_not_sent_in_time_takes_nobody_out(
    make_stage: MakeStage, tmp_path: Path, full_port: int
) -> None:
    """An asynchronous request that cannot be sent in time does not make its instance DOWN, and is sent later."""
    stage = make_stage(timeouts=SHORT, names=("a",), async_folder=tmp_path)
    port, stage.instance("a").port = stage.instance("a").port, full_port
    submitted = submit(stage, Body=b"{}")
    stage.until(lambda: stage.instance("a").breaker.num_failures, "a connection not made in time")

    assert stage.instance("a").state is InstanceState.READY
    stage.instance("a").port = port
    until_there(submitted["OutputLocation"])
