"""Strategies that look at the body, variants, and new sessions, over real sockets."""

import json
from collections import Counter
from typing import Any

import pytest

from tests.proxy.conftest import NO_PROBES, MakeStage, Stage, make_session_id, read_answer
from tests.proxy.fake_instance import Gate, answering, refusing
from torchmoor.config.credentials import AccessKey, Credentials
from torchmoor.config.limits import LimitSettings
from torchmoor.config.routing import KvAwareSettings, PrefixAwareSettings, VariantSettings
from torchmoor.proxy.instances.instance import InstanceState

PREFIX_AWARE = VariantSettings(
    model="llava",
    routing_strategy="PREFIX_AWARE",
    prefix_aware=PrefixAwareSettings(prefix_length=1024, concurrency_threshold=2),
)
KV_AWARE = VariantSettings(
    model="llava",
    routing_strategy="KV_AWARE",
    kv_aware=KvAwareSettings(block_bytes=64, bytes_per_request=64, max_prompt_bytes=4096),
)
INVOKE = "POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\n"


def where(answer: Any) -> tuple[str, str]:
    """Return the instance that answered and the reason."""
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    return headers["x-torchmoor-instance"], headers["x-amzn-sagemaker-invoked-routing-reason"]


def ask(client: Any, body: bytes, **members: Any) -> tuple[str, str]:
    answer = client.invoke_endpoint(EndpointName="llava", Body=body, **members)
    answer["Body"].read()
    return where(answer)


# PREFIX_AWARE


def test_requests_with_one_prefix_go_to_one_instance(make_stage: MakeStage) -> None:
    """Requests with one prefix go to one instance, whatever follows; another prefix may go to another one."""
    stage = make_stage(variants=(PREFIX_AWARE,), names=("a", "b", "c"))
    client = stage.client()

    owners = {
        number: {ask(client, (b"%d " % number) * 600 + tail) for tail in (b"", b"x", b"y" * 100_000)}
        for number in range(12)
    }

    assert all(len(found) == 1 for found in owners.values())
    assert len({name for found in owners.values() for name, _ in found}) == 3
    assert {reason for found in owners.values() for _, reason in found} == {"prefix-aware"}
    assert {len(request.body) for fake in stage.instances.values() for request in fake.received} <= {
        length + tail for length in (1200, 1800) for tail in (0, 1, 100_000)
    }


def test_prefix_id_of_the_client_counts(make_stage: MakeStage) -> None:
    """boto3's PrefixAwareId is part of the prefix."""
    stage = make_stage(variants=(PREFIX_AWARE,), names=("a", "b", "c"))
    client = stage.client()

    owners = [ask(client, b"{}", PrefixAwareId=f"application {number}")[0] for number in range(12)]

    assert len(set(owners)) == 3
    assert owners == [ask(client, b"{}", PrefixAwareId=f"application {number}")[0] for number in range(12)]


def test_prefix_goes_elsewhere_while_its_instance_is_at_the_threshold(make_stage: MakeStage) -> None:
    """With two requests in flight at its instance, the third goes to the next one with that reason."""
    stage = make_stage(variants=(PREFIX_AWARE,))
    client = stage.client()
    owner = stage.instances[ask(client, b"prompt")[0]]
    gate = Gate()
    owner.behave = gate.behave
    waiting = []
    for _ in range(2):
        sock = stage.send(f"{INVOKE}Content-Length: 6\r\n\r\nprompt".encode())
        waiting.append(sock)
    stage.until(lambda: stage.instance(owner.name).outstanding == 2, "both in flight")

    name, reason = ask(client, b"prompt")

    assert (name != owner.name, reason) == (True, "prefix-aware-overflow")
    gate.open()
    for sock in waiting:
        assert read_answer(sock).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_request_is_sent_on_once_its_body_has_come(make_stage: MakeStage, is_chunked: bool) -> None:
    """A request is sent once its whole body has arrived, because an instance cannot use a part of it."""
    stage = make_stage(variants=(PREFIX_AWARE,), names=("a",))
    framing = "Transfer-Encoding: chunked" if is_chunked else "Content-Length: 22000"

    def piece(data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data

    with stage.socket() as sock:
        sock.sendall(f"{INVOKE}{framing}\r\n\r\n".encode() + piece(b"a" * 1000))
        sock.sendall(piece(b"b" * 1000))
        stage.until(lambda: stage.proxy.data.parts.arriving.num_bytes == 2000, "two pieces there")
        assert stage.outstanding() == 0
        sock.sendall(piece(b"c" * 20_000) + (b"0\r\n\r\n" if is_chunked else b""))
        assert read_answer(sock).startswith(b"HTTP/1.1 200")

    assert stage.a.received[0].body == b"a" * 1000 + b"b" * 1000 + b"c" * 20_000


def test_expected_body_is_asked_for_before_the_instance_is_known(make_stage: MakeStage) -> None:
    """The proxy sends `100 Continue` before it chooses an instance, because the prefix is in the body."""
    stage = make_stage(variants=(PREFIX_AWARE,), names=("a",))

    with stage.socket() as sock:
        sock.sendall(f"{INVOKE}Content-Length: 5\r\nExpect: 100-continue\r\n\r\n".encode())
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"hello")
        assert read_answer(sock).startswith(b"HTTP/1.1 200")

    assert stage.a.received[0].body == b"hello"


def test_request_without_a_body_is_routed_too(make_stage: MakeStage) -> None:
    """A request without a body has an empty prefix."""
    stage = make_stage(variants=(PREFIX_AWARE,), names=("a",))

    assert stage.raw(f"{INVOKE}Content-Length: 0\r\n\r\n".encode()).startswith(b"HTTP/1.1 200")
    assert stage.raw(f"{INVOKE}\r\n".encode()).startswith(b"HTTP/1.1 200")


def test_client_that_leaves_before_its_prefix_has_come_was_never_sent(make_stage: MakeStage) -> None:
    """A client that disconnects before its prefix has arrived causes no lease."""
    stage = make_stage(variants=(PREFIX_AWARE,))

    with stage.socket() as sock:
        sock.sendall(f"{INVOKE}Content-Length: 5000\r\n\r\nabc".encode())
        stage.until(lambda: len(stage.proxy.data.server.connections) == 1, "the connection")
    stage.until(lambda: not stage.proxy.data.server.connections, "the connection gone")

    assert stage.a.received == stage.b.received == []


def test_body_that_outgrows_its_limit_before_its_prefix_has_come_is_refused(make_stage: MakeStage) -> None:
    """A body beyond its limit is refused even if the limit is smaller than the prefix."""
    stage = make_stage(variants=(PREFIX_AWARE,), limits=LimitSettings(max_body_bytes=500))

    answer = stage.raw(f"{INVOKE}Transfer-Encoding: chunked\r\n\r\n3e8\r\n".encode() + b"a" * 1000 + b"\r\n")

    assert answer.startswith(b"HTTP/1.1 400")
    assert stage.a.received == stage.b.received == []


def test_no_instance_is_told_once_the_prefix_has_come(make_stage: MakeStage) -> None:
    """Without an instance, the answer comes after the whole body, so that the connection can be reused."""
    stage = make_stage(variants=(PREFIX_AWARE,), names=("a",))
    stage.set_state(InstanceState.DOWN)

    with stage.socket() as sock:
        sock.sendall(f"{INVOKE}Content-Length: 4\r\n\r\nbody".encode())
        assert read_answer(sock).startswith(b"HTTP/1.1 503")
        stage.set_state(InstanceState.READY)
        sock.sendall(f"{INVOKE}Content-Length: 4\r\n\r\nbody".encode())
        assert read_answer(sock).startswith(b"HTTP/1.1 200")


def test_instance_that_refuses_a_prefix_is_replaced_by_the_next(make_stage: MakeStage) -> None:
    """If an instance refuses, the next one gets the whole body."""
    stage = make_stage(variants=(PREFIX_AWARE,))
    for fake in stage.instances.values():
        fake.behave = refusing(503, None, "no worker")
    owner = ask_refused(stage)
    other = stage.b if owner == "a" else stage.a
    other.behave = answering()

    assert ask(stage.client(), b"prompt" * 500) == (other.name, "retry")
    assert other.received[-1].body == b"prompt" * 500


def ask_refused(stage: Stage) -> str:
    """Return the instance that was asked first when all refuse."""
    client = stage.client()
    with pytest.raises(client.exceptions.ServiceUnavailable):
        client.invoke_endpoint(EndpointName="llava", Body=b"prompt" * 500)
    return "a" if len(stage.a.received) > len(stage.b.received) or stage.a.received else "b"


# KV_AWARE


def test_conversation_that_is_sent_again_goes_where_its_beginning_was_served(make_stage: MakeStage) -> None:
    """Each conversation stays at its instance while others spread, and the reason says so."""
    stage = make_stage(variants=(KV_AWARE,), names=("a", "b", "c"))
    client = stage.client()
    firsts = {name: ask(client, name.encode() * 300) for name in "uvw"}

    seconds = {name: ask(client, name.encode() * 300 + b"and more") for name in "wuv"}

    assert {name for name, _ in firsts.values()} == {"a", "b", "c"}
    assert {reason for _, reason in firsts.values()} == {"least-outstanding-requests"}
    assert seconds == {name: (firsts[name][0], "kv-aware") for name in "uvw"}


def test_answer_that_shows_an_evicted_prompt_corrects_the_view(make_stage: MakeStage) -> None:
    """After a receipt without cached tokens, older prompts are not expected at that instance either."""
    stage = make_stage(variants=(KV_AWARE,))
    client = stage.client()
    receipt = {"X-Torchmoor-Context-Tokens": "100", "X-Torchmoor-Prefill-Tokens": "100"}
    for fake in stage.instances.values():
        fake.behave = answering(headers=receipt)
    older, asked = b"o" * 300, b"p" * 300
    home = ask(client, older)[0]
    other = ask(client, b"r" * 300)[0]
    assert home != other
    stage.set_state(InstanceState.DRAINING, other)
    assert ask(client, asked)[0] == home

    assert ask(client, asked) == (home, "kv-aware")

    stage.set_state(InstanceState.READY, other)
    assert ask(client, older)[1] == "least-outstanding-requests"


def test_receipt_of_a_held_prompt_changes_nothing(make_stage: MakeStage) -> None:
    """A receipt of a cached prompt changes nothing, and one that is not a number is ignored."""
    stage = make_stage(variants=(KV_AWARE,), names=("a",))
    client = stage.client()
    for kept in ("40", "many"):
        receipt = {"X-Torchmoor-Context-Tokens": "100", "X-Torchmoor-Prefill-Tokens": kept}
        stage.a.behave = answering(headers=receipt)
        ask(client, b"old" * 100)
        ask(client, b"new" * 100)
        assert ask(client, b"new" * 100)[1] == "kv-aware"

    assert ask(client, b"old" * 100)[1] == "kv-aware"


def test_instance_that_was_down_holds_nothing(make_stage: MakeStage) -> None:
    """An instance that was down, whose process may be new, holds no prompts."""
    stage = make_stage(variants=(KV_AWARE,), names=("a",))
    client = stage.client()
    ask(client, b"p" * 300)

    for state in (InstanceState.DOWN, InstanceState.READY):
        stage.set_state(state, "a")

    assert ask(client, b"p" * 300)[1] == "least-outstanding-requests"


# Variants

BLUE = VariantSettings(name="blue", model="llava", weight=3)
GREEN = VariantSettings(name="green", model="llava-next", weight=1)
HOMES = {"a": "blue", "b": "green"}


def test_traffic_is_split_by_weight_and_each_variant_serves_its_own_model(make_stage: MakeStage) -> None:
    """The answer names the variant, which the metrics count by."""
    stage = make_stage(variants=(BLUE, GREEN), homes=HOMES)
    client = stage.client()

    answers = [client.invoke_endpoint(EndpointName="llava", Body=b"{}") for _ in range(80)]

    counts = Counter((answer["InvokedProductionVariant"], where(answer)[0]) for answer in answers)
    assert set(counts) == {("blue", "a"), ("green", "b")}
    assert 48 < counts["blue", "a"] < 72
    assert {request.path for request in stage.a.received} == {"/predictions/llava"}
    assert {request.path for request in stage.b.received} == {"/predictions/llava-next"}
    invocations = {d.variant.name: d.metrics.invocations for d in stage.proxy.data.dispatchers.all()}
    assert invocations == {"blue": counts["blue", "a"], "green": counts["green", "b"]}


def test_target_variant_goes_before_weights(make_stage: MakeStage) -> None:
    """TargetVariant overrides weights, also for a variant of weight 0; the error for an unknown one lists all."""
    stage = make_stage(variants=(GREEN.replace(weight=0), BLUE), homes=HOMES)
    client = stage.client()

    answers = [client.invoke_endpoint(EndpointName="llava", Body=b"{}", TargetVariant="green") for _ in range(5)]

    assert {answer["InvokedProductionVariant"] for answer in answers} == {"green"}
    assert {ask(client, b"{}")[0] for _ in range(10)} == {"a"}
    with pytest.raises(client.exceptions.ClientError, match=r"Variant red not found .* of the endpoint: blue, green\."):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}", TargetVariant="red")


def test_variant_without_a_ready_instance_gets_no_traffic_unless_it_is_named(make_stage: MakeStage) -> None:
    """The other variants take its share; a request that names it gets an error."""
    stage = make_stage(variants=(BLUE, GREEN), homes=HOMES)
    stage.set_state(InstanceState.DOWN, "a")
    client = stage.client()

    assert {ask(client, b"{}")[0] for _ in range(10)} == {"b"}
    with pytest.raises(client.exceptions.ServiceUnavailable):
        client.invoke_endpoint(EndpointName="llava", Body=b"{}", TargetVariant="blue")


def test_session_stays_with_its_variant(make_stage: MakeStage) -> None:
    """The session's instance decides, also after an adoption, and neither weights nor TargetVariant do."""
    stage = make_stage(variants=(BLUE, GREEN), homes={**HOMES, "c": "green"}, names=("a", "b", "c"))
    client = stage.client()
    session = make_session_id("b")

    for members in ({}, {"TargetVariant": "blue"}):
        assert ask(client, b"{}", SessionId=session, **members) == ("b", "session")
    stage.set_state(InstanceState.DOWN, "b")
    assert ask(client, b"{}", SessionId=session) == ("c", "session-failover")


def test_session_of_a_forgotten_instance_goes_where_all_proxies_agree(make_stage: MakeStage) -> None:
    """A session of an unknown instance always goes to the same other one, of any variant."""
    stage = make_stage(variants=(BLUE, GREEN), homes=HOMES)
    client = stage.client()

    owners = {text: {ask(client, b"{}", SessionId=make_session_id(text)) for _ in range(4)} for text in "klmnopqrst"}

    assert all(len(found) == 1 for found in owners.values())
    assert {name for found in owners.values() for name, _ in found} == {"a", "b"}


def test_torchserve_path_chooses_the_variant_of_its_model(make_stage: MakeStage) -> None:
    """A model's name in TorchServe's path selects its variant; the container's dialect uses weights."""
    stage = make_stage(variants=(BLUE, GREEN.replace(weight=0)), homes=HOMES)
    connection = stage.http()

    for path, fake in (("/predictions/llava-next", stage.b), ("/predictions/llava", stage.a)):
        connection.request("POST", path, b"{}")
        assert connection.getresponse().read() == b"{}"
        assert fake.received[-1].path == path
    connection.request("POST", "/invocations", b"{}")
    connection.getresponse().read()
    assert stage.a.received[-1].path == "/predictions/llava"


# New sessions


def test_new_session_goes_to_the_instance_with_the_most_room(make_stage: MakeStage) -> None:
    """The most room by instances' reports, less sessions sent since, decides; without reports the load does."""
    stage = make_stage(health=NO_PROBES.replace(status_interval_s=3600))
    a, b = stage.instance("a"), stage.instance("b")
    for fake, room in ((stage.a, 5), (stage.b, 7)):
        fake.on_status = answering(body=json.dumps({"sessions": {"open": 0, "max": room}}).encode())
    client = stage.client()
    assert ask(client, b"{}", SessionId="NEW_SESSION")[1] == "least-outstanding-requests"
    stage.until(lambda: (a.session_room, b.session_room) == (5, 7), "both have reported their room")

    owners = [ask(client, b"{}", SessionId="NEW_SESSION") for _ in range(4)]

    assert owners[:2] == [("b", "session-room")] * 2
    assert {name for name, _ in owners[2:]} == {"a", "b"}
    assert (a.session_room, b.session_room) == (4, 4)
    assert ask(client, b"{}")[1] == "least-outstanding-requests"


def test_metrics_name_the_variant(make_stage: MakeStage) -> None:
    """Every family of metrics has both labels; the number of waiting requests is a gauge."""
    stage = make_stage(variants=(BLUE, GREEN), homes=HOMES)
    ask(stage.client(), b"{}", TargetVariant="green")

    text, rows = stage.admin("/metrics").text, stage.admin("/instances").json()["instances"]

    assert 'Invocations_total{endpoint="llava",variant="green"} 1.0' in text
    assert 'Invocations_total{endpoint="llava",variant="blue"} 0.0' in text
    assert 'WaitingInvocations{endpoint="llava",variant="blue"} 0.0' in text
    assert {row["name"]: row["variant"] for row in rows} == HOMES


# Sessions that only the body names


def turn(session: str, **more: object) -> bytes:
    return json.dumps({"type": "send_text_prompt", **more, "session_id": session}).encode()


@pytest.mark.parametrize("journaled", [False, True])
@pytest.mark.parametrize("path", ["/endpoints/llava/invocations", "/invocations", "/predictions/llava"])
def test_session_that_only_the_body_names_goes_to_its_instance(
    make_stage: MakeStage, path: str, journaled: bool
) -> None:
    """An id in the body instead of the header selects the session's instance."""
    stage = make_stage(names=("a", "b", "c"), are_journaled=journaled)
    connection = stage.http()

    for name in ("a", "b", "c") * 2:
        body = turn(make_session_id(name))
        connection.request("POST", path, body)
        answer = connection.getresponse()
        answer.read()

        assert answer.headers["x-torchmoor-instance"] == name
        assert answer.headers["x-amzn-sagemaker-invoked-routing-reason"] == "session"
        assert stage.instances[name].received[-1].body == body


@pytest.mark.parametrize(
    "body",
    [
        turn("ts-seq-of-somebody-else"),
        turn(make_session_id("b", endpoint="other")),
        turn("NEW_SESSION"),
        turn("no session\u00e9"),
        b'{"session_id": 7}',
        b'["session_id"]',
        b'{"session_id": "',
        b'{"x": ' + b"[" * 12_000 + b'"session_id"',
        b"\xff\x00" + b'"session_id"',
        turn(make_session_id("b"), prompt_text="x" * 20_000),
    ],
)
def test_body_without_a_session_of_ours_is_passed_on_like_any(make_stage: MakeStage, body: bytes) -> None:
    """A body without a known session is forwarded; one beyond the limit is not searched."""
    stage = make_stage(names=("a", "b"))
    client = stage.client()

    assert {ask(client, body) for _ in range(2)} == {
        ("a", "least-outstanding-requests"),
        ("b", "least-outstanding-requests"),
    }

    assert {request.body for fake in stage.instances.values() for request in fake.received} == {body}


def test_session_that_only_the_body_names_chooses_its_variant(make_stage: MakeStage) -> None:
    """A session in the body selects its variant, whatever the weights, like one in the header."""
    variants = (VariantSettings(model="one", name="one", weight=1), VariantSettings(model="two", name="two", weight=1))
    stage = make_stage(variants=variants, homes={"a": "one", "b": "two"})
    client = stage.client()

    for name, model in (("a", "one"), ("b", "two")) * 4:
        assert ask(client, turn(make_session_id(name)))[0] == name
        assert stage.instances[name].received[-1].path == f"/predictions/{model}"


def test_session_in_the_body_of_a_signed_request_counts(make_stage: MakeStage) -> None:
    """A session in a signed body counts once the signature is verified, and only if it is the caller's own."""
    credentials = Credentials(keys={"AKIAEXAMPLE": AccessKey(secret="a-secret-of-sixteen")})
    stage = make_stage(names=("a", "b", "c"), credentials=credentials)
    client = stage.client(secret="a-secret-of-sixteen")
    assert ask(client, b"{}")[1] == "least-outstanding-requests"
    principal = next(
        fake.received[0].headers["x-torchmoor-principal"] for fake in stage.instances.values() if fake.received
    )

    assert [ask(client, turn(make_session_id("c", principal=principal)))[0] for _ in range(3)] == ["c"] * 3
    assert ask(client, turn(make_session_id("c", principal="else")))[1] == "least-outstanding-requests"


# Openings that are sent again


def open_session(stage: Stage, invocation_id: str) -> tuple[str, str]:
    connection = stage.http()
    headers = {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION", "amz-sdk-invocation-id": invocation_id}
    connection.request("POST", "/endpoints/llava/invocations", b"{}", headers)
    answer = connection.getresponse()
    answer.read()
    return answer.headers["x-torchmoor-instance"], answer.headers["x-amzn-sagemaker-invoked-routing-reason"]


def test_opening_that_is_sent_again_goes_to_its_instance(make_stage: MakeStage) -> None:
    """Without a journal a repeated opening goes to its instance, which has its session.

    If that is away, another opens one.
    """
    stage = make_stage(names=("a", "b", "c"))

    first, _ = open_session(stage, "one")

    assert {open_session(stage, f"other {number}")[0] for number in range(6)} == {"a", "b", "c"}
    assert {open_session(stage, "one") for _ in range(3)} == {(first, "session")}
    stage.set_state(InstanceState.DOWN, first)
    second, _ = open_session(stage, "one")
    assert second != first
    stage.set_state(InstanceState.READY, first)
    assert open_session(stage, "one") == (second, "session")


def test_openings_that_are_remembered_are_bounded(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembered openings are limited, the oldest first.

    With a journal none is remembered, as all instances know them.
    """
    monkeypatch.setattr("torchmoor.proxy.dispatch.chooser.MAX_REMEMBERED_OPENINGS", 2)
    stage, journaled = make_stage(), make_stage(are_journaled=True)

    for invocation_id in ("one", "two", "one", "three"):
        open_session(stage, invocation_id)
        open_session(journaled, invocation_id)

    again = [open_session(stage, invocation_id)[1] == "session" for invocation_id in ("one", "three", "two")]
    assert again == [True, True, False]
    assert open_session(journaled, "three")[1] != "session"
