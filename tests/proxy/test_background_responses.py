"""Responses in the background at the proxy: queued before the client has the answer, run and ended by the queue."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.conftest import MakeStage, Stage, make_session_id
from tests.proxy.fake_instance import Behaviour, Gate, Received, Wire, answering, refusing
from tests.waiting import wait_until
from torchmoor.async_inference.request import background_request
from torchmoor.config.callers import CallerSettings
from torchmoor.errors import ApiError, QueueUnavailable
from torchmoor.proxy.instances.instance import InstanceState
from torchmoor.wire.response_ids import conversation_id, response_id
from torchmoor.wire.session_ids import session_hash

BODY = {"model": "llava", "input": "hello", "background": True}


@dataclass
class FakeResponses:
    """Instances that keep responses: each request opens another session at the instance that gets it."""

    stage: Stage
    run: Behaviour = field(default_factory=lambda: answering(body=b'{"status": "completed"}'))
    sessions: list[str] = field(default_factory=list)
    ran: list[tuple[str, Received]] = field(default_factory=list)  # prefixed with the instance's name
    ended: list[dict[str, Any]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)  # hashes of sessions
    dropped: list[tuple[str, int]] = field(default_factory=list)  # responses of conversations
    talk: str = ""  # the session of a conversation, which has all responses

    def __post_init__(self) -> None:
        for name, instance in self.stage.instances.items():
            instance.behave = self._at(name)
            instance.on_operation = self._close

    def _at(self, name: str) -> Behaviour:
        async def behave(request: Received, wire: Wire) -> None:
            method = request.headers["x-torchmoor-resource"].partition(" ")[0]
            if method == "RUN":
                self.ran.append((name, request))
                await self.run(request, wire)
            elif method == "END":
                self.ended.append(json.loads(request.body))
                await wire.answer()
            else:
                await self._open(name, request, wire)

        return behave

    async def _add(self, request: Received, wire: Wire) -> None:
        """Accept a response in the conversation; a repeated request gets the same one."""
        named = request.headers.get("amz-sdk-invocation-id", "") or f"{len(self.sessions)}"
        self.sessions += [] if named in self.sessions else [named]
        name = response_id(self.talk, self.sessions.index(named) + 1)
        await wire.answer(200, {"X-Torchmoor-Background": name}, json.dumps({"id": name}).encode())

    async def _open(self, name: str, request: Received, wire: Wire) -> None:
        if self.talk:
            await self._add(request, wire)
            return
        session = make_session_id(name, nonce="abcdefghijklm" + f"{len(self.sessions):03d}".translate(LETTERS))
        self.sessions.append(session)
        stamp = f"{session}; Expires=2037-01-01T00:00:00Z"
        fields = {"X-Torchmoor-Background": response_id(session, 1), "X-Amzn-SageMaker-New-Session-Id": stamp}
        if json.loads(request.body).get("stream"):
            await wire.begin_stream("text/event-stream", fields)
            for piece in (b"event: a\n\n", b"event: b\n\n", b""):
                await wire.chunk(piece)
        else:
            await wire.answer(200, fields, json.dumps({"id": response_id(session, 1)}).encode())

    async def _close(self, request: Received, wire: Wire) -> None:
        operation = json.loads(request.body or b"{}")
        if "entry" in operation:
            self.dropped.append((operation["session"], operation["entry"]))
        elif operation.get("action") == "close":
            self.closed.append(operation["session"])
        await wire.answer()


LETTERS = str.maketrans("0123456789", "abcdefghij")


def post(stage: Stage, body: dict[str, Any] = BODY, **headers: str) -> tuple[int, dict[str, str], bytes]:
    answer = stage.ask("POST", "/v1/responses", json.dumps(body), {"Content-Type": "application/json", **headers})
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def states(stage: Stage) -> list[str]:
    """Return the states of the asynchronous requests."""
    service = stage.proxy.data.async_inference
    return [record.state.value for record in stage.run(service.queue.list("llava"))]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_client_gets_the_answer_when_the_queue_has_the_response(
    make_stage: MakeStage, tmp_path: Path, *, is_streamed: bool
) -> None:
    stage = make_stage(async_folder=tmp_path)
    fake = FakeResponses(stage)

    status, headers, body = post(stage, {**BODY, "stream": is_streamed})

    assert status == 200
    assert "x-torchmoor-background" not in headers
    expected = (
        b"event: a\n\nevent: b\n\n" if is_streamed else b'{"id": "%b"}' % response_id(fake.sessions[0], 1).encode()
    )
    assert body == expected
    wait_until(lambda: states(stage) == ["COMPLETED"], "the response was generated")
    ((_, request),) = fake.ran
    assert request.headers["x-torchmoor-resource"] == f"RUN responses/{response_id(fake.sessions[0], 1)}"
    assert request.headers["x-torchmoor-endpoint"] == "llava"


def test_a_response_runs_where_its_session_is(make_stage: MakeStage, tmp_path: Path) -> None:
    """A response runs at its session's instance, whatever the load, or at another one if that instance is gone."""
    stage = make_stage(async_folder=tmp_path, are_journaled=True)
    fake = FakeResponses(stage)
    for _ in range(4):
        post(stage)
    wait_until(lambda: len(fake.ran) == 4, "all responses were generated")
    for name, request in fake.ran:
        assert f"-{name}-" in request.headers["x-torchmoor-resource"]

    gate = Gate()

    async def die(request: Received, wire: Wire) -> None:
        await gate.pass_through()
        wire.reset()

    fake.run = die
    post(stage)
    gate.wait_reached()
    victim = fake.ran[-1][0]
    fake.run = answering(body=b'{"status": "completed"}')
    stage.run(stage.instances[victim].die())
    gate.open()

    wait_until(lambda: fake.ran[-1][0] != victim, "another instance has it")
    wait_until(lambda: states(stage) == ["COMPLETED"] * 5, "all are complete")


def test_a_full_share_closes_what_was_opened(make_stage: MakeStage, tmp_path: Path) -> None:
    """If the caller's share is full, the client gets the limit's error, and the instance keeps nothing."""
    callers = CallerSettings(limited="always", max_async_requests=1)
    stage = make_stage(async_folder=tmp_path, callers=callers)
    fake, gate = FakeResponses(stage), Gate()
    fake.run = gate.behave
    assert post(stage)[0] == 200
    refused = [post(stage), post(stage, {**BODY, "stream": True})]

    for status, headers, body in refused:
        assert (status, json.loads(body)["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) > 0
    opened = {session_hash(each) for each in fake.sessions[1:]}
    wait_until(lambda: set(fake.closed) == opened, "both sessions are closed")
    assert len(fake.closed) == 2
    counted = stage.proxy.data.dispatchers.callers
    assert counted.sessions.count("127.0.0.1") == 1
    gate.open()
    wait_until(lambda: states(stage) == ["COMPLETED"], "the first response was generated")
    assert post(stage)[0] == 200


def test_an_endpoint_without_a_queue_refuses(make_stage: MakeStage) -> None:
    stage = make_stage()
    fake = FakeResponses(stage)

    status, _, body = post(stage)

    assert (status, "asynchronous" in json.loads(body)["error"]["message"]) == (400, True)
    wait_until(lambda: fake.closed == [session_hash(fake.sessions[0])], "the session is closed")


@pytest.mark.parametrize(
    ("behave", "ended", "state"),
    [
        (
            refusing(400, "ContextTooLong", "too many tokens"),
            {"status": "failed", "message": "too many tokens", "code": "ContextTooLong"},
            "FAILED",
        ),
        (answering(400, body=b"[" * 10_000), {"status": "failed", "message": "[" * 10_000, "code": ""}, "FAILED"),
        (refusing(400, "Odd", "half a pair: \ud83d"), {"status": "failed", "message": "half a pair: ?"}, "FAILED"),
        (refusing(409, "ResponseCancelled", "cancelled"), {"status": "cancelled"}, "CANCELLED"),
    ],
)
def test_the_instance_is_told_why_there_is_no_answer(
    make_stage: MakeStage, tmp_path: Path, behave: Behaviour, ended: dict[str, str], state: str
) -> None:
    stage = make_stage(async_folder=tmp_path)
    fake = FakeResponses(stage)
    fake.run = behave

    post(stage)

    wait_until(lambda: states(stage) == [state], "the response has ended")
    (told,) = fake.ended
    assert told.items() >= ended.items()
    assert not list((tmp_path / "results").rglob("*.out"))


def test_a_response_whose_session_key_is_gone_has_failed(make_stage: MakeStage, tmp_path: Path) -> None:
    """A response whose key is gone, as after a restart of `torchmoor up`, fails: no instance can serve it."""
    stage = make_stage(async_folder=tmp_path)
    fake = FakeResponses(stage)
    session = make_session_id("a", key=b"the key of the time before")
    asked = background_request(
        response_id(session, 1), endpoint="llava", principal="", source="", ttl_s=3600.0, timeout_s=3600.0
    )
    service = stage.proxy.data.async_inference

    stage.run(service.submit(asked))

    wait_until(lambda: states(stage) == ["FAILED"], "the response has failed")
    (record,) = stage.run(service.queue.list("llava"))
    assert "TORCHMOOR_SESSION_KEYS" in record.reason
    assert not fake.ran
    assert not fake.ended


def test_operators_do_not_see_the_id_of_a_response(make_stage: MakeStage, tmp_path: Path) -> None:
    """The id, which the instance's error contains, is hidden from operators, because without keys it gives access."""
    stage = make_stage(async_folder=tmp_path)
    fake = FakeResponses(stage)

    async def miss(request: Received, wire: Wire) -> None:
        name = request.headers["x-torchmoor-resource"].rpartition("/")[2]
        await refusing(404, "NotFound", f"Response with id '{name}' not found.")(request, wire)

    fake.run = miss
    post(stage)

    wait_until(lambda: states(stage) == ["FAILED"], "the response has failed")
    (record,) = stage.run(stage.proxy.data.async_inference.queue.list("llava"))
    assert record.reason == f"Response with id '{record.request.inference_id}' not found."


def test_a_client_that_leaves_meanwhile_leaves_nothing_behind(make_stage: MakeStage, tmp_path: Path) -> None:
    """A response is generated and stored although its client disconnects, and leaves nothing behind in the proxy."""
    stage = make_stage(async_folder=tmp_path)
    fake = FakeResponses(stage)
    data = json.dumps({**BODY, "stream": True}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with stage.socket() as sock:
        sock.sendall(head % len(data) + data)
        wait_until(lambda: fake.sessions, "the instance has accepted it")

    wait_until(lambda: states(stage) == ["COMPLETED"], "the response was generated")


class SlowQueue:
    """A stage's queue whose submits wait for the test's gates, in order."""

    def __init__(self, stage: Stage) -> None:
        service = stage.proxy.data.async_inference
        self._submit = service.queue.submit
        self.gates: list[Gate] = []
        self.error: ApiError | None = None  # the queue's answer
        service.queue.submit = self._wait

    async def _wait(self, *args: Any, **options: Any) -> Any:
        self.gates.append(gate := Gate())
        await gate.pass_through()
        if self.error is not None:
            raise self.error
        return await self._submit(*args, **options)


def test_a_session_counts_for_its_caller_although_the_client_leaves(make_stage: MakeStage, tmp_path: Path) -> None:
    """A session counts although its client disconnects before the queue has the response.

    Otherwise the limit has no effect.
    """
    stage = make_stage(async_folder=tmp_path, callers=CallerSettings(limited="always"))
    fake, queue = FakeResponses(stage), SlowQueue(stage)
    data = json.dumps(BODY).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with stage.socket() as sock:
        sock.sendall(head % len(data) + data)
        wait_until(lambda: queue.gates, "the response waits for the queue")
    stage.until(lambda: not stage.proxy.data.server.connections, "the client has left")
    queue.gates[0].open()
    wait_until(lambda: states(stage) == ["COMPLETED"], "the response was generated")

    callers = stage.proxy.data.dispatchers.callers
    assert callers.sessions.count("127.0.0.1") == len(fake.sessions) == 1


@pytest.mark.parametrize("service", ["refuses later", "refuses at once", "lacks the endpoint"])
def test_a_session_that_the_queue_refuses_does_not_count(make_stage: MakeStage, tmp_path: Path, service: str) -> None:
    """A session whose response the queue refuses is closed and does not count, also if the client has disconnected."""
    stage = make_stage(async_folder=tmp_path, callers=CallerSettings(limited="always"))
    fake, queue = FakeResponses(stage), SlowQueue(stage)
    callers, asynchronous = stage.proxy.data.dispatchers.callers, stage.proxy.data.async_inference
    queue.error = QueueUnavailable("The queue has gone.")
    if service == "refuses at once":
        asynchronous.try_submit = leaving(stage, lambda *_: False)
    elif service == "lacks the endpoint":
        asynchronous.endpoints = LeavingEndpoints(stage)
    data = json.dumps(BODY).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"

    with stage.socket() as sock:
        sock.sendall(head % len(data) + data)
        if service == "refuses later":
            wait_until(lambda: queue.gates, "the response waits for the queue")
        else:
            wait_until(lambda: fake.closed, "the queue has refused it")
    stage.until(lambda: not stage.proxy.data.server.connections, "the client has left")
    if service == "refuses later":
        assert callers.sessions.count("127.0.0.1") == 1
        queue.gates[0].open()

    wait_until(lambda: fake.closed == [session_hash(fake.sessions[0])], "the session is closed")
    stage.until(lambda: callers.sessions.count("127.0.0.1") == 0, "it does not count")
    stage.check_clean()


def leaving(stage: Stage, then: Callable[..., bool]) -> Callable[..., bool]:
    """Return a function that breaks all clients' connections before it answers, in the same turn of the loop."""

    def leave(*args: Any) -> bool:
        for connection in list(stage.proxy.data.server.connections):
            connection.transport.abort()
        return then(*args)

    return leave


class LeavingEndpoints(dict[str, Any]):
    """An empty set of endpoints; a client whose request looks one up has disconnected when it is answered."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._leave = leaving(stage, lambda _: False)

    def __contains__(self, name: object) -> bool:
        return self._leave(name)


def test_a_response_whose_instance_is_lost_before_it_is_queued_is_asked_for_once_more(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    """After a loss of the instance, another accepts the response, and the client gets its answer once it is queued."""
    stage = make_stage(async_folder=tmp_path, are_journaled=True)
    fake, queue = FakeResponses(stage), SlowQueue(stage)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, stage)
        wait_until(lambda: len(queue.gates) == 1, "the first response waits for the queue")
        victim = next(name for name, each in stage.instances.items() if each.received)
        stage.set_state(InstanceState.DOWN, victim)
        wait_until(lambda: len(queue.gates) == 2, "the second response waits for the queue")
        queue.gates[0].open()
        wait_until(lambda: states(stage), "the queue has the first")
        assert not stage.run(has_answered(stage))
        queue.gates[1].open()
        status, _, body = asked.result(60)

    assert (status, json.loads(body)) == (200, {"id": response_id(fake.sessions[1], 1)})
    wait_until(lambda: fake.closed == [session_hash(fake.sessions[0])], "the first response is closed")
    stage.check_clean()


def in_conversation(fake: FakeResponses) -> dict[str, Any]:
    """Make the fakes keep responses in one conversation; return a request's body."""
    fake.talk = make_session_id("a")
    return {**BODY, "conversation": conversation_id(fake.talk)}


def test_responses_of_a_conversation_run_where_it_is(make_stage: MakeStage, tmp_path: Path) -> None:
    """Responses of a conversation are separate requests in the queue and run at the conversation's instance."""
    stage = make_stage(async_folder=tmp_path)
    fake = FakeResponses(stage)
    body = in_conversation(fake)

    answers = [post(stage, body) for _ in range(3)]

    names = [response_id(fake.talk, number) for number in (1, 2, 3)]
    assert [json.loads(answer[2])["id"] for answer in answers] == names
    wait_until(lambda: states(stage) == ["COMPLETED"] * 3, "the responses were generated")
    assert {name for name, _ in fake.ran} == {"a"}
    assert sorted(each.headers["x-torchmoor-resource"] for _, each in fake.ran) == [f"RUN responses/{n}" for n in names]


def test_a_refusal_leaves_the_conversation_open(make_stage: MakeStage, tmp_path: Path) -> None:
    """If the queue refuses a response, only this response is deleted, and its conversation stays."""
    stage = make_stage(async_folder=tmp_path, callers=CallerSettings(limited="always", max_async_requests=1))
    fake, gate = FakeResponses(stage), Gate()
    fake.run = gate.behave
    body = in_conversation(fake)

    assert [post(stage, body)[0] for _ in range(2)] == [200, 429]

    wait_until(lambda: fake.dropped == [(session_hash(fake.talk), 2)], "the response is deleted")
    gate.open()
    wait_until(lambda: states(stage) == ["COMPLETED"], "the first response was generated")
    assert fake.closed == []


def test_a_response_of_a_conversation_that_is_accepted_twice_is_queued_once(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    """The instance that takes the conversation over recognises the invocation id, so nothing is queued twice."""
    stage = make_stage(async_folder=tmp_path, are_journaled=True)
    fake, queue = FakeResponses(stage), SlowQueue(stage)
    body = in_conversation(fake)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, stage, body, **{"amz-sdk-invocation-id": "one-id"})
        wait_until(lambda: len(queue.gates) == 1, "the response waits for the queue")
        stage.set_state(InstanceState.DOWN, "a")
        wait_until(lambda: len(queue.gates) == 2, "it waits for the queue again")
        queue.gates[0].open()
        wait_until(lambda: states(stage), "the queue has it")
        assert not stage.run(has_answered(stage))
        queue.gates[1].open()
        status, _, answer = asked.result(60)

    assert (status, json.loads(answer)) == (200, {"id": response_id(fake.talk, 1)})
    wait_until(lambda: states(stage) == ["COMPLETED"], "the response was generated")
    assert (fake.dropped, fake.closed) == ([], [])
    stage.check_clean()


async def has_answered(stage: Stage) -> bool:
    return any(each.exchange is None or each.exchange.is_answered for each in stage.proxy.data.server.connections)
