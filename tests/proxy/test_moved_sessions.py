"""A client's close of a session that several instances hold reaches the others and cannot fail because of them."""

from collections.abc import Iterator

import pytest

from tests.proxy.conftest import MakeStage, Stage, instance_of, make_session_id
from tests.proxy.fake_instance import answering, refusing, silent
from torchmoor.config.recovery import RecoverySettings
from torchmoor.config.timeouts import TimeoutSettings
from torchmoor.proxy.instances.instance import InstanceState

CLOSED = b"x-amzn-sagemaker-closed-session-id: "


@pytest.fixture
def start(make_stage: MakeStage) -> MakeStage:
    """Return a function that makes stages whose instances share a journal and have their whole share after a return."""

    def make(**options: object) -> Stage:
        return make_stage(are_journaled=True, recovery=RecoverySettings(slow_start_s=0.001), **options)

    return make


@pytest.fixture
def stage(start: MakeStage) -> Iterator[Stage]:
    return start()


def invoke(stage: Stage, session: str) -> bytes:
    head = f"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nX-Amzn-SageMaker-Session-Id: {session}\r\n"
    return stage.raw(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())


def close(stage: Stage, session: str) -> bytes:
    """Close the session wherever its requests go. Return the answer."""
    usual = {name: fake.behave for name, fake in stage.instances.items()}
    for fake in stage.instances.values():
        fake.behave = answering(headers={"X-Amzn-SageMaker-Closed-Session-Id": session})
    answer = invoke(stage, session)
    for name, fake in stage.instances.items():
        fake.behave = usual[name]
    return answer


def set_state(stage: Stage, name: str, state: InstanceState) -> None:
    """Set an instance's state, as a probe does."""
    stage.set_state(state, name)
    stage.pass_time(1)  # a returning instance has its whole share again


def move(stage: Stage, session: str) -> None:
    """Make `b` serve a turn of a session of `a`, and `a` return."""
    set_state(stage, "a", InstanceState.DOWN)
    assert instance_of(invoke(stage, session)) == "b"
    set_state(stage, "a", InstanceState.READY)
    assert instance_of(invoke(stage, session)) == "a"


def is_quiet(stage: Stage) -> bool:
    return stage.proxy.data.subrequests.num_running == 0


def test_close_at_home_reaches_the_instance_that_stood_in(stage: Stage) -> None:
    """The session's own instance answers the close; the other one gets the id once."""
    session = make_session_id("a")
    move(stage, session)

    assert instance_of(close(stage, session)) == "a"

    stage.until(lambda: stage.b.ended == [[session]], "the close at b")
    stage.until(lambda: is_quiet(stage), "the operation's end")
    assert stage.a.ended == []
    assert len(stage.proxy.data.dispatchers.moved_sessions) == 0


def test_close_elsewhere_reaches_the_instance_that_opened_the_session(stage: Stage) -> None:
    """A drained instance still gets the operation."""
    session = make_session_id("a")
    set_state(stage, "a", InstanceState.DRAINING)

    assert instance_of(close(stage, session)) == "b"

    stage.until(lambda: stage.a.ended == [[session]], "the close at a")
    stage.until(lambda: is_quiet(stage), "the operation's end")
    assert stage.b.ended == []


def test_instance_that_is_down_is_sent_the_close_when_it_is_back(stage: Stage) -> None:
    """An instance that is down gets the close when it is back, and nothing before."""
    session = make_session_id("a")
    set_state(stage, "a", InstanceState.DOWN)

    assert CLOSED in close(stage, session).lower()

    assert is_quiet(stage)
    assert stage.a.ended == []
    set_state(stage, "a", InstanceState.READY)
    stage.until(lambda: stage.a.ended == [[session]], "the close at a")
    stage.until(lambda: is_quiet(stage), "the operation's end")


def test_instance_that_is_replaced_is_sent_nothing(stage: Stage) -> None:
    """A replaced instance gets nothing, because a new process holds no session."""
    session = make_session_id("a")
    set_state(stage, "a", InstanceState.DOWN)
    close(stage, session)

    async def replace() -> None:
        instance = stage.instance("a")
        stage.registry.remove("a")
        stage.registry.add(instance)
        stage.registry.set_state("a", InstanceState.READY)

    stage.run(replace())
    stage.pass_time(1)

    assert instance_of(invoke(stage, make_session_id("a"))) == "a"
    assert stage.a.ended == []


def test_close_that_fails_is_not_passed_on(stage: Stage) -> None:
    """A failed close is not passed on, because the session is still open; the next close is."""
    session = make_session_id("a")
    move(stage, session)
    stage.a.behave = refusing(503, "JournalUnavailable", "the journal is away")
    assert invoke(stage, session).startswith(b"HTTP/1.1 503")
    stage.a.behave = answering()
    assert is_quiet(stage)
    assert stage.b.ended == []

    assert CLOSED in close(stage, session).lower()

    stage.until(lambda: stage.b.ended == [[session]], "the close at b")
    stage.until(lambda: is_quiet(stage), "the operation's end")


def test_instance_that_hangs_delays_no_close(start: MakeStage) -> None:
    """Clients do not wait for a hanging instance.

    Its operation ends at the deadline, and later closes are sent together.
    """
    stage = start(timeouts=TimeoutSettings(cancel_timeout_s=0.2, sweep_interval_s=0.02))
    sessions = [make_session_id("a", nonce=letter * 16) for letter in "bcd"]

    for session in sessions:
        move(stage, session)
    stage.b.on_end_closed = silent

    for session in sessions:
        assert instance_of(close(stage, session)) == "a"

    stage.until(lambda: sorted(each for ids in stage.b.ended for each in ids) == sessions, "all closes at b")
    stage.until(lambda: is_quiet(stage), "the operations' end")
    assert stage.instance("b").state is InstanceState.READY


def test_session_that_never_moved_costs_no_operation(stage: Stage) -> None:
    session = make_session_id("a")
    invoke(stage, session)

    assert instance_of(close(stage, session)) == "a"

    assert is_quiet(stage)
    assert stage.a.ended == stage.b.ended == []
