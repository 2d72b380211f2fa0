"""Sessions of handlers with their own ids: the proxy remembers which instance opened each."""

import json

import pytest

from tests.proxy.conftest import MakeStage, Stage, make_session_id
from tests.proxy.fake_instance import Received, Wire, dying
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.config.limits import LimitSettings
from torchmoor.config.routing import LateBindingSettings
from torchmoor.proxy.instances.instance import InstanceState

SESSION_ID = "X-Amzn-SageMaker-Session-Id"
PATHS = ("/endpoints/llava/invocations", "/endpoints/llava/invocations-response-stream", "/invocations")


def minting(stage: Stage, name: str) -> None:
    """Make an instance open, serve and close sessions like SageMaker's containers."""
    opened: list[str] = []

    async def behave(request: Received, wire: Wire) -> None:
        session = request.headers[SESSION_ID.lower()]
        headers = {}
        if session == "NEW_SESSION":
            opened.append(f"{name}-{len(opened)}")
            headers[SESSION_ID] = f"{opened[-1]}; Expires=2099-01-01T00:00:00Z"
        elif request.body == b"close":
            headers["X-Amzn-SageMaker-Closed-Session-Id"] = session
        await wire.answer(headers=headers, body=json.dumps({"session": opened[-1] if opened else ""}).encode())

    stage.instances[name].behave = behave


def start(make_stage: MakeStage, **options: object) -> Stage:
    stage = make_stage(names=("a", "b", "c"), **options)
    for name in stage.instances:
        minting(stage, name)
    return stage


def send(stage: Stage, session: str, body: bytes = b"{}", path: str = PATHS[0]) -> tuple[int, str]:
    """Return the answer's status and its instance."""
    answer = stage.ask("POST", path, body, {SESSION_ID: session})
    answer.read()
    return answer.status, answer.headers.get("X-Torchmoor-Instance", "")


def open_session(stage: Stage, path: str = PATHS[0]) -> tuple[str, str]:
    """Open a session; return its id and its instance."""
    status, instance = send(stage, "NEW_SESSION", path=path)
    assert status == 200
    return (
        f"{instance}-{len([r for r in stage.instances[instance].received if r.path.startswith('/pred')]) - 1}",
        instance,
    )


@pytest.mark.parametrize("path", PATHS)
def test_session_goes_to_the_instance_that_opened_it(make_stage: MakeStage, path: str) -> None:
    """A session goes to its instance in every dialect, also if our own sessions have a journal."""
    stage = start(make_stage, are_journaled=True)
    sessions = [open_session(stage, path) for _ in range(3)]

    assert {instance for _, instance in sessions} == {"a", "b", "c"}
    for session, instance in sessions * 2:
        assert {send(stage, session, path=each) for each in PATHS} == {(200, instance)}


def test_client_gets_a_new_id_without_an_expiry(make_stage: MakeStage) -> None:
    """A new id has no expiry, which a handler need not state."""
    stage = make_stage()

    async def behave(request: Received, wire: Wire) -> None:
        await wire.answer(headers={"X-Amzn-SageMaker-New-Session-Id": "mine-1"}, body=b"{}")

    stage.a.behave = stage.b.behave = behave
    answer = stage.ask("POST", PATHS[0], b"{}", {SESSION_ID: "NEW_SESSION"})
    answer.read()

    assert (answer.status, answer.headers["X-Amzn-SageMaker-New-Session-Id"]) == (200, "mine-1")


def test_session_that_was_closed_or_never_opened_is_refused(make_stage: MakeStage) -> None:
    """The answer is the same as for an id that this endpoint never issued, and no instance receives the request."""
    stage = start(make_stage)
    session, instance = open_session(stage)

    assert send(stage, session, b"close") == (200, instance)

    assert send(stage, session) == (400, "")
    assert send(stage, "x-9") == (400, "")
    assert send(stage, make_session_id("a", endpoint="other")) == (400, "")


@pytest.mark.parametrize("late_binding", [None, LateBindingSettings()])
def test_nobody_else_is_sent_a_session_whose_instance_is_away(
    make_stage: MakeStage, late_binding: LateBindingSettings | None
) -> None:
    """The client gets a retry hint and is served when the only instance that knows the session is back."""
    stage = start(make_stage, are_journaled=True, late_binding=late_binding)
    session, home = open_session(stage)
    before = {name: len(fake.received) for name, fake in stage.instances.items()}

    stage.set_state(InstanceState.DOWN, home)
    assert send(stage, session) == (503, "")
    stage.set_state(InstanceState.READY, home)
    port, stage.instance(home).port = stage.instance(home).port, 1
    stage.instance(home).close_idle()
    assert send(stage, session) == (503, "")
    stage.instance(home).port = port

    assert before == {name: len(fake.received) for name, fake in stage.instances.items()}
    stage.set_state(InstanceState.READY, home)
    assert send(stage, session) == (200, home)
    stage.set_state(InstanceState.DRAINING, home)
    assert send(stage, session) == (200, home)


def test_turn_that_its_instance_may_have_begun_goes_to_nobody_else(make_stage: MakeStage) -> None:
    """A turn that its instance may have begun is not retried, because no journal of ours knows its state."""
    stage = start(make_stage, are_journaled=True)
    session, home = open_session(stage)

    stage.instances[home].behave = dying
    others = [fake for fake in stage.instances.values() if fake.name != home]
    before = [len(fake.received) for fake in others]

    assert send(stage, session)[0] == 503
    assert [len(fake.received) for fake in others] == before


def test_session_belongs_to_the_caller_that_opened_it(make_stage: MakeStage) -> None:
    """Another key gets the answer for an unknown session."""
    secrets = {"AKIAFIRST": "a-secret-of-sixteen-a", "AKIASECOND": "a-secret-of-sixteen-b"}
    keys = {key_id: AccessKey(secret=secret) for key_id, secret in secrets.items()}
    stage = start(make_stage, credentials=Credentials(keys=keys))
    first, second = (stage.client(key_id=key_id, secret=secret) for key_id, secret in secrets.items())
    opened = first.invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId="NEW_SESSION")
    session = opened["NewSessionId"].partition(";")[0]

    assert first.invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId=session)["Body"].read()
    with pytest.raises(second.exceptions.ClientError, match="was not issued by this endpoint"):
        second.invoke_endpoint(EndpointName="llava", Body=b"{}", SessionId=session)


def test_sessions_that_are_remembered_are_bounded(make_stage: MakeStage) -> None:
    """The number of remembered sessions is limited; the least recently used one is forgotten."""
    stage = start(make_stage, limits=LimitSettings(max_foreign_sessions=2))
    (first, home), (second, _) = open_session(stage), open_session(stage)
    assert send(stage, first) == (200, home)

    third, _ = open_session(stage)

    assert [send(stage, session)[0] for session in (first, second, third)] == [200, 400, 200]
