"""Requests without an instance where instances start on demand: they wait and are served, or get Retry-After."""

import json
import re
import socket
import time
import urllib.error
import urllib.request
from threading import Thread
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.proxy.conftest import MakeStage, Stage, make_session_id, read_answer
from tests.proxy.fake_instance import answering, dying
from tests.proxy.test_continued_streams import BODY, WORDS, saying, take_turns
from tests.proxy.test_late_binding import Held, received, send, status, waiting
from tests.waiting import wait_until
from torchmoor.cli.waiting_notice import EndpointWatch
from torchmoor.clients.signing import Login, Signer
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.config.limits import LimitSettings
from torchmoor.config.routing import LateBindingSettings, VariantSettings
from torchmoor.config.scaling import ScalingSettings
from torchmoor.proxy.dispatch.dispatcher import PROBE_S
from torchmoor.proxy.instances.instance import Instance, InstanceState

LONG = ScalingSettings(max_hold_s=20)
SHORT = ScalingSettings(max_hold_s=0.2)


class Zero:
    """A stage whose only instance is absent until the test adds it; counts wake-ups of the fleet."""

    def __init__(self, make_stage: MakeStage, scaling: ScalingSettings = LONG, **options: Any) -> None:
        variant = VariantSettings(model="llava", scaling=scaling)
        self.stage = make_stage(variants=(variant,), names=("a",), **options)
        self.wakes = 0
        self.stage.proxy.data.on_need(self._wake)
        self.port = self.stage.instance("a").port
        self.stage.call(self.stage.registry.remove, "a")

    def _wake(self) -> None:
        self.wakes += 1

    def begin(self, started_s_ago: float | None = None) -> None:
        """Begin the instance's start."""
        at = None if started_s_ago is None else time.monotonic() - started_s_ago
        instance = Instance(name="a", endpoint="llava", model="llava", port=self.port, capacity=1, started_at=at)
        self.stage.call(self.stage.registry.add, instance)

    def come(self) -> None:
        """Make the instance ready."""
        self.begin()
        self.set_state(InstanceState.READY)

    def set_state(self, state: InstanceState) -> None:
        self.stage.set_state(state)

    def drain(self) -> None:
        """Drain the instance, as an operator does."""
        self.stage.call(self.stage.registry.drain, "a")

    def resume(self) -> None:
        self.stage.call(self.stage.registry.resume, "a")

    def took(self, seconds: float) -> None:
        """Set the duration of the last start."""
        self.stage.registry.get_endpoint("llava").variants[0].last_start_s = seconds

    def get(self, path: str, *, admin: bool = False) -> int:
        """Return the status of a GET."""
        url = self.stage.proxy.admin_url if admin else self.stage.proxy.runtime_url
        try:
            with urllib.request.urlopen(url + path, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


def refused(sock: socket.socket) -> tuple[int, str, str]:
    """Return status, Retry-After and message of an answer."""
    head, _, body = read_answer(sock).partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    (retry_after,) = [line.partition(": ")[2] for line in lines if line.startswith("retry-after:")]
    return int(lines[0].split(" ")[1]), retry_after, json.loads(body).get("Message", "")


def test_request_is_held_wakes_the_fleet_and_is_served(make_stage: MakeStage) -> None:
    """A boto3 client is served after the wait without an error."""
    zero = Zero(make_stage)
    answers: list[int] = []
    client = zero.stage.client()

    def ask() -> None:
        answer = client.invoke_endpoint(EndpointName="llava", Body=b"{}")
        answer["Body"].read()
        answers.append(answer["ResponseMetadata"]["HTTPStatusCode"])

    asking = Thread(target=ask)
    asking.start()
    zero.stage.until(lambda: waiting(zero.stage) == 1, "held")
    assert zero.wakes == 1
    zero.come()

    asking.join(60)
    assert answers == [200]


def test_all_that_is_held_is_served_in_the_end(make_stage: MakeStage) -> None:
    """All held requests are served, also those that one instance cannot take at once.

    Later ones find it busy as usual.
    """
    zero = Zero(make_stage)
    held = Held(zero.stage, zero.stage.a)
    socks = [send(zero.stage, body) for body in (b"1", b"2", b"3")]
    turn = send(zero.stage, b"turn", session=make_session_id("a"))
    zero.come()
    zero.stage.until(lambda: received(zero.stage.a) == [b"1"], "the first at a")

    late = send_raw(zero.stage, b"late")
    assert refused(late)[0] == 503
    for body in (b"1", b"2", b"3", b"turn"):
        held.let_go(body)

    assert [status(sock) for sock in (*socks, turn)] == [200] * 4


def test_hold_begins_when_the_body_is_whole(make_stage: MakeStage) -> None:
    """Until its body is whole a request starts no instance, and the hold then has its full time."""
    zero = Zero(make_stage)
    held = Held(zero.stage, zero.stage.a)
    body = b"x" * 20_000
    slow = zero.stage.socket()
    zero.stage.close_later(slow)
    slow.sendall(b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
    slow.sendall(body[:100])
    zero.stage.until(lambda: zero.stage.proxy.data.parts.arriving.num_bytes == 100, "its beginning there")
    assert (waiting(zero.stage), zero.wakes) == (0, 0)

    slow.sendall(body[100:])
    zero.stage.until(lambda: waiting(zero.stage) == 1, "the whole body there")
    zero.stage.pass_time(LONG.max_hold_s / 2)
    zero.come()
    held.let_go(body)

    assert (status(slow), zero.wakes) == (200, 1)


def send_raw(stage: Stage, body: bytes) -> socket.socket:
    """Send a request that may be answered at once."""
    sock = stage.send(
        b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    return sock


def test_turns_do_not_wait_for_a_busy_instance(make_stage: MakeStage) -> None:
    """A turn goes to its busy instance at once; only a fleet without an instance holds requests."""
    zero = Zero(make_stage)
    held = Held(zero.stage, zero.stage.a)
    zero.come()
    send(zero.stage, b"1")
    send(zero.stage, b"turn", session=make_session_id("a"))

    zero.stage.until(lambda: received(zero.stage.a) == [b"1", b"turn"], "both at a")
    for body in (b"1", b"turn"):
        held.let_go(body)


@pytest.mark.parametrize(
    ("started_s_ago", "last_s", "retry_after", "said"),
    [
        (3, 1000, range(900, 999), r"is being started, for \d+ s until now; the last start took 1000 s\. Try"),
        (30, 20, range(5, 6), r"is being started, for 3\d s until now; the last start took 20 s\. Try"),
        (2, None, range(5, 6), r"is being started, for \d+ s until now\. Try"),
        (None, None, range(5, 6), "could be started in time"),
    ],
)
def test_the_wait_is_bounded_and_ends_with_when_to_return(
    make_stage: MakeStage, started_s_ago: float | None, last_s: float | None, retry_after: range, said: str
) -> None:
    """The 503 ServiceUnavailable states the start's progress and the seconds that it will probably take."""
    zero = Zero(make_stage, SHORT)
    if last_s is not None:
        zero.took(last_s)
    if started_s_ago is not None:
        zero.begin(started_s_ago)

    code, seconds, message = refused(send_raw(zero.stage, b"{}"))

    assert (code, int(seconds) in retry_after) == (503, True), seconds
    assert re.search(said, message)
    assert waiting(zero.stage) == 0


def test_boto3_raises_service_unavailable(make_stage: MakeStage) -> None:
    zero = Zero(make_stage, SHORT)
    zero.begin(1)

    with pytest.raises(ClientError) as caught:
        zero.stage.client().invoke_endpoint(EndpointName="llava", Body=b"{}")

    assert caught.value.response["Error"]["Code"] == "ServiceUnavailable"
    assert "is being started" in caught.value.response["Error"]["Message"]


def test_a_client_that_leaves_is_held_no_longer(make_stage: MakeStage) -> None:
    """A disconnected client's request no longer counts in the backlog, so that no instance stays for it."""
    zero = Zero(make_stage)
    sock = send(zero.stage, b"1")

    sock.close()

    zero.stage.until(lambda: waiting(zero.stage) == 0, "forgotten")


def test_what_waits_for_an_endpoint_that_is_deleted_is_refused_at_once(make_stage: MakeStage) -> None:
    """No instance is started for it any longer, so its client does not wait until the hold is over."""
    zero = Zero(make_stage)
    sock = send(zero.stage, b"1")

    def delete() -> None:
        """Delete the endpoint, as the control plane does."""
        endpoint = zero.stage.registry.get_endpoint("llava")
        variant = endpoint.variants[0]
        variant.settings = variant.settings.replace(scaling=None)
        zero.stage.registry.retire(endpoint)
        zero.stage.registry.forget(endpoint)

    zero.stage.call(delete)

    assert b"No instance of the endpoint is ready. Try again later." in read_answer(sock)


def test_what_waits_for_a_variant_whose_scaling_ends_at_zero_is_refused_at_once(
    make_stage: MakeStage,
) -> None:
    """No instance is started for it any longer, as at AWS for a variant without instances."""
    zero = Zero(make_stage)
    sock = send(zero.stage, b"1")
    variant = zero.stage.registry.get_endpoint("llava").variants[0]

    def deregister() -> None:
        """End the scaling, as the control plane does."""
        variant.settings = variant.settings.replace(scaling=None)
        variant.on_starts_ended()

    zero.stage.call(deregister)

    assert b"No instance of the endpoint is ready. Try again later." in read_answer(sock)
    assert waiting(zero.stage) == 0


def test_as_many_are_held_as_may_be(make_stage: MakeStage) -> None:
    """The number of held requests, and the bytes of all that wait, are limited."""
    zero = Zero(make_stage, ScalingSettings(max_hold_s=20, max_held=2), limits=LimitSettings(max_waiting_bytes=100))
    send(zero.stage, b"x" * 60)
    code, _, message = refused(send_raw(zero.stage, b"x" * 60))
    assert (code, "Too many requests wait" in message) == (503, True)
    send(zero.stage, b"2")

    assert refused(send_raw(zero.stage, b"3"))[0] == 503
    zero.come()


def test_with_late_binding_too(make_stage: MakeStage) -> None:
    """With late binding, too, a request is held for as long as a start may take."""
    zero = Zero(make_stage, late_binding=LateBindingSettings(max_wait_s=1))
    sock = send(zero.stage, b"1")
    zero.stage.pass_time(LONG.max_hold_s / 2)  # longer than late binding lets requests wait
    assert waiting(zero.stage) == 1

    zero.come()

    assert status(sock) == 200


def test_a_client_who_waits_can_ask_how_far_the_start_is(make_stage: MakeStage) -> None:
    """GET /endpoints/NAME reports the start in DescribeEndpoint's form; `torchmoor chat` shows it."""
    zero = Zero(make_stage, credentials=Credentials(keys={"AKIAEXAMPLE": AccessKey(secret="a" * 20)}))
    zero.took(7)
    zero.begin(3)
    told: list[str] = []
    login = Login(keys={"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "a" * 20})

    with EndpointWatch(zero.stage.proxy.runtime_url, "llava", Signer(login), told.append, patience_s=0.01).waiting():
        wait_until(lambda: told, "the watch reports the progress")

    assert re.fullmatch(r"a is being started, for \d+ s until now; the last start took 7 s", told[0])
    assert zero.get("/endpoints/llava") == 403, "not without credentials"


def test_how_an_endpoint_does(make_stage: MakeStage) -> None:
    """Variants have DescribeEndpoint's names; an unknown endpoint gets the usual error."""
    zero = Zero(make_stage)
    zero.begin()

    with urllib.request.urlopen(f"{zero.stage.proxy.runtime_url}/endpoints/llava", timeout=60) as answer:
        described = json.load(answer)

    assert described["EndpointStatus"] == "InService"
    (variant,) = described["ProductionVariants"]
    assert (variant["VariantName"], variant["CurrentInstanceCount"], variant["DesiredInstanceCount"]) == (
        "AllTraffic",
        0,
        1,
    )
    assert variant["VariantStatus"] == [{"Status": "Creating", "StatusMessage": "a is being started"}]
    assert zero.get("/endpoints/other") == 400


def test_several_variants_at_zero(make_stage: MakeStage) -> None:
    """A turn is held for its own variant, by the name of its absent instance; other requests are held by weight.

    While one variant has an instance, requests without a variant go there.
    """
    variants = (
        VariantSettings(name="blue", model="llava", scaling=ScalingSettings(max_hold_s=20, max_capacity=2), weight=0),
        VariantSettings(name="green", model="llava", scaling=LONG),
    )
    stage = make_stage(variants=variants, names=("a",), homes={"a": "blue"})
    blue, green = stage.proxy.data.dispatchers.all()

    stage.call(stage.registry.drain, "a")
    for body, session in ((b"1", make_session_id("llava-blue-0")), (b"2", None)):
        sock = stage.socket()
        stage.close_later(sock)
        line = "" if session is None else f"X-Amzn-SageMaker-Session-Id: {session}\r\n"
        head = f"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\n{line}Content-Length: 1\r\n\r\n"
        sock.sendall(head.encode() + body)
    stage.until(lambda: (blue.num_waiting, green.num_waiting) == (1, 1), "each held by its variant")

    stage.call(stage.registry.resume, "a")

    stage.until(lambda: received(stage.a) == [b"1"], "the turn at the instance of blue")
    assert status(send_raw(stage, b"3")) == 200
    assert green.num_waiting == 1
    sock.close()
    stage.until(lambda: green.num_waiting == 0, "forgotten")


@pytest.mark.parametrize("is_new", [False, True])
def test_a_drained_instance_that_restarts_leaves_no_room_either(make_stage: MakeStage, is_new: bool) -> None:
    """An instance that restarts while drained stays drained, so requests are answered at once."""
    zero = Zero(make_stage)
    zero.come()
    zero.drain()
    if is_new:
        zero.begin()
    else:
        zero.set_state(InstanceState.DOWN)

    code, _, message = refused(send_raw(zero.stage, b"{}"))

    assert code == 503
    assert message.startswith("No instance of the endpoint is ready")
    assert (zero.wakes, zero.get("/ping")) == (0, 503)
    zero.resume()
    assert zero.get("/ping") == 200


def test_a_drain_that_leaves_no_room_for_another_instance_is_answered_at_once(
    make_stage: MakeStage,
) -> None:
    """If a drained instance prevents a start, requests are refused at once, unless the autoscaler drains it."""
    zero = Zero(make_stage)
    zero.come()
    zero.drain()

    code, seconds, message = refused(send_raw(zero.stage, b"{}"))

    assert (code, seconds) == (503, "5")
    assert message.startswith("No instance of the endpoint is ready")
    assert (zero.wakes, zero.get("/ping")) == (0, 503)
    zero.stage.instance("a").is_resumable = True
    sock = send(zero.stage, b"1")
    assert zero.wakes == 1
    zero.resume()
    assert status(sock) == 200


def test_a_request_that_is_lost_with_the_only_instance_waits_for_its_replacement(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost request is held from the moment a probe finds its only instance gone.

    The replacement has the same name.
    """
    monkeypatch.setattr("torchmoor.proxy.dispatch.dispatcher.PROBE_S", LONG.max_hold_s)  # the test is the probe
    zero = Zero(make_stage)
    zero.come()
    zero.stage.a.behave = dying
    sock = send(zero.stage, b"1")
    zero.stage.until(lambda: zero.wakes == 1 and not zero.stage.proxy.health.is_probing, "lost and held")

    zero.stage.a.behave = answering()
    zero.set_state(InstanceState.DOWN)
    zero.stage.pass_time(LONG.max_hold_s / 2)
    assert waiting(zero.stage) == 1
    zero.come()

    assert status(sock) == 200
    metrics = zero.stage.proxy.data.dispatchers.all()[0].metrics
    assert metrics.retries == 1


def test_a_stream_that_is_lost_with_the_only_instance_goes_on_at_its_replacement(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose stream loses its only instance notices only the start of the next one."""
    monkeypatch.setattr("torchmoor.proxy.dispatch.dispatcher.PROBE_S", LONG.max_hold_s)  # the test is the probe
    zero = Zero(make_stage)
    zero.come()
    take_turns(zero.stage, saying(0, 2, b""), saying(2))
    answer = zero.stage.ask("POST", "/invocations", BODY, {"Content-Type": "application/json"})
    zero.stage.until(lambda: zero.wakes == 1 and not zero.stage.proxy.health.is_probing, "lost and held")

    zero.set_state(InstanceState.DOWN)
    zero.come()

    assert answer.read().decode() == "".join(WORDS)


def test_a_request_that_an_instance_refuses_to_receive_waits_for_its_replacement(
    make_stage: MakeStage,
) -> None:
    """A request whose connection is refused waits for the replacement."""
    zero = Zero(make_stage)
    zero.come()
    zero.stage.run(zero.stage.a.die())
    sock = send(zero.stage, b"1")
    zero.stage.until(lambda: zero.wakes == 1, "refused and held")
    assert zero.stage.instance("a").state is InstanceState.DOWN

    zero.stage.run(zero.stage.a.start())
    zero.set_state(InstanceState.READY)

    assert status(sock) == 200


def test_a_request_that_is_lost_by_an_instance_that_stays_is_answered_soon(make_stage: MakeStage) -> None:
    """A lost request whose instance stays is answered soon; a turn that no replacement can continue does not wait."""
    zero = Zero(make_stage)
    zero.come()
    zero.stage.a.behave = dying
    sock = send(zero.stage, b"1")
    zero.stage.until(lambda: zero.wakes == 1, "lost and held")

    zero.stage.pass_time(PROBE_S)

    answer = read_answer(sock)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"The instance that was to answer is gone." in answer
    turn = zero.stage.socket()
    zero.stage.close_later(turn)
    turn.sendall(
        b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nX-Amzn-SageMaker-Session-Id: %b\r\n"
        b"Content-Length: 2\r\n\r\n{}" % make_session_id("a").encode()
    )
    assert b"The instance that was to answer is gone." in read_answer(turn)


def test_health_at_zero(make_stage: MakeStage) -> None:
    """A fleet without instances is healthy while no request needs one, unless MinCapacity requires one."""
    zero = Zero(make_stage)
    assert (zero.get("/healthz", admin=True), zero.get("/ping")) == (200, 200)

    never = Zero(make_stage, ScalingSettings(min_capacity=1, initial_count=1))
    assert (never.get("/healthz", admin=True), never.get("/ping")) == (503, 503)
