"""Bodies in flight: an instance gets at most the bytes that its JVM can hold, and their count returns to zero."""

import socket
from pathlib import Path

import pytest

from tests.proxy.conftest import MakeStage, Stage, make_session_id, read_answer
from tests.proxy.fake_instance import dying, refusing
from tests.proxy.test_late_binding import LATE, Held, received, send, status, waiting
from tests.waiting import wait_until
from torchmoor.config.limits import LimitSettings
from torchmoor.proxy.instances.instance import Instance

MAX_BYTES = 100
LONG = b"x" * 60  # one fits, two do not
SHORT = b"y" * 40  # fits beside a long one


def limited(make_stage: MakeStage, **options: object) -> Stage:
    """Return two instances that hold MAX_BYTES of bodies each."""
    return make_stage(**{"max_inflight_body_bytes": 2 * MAX_BYTES, **options})  # short bodies count twice


def body_bytes(stage: Stage) -> dict[str, int]:
    return {instance.name: instance.inflight_body_bytes // 2 for instance in stage.registry.instances()}


def until_received(stage: Stage, **expected: list[bytes]) -> None:
    """Wait until each instance has received these bodies, in this order."""
    found = {name: stage.instances[name] for name in expected}
    stage.until(lambda: all(received(found[name]) == bodies for name, bodies in expected.items()), f"{expected}")


def ask(body: bytes, *, path: str = "/endpoints/llava/invocations", more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_instance_without_room_is_passed_over(make_stage: MakeStage) -> None:
    """An instance with room gets the body even if it has more requests; if no instance has room, the answer is 503."""
    stage = limited(make_stage)
    held = Held(stage, stage.a, stage.b)
    turns = [send(stage, body, session=make_session_id("b")) for body in (b"1", b"2")]
    socks = [*turns, send(stage, LONG), send(stage, LONG)]
    until_received(stage, a=[LONG], b=[b"1", b"2", LONG])
    assert body_bytes(stage) == {"a": 60, "b": 62}

    refused = stage.raw(ask(LONG))
    socks.append(send(stage, b"z" * 30))

    assert refused.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in refused
    assert b"All instances of the endpoint are busy" in refused
    assert stage.proxy.data.dispatchers.all()[0].metrics.no_capacity == 1
    for body in (LONG, b"1", b"2", b"z" * 30):
        held.let_go(body)
    assert [status(sock) for sock in socks] == [200] * 5
    stage.until(lambda: set(body_bytes(stage).values()) == {0}, "all bytes counted back")
    assert stage.raw(ask(LONG)).startswith(b"HTTP/1.1 200")


def test_turn_stays_with_its_instance(make_stage: MakeStage) -> None:
    """A turn stays with its instance, although another could rebuild the session, if only room is lacking."""
    stage = limited(make_stage, are_journaled=True)
    held = Held(stage, stage.a, stage.b)
    first = send(stage, LONG, session=make_session_id("a"))

    line = f"X-Amzn-SageMaker-Session-Id: {make_session_id('a')}\r\n"
    refused = stage.raw(ask(LONG, more=line))

    assert refused.startswith(b"HTTP/1.1 503")
    assert received(stage.b) == []
    held.let_go(LONG)
    assert status(first) == 200
    assert stage.raw(ask(LONG, more=line)).startswith(b"HTTP/1.1 200")
    assert received(stage.a) == [LONG, LONG]


@pytest.mark.parametrize(
    ("path", "expected"), [("/endpoints/llava/invocations", b"400"), ("/invocations", b"413")], ids=["runtime", "other"]
)
def test_body_that_no_instance_can_hold_is_refused_at_once(make_stage: MakeStage, path: str, expected: bytes) -> None:
    """A body too large for every instance is not refused with 503, after which clients would retry in vain."""
    stage = limited(make_stage, late_binding=LATE)

    answer = stage.raw(ask(b"x" * (MAX_BYTES + 1), path=path))

    assert answer.startswith(b"HTTP/1.1 " + expected)
    assert b"longer than the limit of 100 bytes" in answer
    assert received(stage.a) + received(stage.b) == []


def test_long_bodies_wait_for_room(make_stage: MakeStage) -> None:
    """With late binding a long body waits for room while shorter ones pass; a turn waits for its own instance."""
    stage = limited(make_stage, late_binding=LATE, names=("a",))
    held = Held(stage, stage.a)
    socks = [send(stage, LONG), send(stage, b"v" * 50), send(stage, b"w" * 55, session=make_session_id("a"))]
    assert waiting(stage) == 2
    socks.append(send(stage, SHORT))
    until_received(stage, a=[LONG, SHORT])

    held.let_go(LONG)
    until_received(stage, a=[LONG, SHORT, b"w" * 55])
    held.let_go(SHORT)
    held.let_go(b"w" * 55)
    held.let_go(b"v" * 50)

    assert [status(sock) for sock in socks] == [200] * 4
    assert stage.proxy.data.dispatchers.waiting_bytes.used_bytes == 0


def begin_chunked(stage: Stage, first: bytes) -> socket.socket:
    sock = stage.send(
        b"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(first)
    )
    return sock


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_body_without_a_length_counts_once_it_is_whole(make_stage: MakeStage) -> None:
    """A body without a length gets 503 if there is no room, and 400 before its end if no instance can hold it.

    Both counts return to zero.
    """
    stage = limited(make_stage, names=("a",))
    held = Held(stage, stage.a)
    other = send(stage, LONG)
    growing = begin_chunked(stage, b"x" * 30)
    stage.until(lambda: arriving(stage) == 30, "the first chunk counted")
    assert body_bytes(stage) == {"a": 60}

    growing.sendall(chunk(b"x" * 20) + b"0\r\n\r\n")
    busy = read_answer(growing)
    held.let_go(LONG)
    assert status(other) == 200
    endless = begin_chunked(stage, b"x" * 70)
    endless.sendall(chunk(b"x" * 70))
    too_long = read_answer(endless)

    assert busy.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in busy
    assert too_long.startswith(b"HTTP/1.1 400")
    assert b"longer than the limit of 100 bytes" in too_long
    assert (arriving(stage), body_bytes(stage)) == (0, {"a": 0})


def arriving(stage: Stage) -> int:
    return stage.proxy.data.parts.arriving.num_bytes


@pytest.mark.parametrize("num_sent", [0, 1])
def test_bodies_that_are_declared_and_not_sent_take_no_room(make_stage: MakeStage, num_sent: int) -> None:
    """Declared bytes that are not sent take no room: other requests are answered, also from the same address."""
    stage = limited(make_stage)
    silent = [stage.socket() for _ in range(20)]
    for sock in silent:
        stage.close_later(sock)
        sock.sendall(ask(LONG)[: num_sent - len(LONG)])
    stage.until(lambda: len(stage.proxy.data.server.connections) == 20, "all connected")
    stage.until(lambda: arriving(stage) == 20 * num_sent, "all heads read")

    answers = [stage.raw(ask(LONG)) for _ in range(3)]

    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * 3
    stage.until(lambda: set(body_bytes(stage).values()) == {0}, "all bytes counted back")
    silent[0].sendall(LONG[num_sent:])
    assert status(silent[0]) == 200
    for sock in silent:
        sock.close()


def test_bodies_that_arrive_slowly_make_room_for_others(make_stage: MakeStage) -> None:
    """Slow bodies make room for others, also without credentials; a dropped one gets 503 with Retry-After."""
    limits = LimitSettings(max_body_bytes=100, max_passthrough_body_bytes=100, max_arriving_bytes=150)
    stage = limited(make_stage, limits=limits)
    slow = []
    for number in range(1, 4):
        slow.append(stage.socket())
        stage.close_later(slow[-1])
        slow[-1].sendall(ask(LONG)[:-20])
        if number < 3:
            stage.until(lambda: arriving(stage) == 40 * number, "another one there")  # noqa: B023
    stage.until(lambda: arriving(stage) == 120, "all there")
    good = stage.socket()
    stage.close_later(good)

    good.sendall(ask(LONG)[:-10])
    dropped = read_answer(slow[0])
    good.sendall(LONG[-10:])

    assert dropped.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in dropped
    assert status(good) == 200
    for sock in slow[1:]:
        sock.sendall(LONG[-20:])
        assert status(sock) == 200


def test_bytes_are_counted_back_whatever_ends_the_request(make_stage: MakeStage) -> None:
    """An error, a disconnect, an instance's death and a retry at another instance return the bytes to the count."""
    stage = limited(make_stage)
    held = Held(stage, stage.a)
    leaving = send(stage, LONG, session=make_session_id("a"))
    leaving.close()
    stage.until(lambda: body_bytes(stage)["a"] == 0, "counted back after the client left")
    held.let_go(LONG)

    stage.a.behave = stage.b.behave = refusing(400, "InvalidRequest", "no question")
    assert stage.raw(ask(LONG)).startswith(b"HTTP/1.1 424")
    stage.until(lambda: set(body_bytes(stage).values()) == {0}, "counted back after an error")

    stage.a.behave = stage.b.behave = dying
    assert stage.raw(ask(LONG)).startswith(b"HTTP/1.1 503")
    stage.until(lambda: set(body_bytes(stage).values()) == {0}, "counted back after both have died")


def test_request_is_not_sent_again_to_an_instance_without_room(make_stage: MakeStage) -> None:
    """A retry checks for room like the first attempt; without room the client gets 503."""
    stage = limited(make_stage)
    held = Held(stage, stage.b)
    other = send(stage, LONG, session=make_session_id("b"))
    until_received(stage, b=[LONG])
    stage.a.behave = dying

    refused = stage.raw(ask(LONG))

    assert refused.startswith(b"HTTP/1.1 503")
    assert len(received(stage.b)) == 1
    held.let_go(LONG)
    assert status(other) == 200


def test_asynchronous_request_waits_for_room(make_stage: MakeStage, tmp_path: Path) -> None:
    """An asynchronous request without room returns to the queue without counting an attempt.

    One that never fits fails.
    """
    stage = limited(make_stage, names=("a",), async_folder=tmp_path)
    held = Held(stage, stage.a)
    other = send(stage, LONG)
    until_received(stage, a=[LONG])
    metrics = stage.proxy.data.dispatchers.all()[0].metrics

    answer = stage.client().invoke_endpoint_async(EndpointName="llava", Body=b"v" * 50)
    stage.until(lambda: metrics.async_repeated > 2, "the request returned to the queue")
    assert received(stage.a) == [LONG]
    held.let_go(LONG)
    held.let_go(b"v" * 50)

    assert status(other) == 200
    assert until_read(answer["OutputLocation"]) == b"v" * 50
    too_long = stage.client().invoke_endpoint_async(EndpointName="llava", Body=b"x" * (MAX_BYTES + 1))
    assert b"longer than the limit of 100 bytes" in until_read(too_long["FailureLocation"])


def until_read(url: str) -> bytes:
    path = Path(url.removeprefix("file://"))
    wait_until(path.is_file, f"{url} is there")
    return path.read_bytes()


def test_metric_shows_the_bytes_in_flight(make_stage: MakeStage) -> None:
    stage = limited(make_stage, names=("a",))
    held = Held(stage, stage.a)
    sock = send(stage, LONG)

    page = stage.admin("/metrics").text

    assert 'InflightBodyBytes{endpoint="llava",instance="a"} 120.0' in page
    held.let_go(LONG)
    assert status(sock) == 200


def test_a_body_counts_with_what_it_takes_beside_its_bytes() -> None:
    """A body counts with its overhead: a JVM of 512 MiB serves 3 of 60 MiB or 28 of 5.9 MiB; 4 or 32 end it."""
    most: dict[float, int] = {}
    for mib in (60.0, 5.9, 1.0):
        instance = Instance(name="a", endpoint="llava", model="llava", port=1)
        while instance.has_body_room(int(mib * 2**20)):
            instance.lease(int(mib * 2**20))
        most[mib] = instance.outstanding

    assert most == {60.0: 3, 5.9: 22, 1.0: 96}


def test_longest_body_is_what_an_idle_instance_has_room_for() -> None:
    """The longest body fits exactly, whether a body counts twice or with a fixed overhead."""
    for limit in (200, 10 << 20):
        instance = Instance(name="a", endpoint="llava", model="llava", port=1, max_inflight_body_bytes=limit)

        assert instance.has_body_room(instance.max_body_bytes)
        assert not instance.has_body_room(instance.max_body_bytes + 1)


FORM = "Content-Type: application/x-www-form-urlencoded; charset=utf-8\r\n"


@pytest.mark.parametrize("path", ["/endpoints/llava/invocations", "/predictions/llava"])
@pytest.mark.parametrize(
    "lines",
    [FORM, FORM.upper(), "Content-Type: multipart/form-data; boundary=B\r\n"],
    ids=["form", "FORM", "multipart"],
)
def test_long_form_counts_for_its_fields(make_stage: MakeStage, path: str, lines: str) -> None:
    """Each field of a form counts, since TorchServe makes an object of it.

    A form beyond the limit is refused with advice.
    """
    stage = make_stage(max_inflight_body_bytes=1 << 20)
    body = b"a&" * (120 << 10)

    refused = stage.raw(ask(body, path=path, more=lines))
    accepted = stage.raw(ask(body, path=path, more="Content-Type: application/json\r\n"))

    assert b"of a form. Send JSON as application/json." in refused
    assert accepted.startswith(b"HTTP/1.1 200")


def test_a_file_of_blank_lines_is_one_field(make_stage: MakeStage) -> None:
    """Parts of a form are counted, also nested ones, and not their content, so blank lines in a file do not matter."""
    stage = make_stage(limits=LimitSettings(max_form_fields=100))
    lines = "Content-Type: multipart/form-data; boundary=B\r\n"

    accepted = stage.raw(ask(b"--B\r\nX: y\r\n\r\n" + b"\r\n" * 5000 + b"--B--", more=lines))
    nested = b"--B\r\nContent-Type: multipart/mixed; boundary=C\r\n\r\n" + b"--C\r\nX: y\r\n\r\n1\r\n" * 200
    refused = stage.raw(ask(nested, more=lines))

    assert accepted.startswith(b"HTTP/1.1 200")
    assert refused.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("path", ["/endpoints/llava/invocations", "/predictions/llava", "/invocations"])
@pytest.mark.parametrize(
    ("lines", "field"),
    [
        (FORM, b"a=1&"),
        ("Content-Type: multipart/form-data; boundary=B\r\n", b"--B\r\nX: y\r\n\r\n1\r\n"),
        ('Content-Type: multipart/form-data; Boundary="B"\r\n', b"--B\nX: y\n\n1\n"),
        ("Content-Type: multipart/form-data\r\n", b"X: y\n--C"),
    ],
    ids=["form", "multipart", "line-feeds", "no-boundary"],
)
def test_form_of_many_fields_is_refused(make_stage: MakeStage, path: str, lines: str, field: bytes) -> None:
    """A form with many fields is refused even if it is small, because each field takes a worker's time."""
    stage = make_stage(limits=LimitSettings(max_form_fields=300))

    accepted = stage.raw(ask(field * 299, path=path, more=lines))
    refused = stage.raw(ask(field * 301, path=path, more=lines))

    assert accepted.startswith(b"HTTP/1.1 200")
    assert refused.startswith(b"HTTP/1.1 400")
    assert b"more than 300 (limits.max_form_fields). Send JSON as application/json." in refused
    assert stage.proxy.data.dispatchers.all()[0].metrics.forms_refused == 1
    assert len(received(stage.a) + received(stage.b)) == 1


def test_second_content_type_does_not_hide_a_form(make_stage: MakeStage) -> None:
    """A request with two content types is refused, so that the second cannot hide a form."""
    stage = make_stage(max_inflight_body_bytes=1 << 20)
    both = f"{FORM}Content-Type: application/json\r\n"

    of_runtime = stage.raw(ask(b"a&" * (120 << 10), more=both))
    of_torchserve = stage.raw(ask(b"a&" * (120 << 10), path="/predictions/llava", more=both))

    assert b"'contentType' is given twice" in of_runtime
    assert b"'contentType' is given twice" in of_torchserve


def test_form_of_undeclared_length_counts_for_its_fields(make_stage: MakeStage) -> None:
    """A form without a length is refused as soon as its fields exceed the limit."""
    stage = make_stage(max_inflight_body_bytes=1 << 20)
    part = b"a&" * (60 << 10)
    chunk = f"{len(part):x}\r\n".encode() + part + b"\r\n"
    head = f"POST /endpoints/llava/invocations HTTP/1.1\r\nHost: x\r\n{FORM}Transfer-Encoding: chunked\r\n\r\n".encode()

    refused = stage.raw(head + chunk + b"0\r\n\r\n")

    assert b"of a form. Send JSON as application/json." in refused
