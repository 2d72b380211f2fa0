"""The pump against TorchServe's own context and response encoder."""

import json
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from handlers.errors import HandlerError, InternalError, InvalidRequest, NotAnImage
from handlers.requests.incoming import Incoming
from handlers.requests.reply import PendingReply
from handlers.settings.pump import PumpSettings
from handlers.torchserve import pump as pump_module
from handlers.torchserve.pump import MAX_EARLY, Pump
from handlers.torchserve.step import read_row, read_timeout_s
from handlers.worker.counters import Counters
from tests.unit.handlers.conftest import Exchange, FakeClock
from tests.waiting import DEADLINE_S
from torchmoor.wire import headers as wire

with warnings.catch_warnings():
    warnings.simplefilter("ignore", ResourceWarning)  # it leaves its version file open
    from ts.context import Context
    from ts.protocol.otf_message_handler import create_predict_response
    from ts.service import Service

JSON = b"application/json"


class Frame:
    """One request's part of a response, as TorchServe's front end reads it."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def next(self) -> str | None:
        """Return "true" if more will come, "false" at the end of a stream, None for a whole answer."""
        return self.headers.get("ts_stream_next")


def decode(message: bytes) -> dict[str, Frame]:
    """Decode the frames of a response by request id."""
    at = 0

    def number() -> int:
        nonlocal at
        at += 4
        return int(struct.unpack("!i", message[at - 4 : at])[0])

    def data() -> bytes:
        nonlocal at
        length = number()
        at += length
        return message[at - length : at]

    assert number() == 200
    data()
    frames = {}
    while at < len(message) - 4:
        request_id = data().decode()
        data()  # content type
        status = number()
        data()  # phrase
        headers = {data().decode(): data().decode() for _ in range(number())}
        frames[request_id] = Frame(status, headers, data())
    assert number() == -1
    return frames


class FrontEnd:
    """TorchServe's side: it sends all active requests at each step and reads the response.

    It enforces the real front end's rules: the first frame of a stream is never its last, and no whole answer follows a
    stream's first frame.
    """

    def __init__(self, pump: Pump) -> None:
        self.pump = pump
        self._context = Context("llava", "/", {}, 8, None, "0.12.0")
        self.active: dict[str, dict[str, Any]] = {}
        self.bodies: dict[str, bytes] = {}
        self.over: dict[str, Frame] = {}
        self.heads: dict[str, Frame] = {}

    def send(self, request_id: str, body: Any, content_type: bytes = JSON, **headers: str) -> None:
        self.send_parts(request_id, {"body": (content_type.decode(), body)}, **headers)

    def send_parts(self, request_id: str, parts: dict[str, tuple[str, Any]], **headers: str) -> None:
        self.active[request_id] = {
            "requestId": request_id.encode(),
            "headers": [
                {"name": name.replace("_", "-").encode(), "value": value.encode()} for name, value in headers.items()
            ],
            "parameters": [
                {"name": name, "contentType": content_type, "value": value}
                for name, (content_type, value) in parts.items()
            ],
        }

    def leave(self, request_id: str) -> None:
        """Disconnect the client."""
        del self.active[request_id]

    def step(self) -> dict[str, Frame]:
        """Run one round trip through the worker."""
        headers, rows, request_ids = Service.retrieve_data_for_inference(list(self.active.values()))
        self._context.request_ids = request_ids
        self._context.request_processor = headers
        returned = self.pump.handle(rows, self._context)
        assert len(returned) == len(rows)
        frames = decode(create_predict_response(returned, request_ids, "Prediction success", 200, self._context))
        for request_id, frame in frames.items():
            assert request_id in self.active
            self.bodies[request_id] = self.bodies.get(request_id, b"") + frame.body
            if frame.next == "true":
                self.heads.setdefault(request_id, frame)
                continue
            assert (frame.next == "false") is (request_id in self.heads), "a stream whose head and end do not match"
            self.over[request_id] = frame
            del self.active[request_id]
        return frames

    def run(self) -> None:
        """Step until every request is complete."""
        deadline = time.monotonic() + DEADLINE_S
        while self.active:
            assert time.monotonic() < deadline, f"never answered: {list(self.active)}"
            self.step()

    def cancel(self, *request_ids: str) -> int:
        """Send the proxy's cancellation of these requests; return how many were cancelled."""
        self.send("cancel", json.dumps({"request_ids": request_ids}).encode(), x_torchmoor_operation="cancel")
        self.step()
        assert self.over["cancel"].status == 200
        return int(json.loads(self.over["cancel"].body)["cancelled"])

    def error(self, request_id: str) -> str:
        return str(json.loads(self.over[request_id].body)["error"]["code"])


class FakeService:
    """A service that answers when the test decides, and records its requests."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.asked: list[Incoming] = []
        self.replies: list[PendingReply] = []
        self.cancelled: list[int] = []
        self.reasons: list[HandlerError] = []
        self.on_start: Callable[[Incoming, PendingReply], None] = lambda incoming, reply: None

    def start(self, incoming: Incoming, reply: PendingReply) -> None:
        self.asked.append(incoming)
        self.replies.append(reply)
        number = len(self.replies) - 1
        reply.on_cancel(lambda reason: self._on_cancel(number, reason))
        self.on_start(incoming, reply)

    def _on_cancel(self, number: int, reason: HandlerError) -> None:
        self.cancelled.append(number)
        self.reasons.append(reason)


QUICK = {"stream_wait_s": 0.001, "omitted_wait_s": 0.001}
TEXT = {"Content-Type": "text/plain; charset=utf-8"}


def encode_error(error: HandlerError) -> bytes:
    return b"!" + error.code.encode()


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def make_front(service: FakeService, clock: FakeClock) -> Iterator[Callable[..., FrontEnd]]:
    """Build a front end with a pump; at the end the pump holds only requests that TorchServe still holds."""
    made: list[FrontEnd] = []

    def make(**settings: Any) -> FrontEnd:
        front = FrontEnd(Pump(PumpSettings(**{**QUICK, **settings}), service.start, service.counters, clock))
        made.append(front)
        return front

    yield make
    for front in made:
        assert front.pump.num_in_flight <= len(front.active)


@pytest.fixture
def front(make_front: Callable[..., FrontEnd]) -> FrontEnd:
    return make_front()


def test_unanswered_requests_are_left_out(front: FrontEnd, service: FakeService) -> None:
    """A request without output is not part of the response."""
    front.send("a", {"x": 1})

    assert front.step() == {}
    assert front.step() == {}

    assert len(service.asked) == 1
    service.replies[0].finish({"Content-Type": "application/json"}, b"{}")
    front.run()
    assert front.over["a"].body == b"{}"


def test_whole_answer_has_status_headers_and_body(front: FrontEnd, service: FakeService) -> None:
    """A whole answer is one frame without a stream marker, so that TorchServe gives it a Content-Length."""
    front.send("a", {})
    front.step()

    service.replies[0].finish({"Content-Type": "application/json", "x-torchmoor-prefill-tokens": "7"}, b"answer", 201)
    frame = front.step()["a"]

    assert (frame.status, frame.body, frame.next) == (201, b"answer", None)
    assert frame.headers == {"Content-Type": "application/json", "x-torchmoor-prefill-tokens": "7"}


def test_late_error_still_has_its_own_status(front: FrontEnd, service: FakeService) -> None:
    """An error after some steps keeps its status, header and body."""
    front.send("a", {})
    for _ in range(3):
        assert front.step() == {}

    service.replies[0].fail(NotAnImage("broken"))
    frame = front.step()["a"]

    assert frame.status == 415
    assert frame.headers["x-torchmoor-error"] == front.error("a") == "NotAnImage"


def test_stream_begins_with_its_headers_and_never_ends_in_the_same_step(front: FrontEnd, service: FakeService) -> None:
    """Even a complete stream takes two frames, because TorchServe writes no head with the last one."""
    front.send("a", {})
    front.step()
    reply = service.replies[0]

    reply.begin({**TEXT, "x-torchmoor-cache-tier": "kv"}, encode_error)
    reply.write(b"all of it", is_end=True)
    first, second = front.step()["a"], front.step()["a"]

    assert (first.status, first.body, first.next) == (200, b"all of it", "true")
    assert first.headers["x-torchmoor-cache-tier"] == "kv"
    assert (second.body, second.next) == (b"", "false")
    assert front.active == {}


def test_stream_carries_what_is_there(front: FrontEnd, service: FakeService) -> None:
    """Pieces between two steps are joined; a step without output sends an empty piece."""
    front.send("a", {})
    front.step()
    reply = service.replies[0]
    reply.begin(TEXT, encode_error)
    reply.write(b"one ")
    reply.write(b"two ")

    bodies = [front.step()["a"].body, front.step()["a"].body]
    reply.write(b"three", is_end=True)
    last = front.step()["a"]

    assert bodies == [b"one two ", b""]
    assert (last.body, last.next) == (b"three", "false")
    assert front.bodies["a"] == b"one two three"


class Ticks:
    """A clock that advances at each look."""

    def __init__(self, step_s: float = 0.001) -> None:
        self.now = 100.0
        self._step_s = step_s

    def monotonic(self) -> float:
        self.now += self._step_s
        return self.now


@pytest.mark.parametrize("interval_s", [0.0, 0.05])
def test_parts_of_a_stream_have_a_shortest_distance(
    make_front: Callable[..., FrontEnd], service: FakeService, monkeypatch: pytest.MonkeyPatch, interval_s: float
) -> None:
    """Pieces of a stream have a minimum interval.

    A stream's beginning or end, or a whole answer, sends all pieces at once.
    """
    ticks = Ticks()
    monkeypatch.setattr(pump_module, "time", ticks)
    front = make_front(stream_wait_s=0.4, omitted_wait_s=0.4, stream_interval_s=interval_s)
    for name in "ab":
        front.send(name, {})
        service.on_start = lambda incoming, reply: reply.begin(TEXT, encode_error)
        assert front.step()[name].next == "true"
    one, two = service.replies
    begun_at = ticks.now

    one.write(b"1")
    assert front.step()["a"].body == b"1"
    assert ticks.now - begun_at >= interval_s
    at = ticks.now
    one.write(b"2")
    two.write(b"3", is_end=True)
    frames = front.step()

    assert (frames["a"].body, frames["b"].body, frames["b"].next) == (b"2", b"3", "false")
    assert ticks.now - at < 0.05
    one.write(b"", is_end=True)
    front.run()


def test_long_bodies_that_are_sent_again_hold_up_pieces_of_streams(
    make_front: Callable[..., FrontEnd], service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchServe sends the body of an unanswered request again in each round, so streams beside it cause fewer rounds.

    They wait by the body's length, at most a tenth of a second.
    """
    ticks = Ticks(0.01)
    monkeypatch.setattr(pump_module, "time", ticks)
    front = make_front(stream_wait_s=0.4, stream_interval_s=0, resend_bytes_per_s=1000)
    front.send("a", {})
    service.on_start = lambda incoming, reply: reply.begin(TEXT, encode_error)
    front.step()
    stream = service.replies[0]
    service.on_start = lambda incoming, reply: stream.write(b"1")
    waits = []
    for name, length in (("short", 50), ("long", 10_000)):
        front.send(name, b"x" * length)
        at = ticks.now
        assert front.step()["a"].body == b"1"
        waits.append(ticks.now - at)
        service.replies[-1].finish({}, b"done")
        front.step()

    assert 0.05 <= waits[0] < 0.1 <= waits[1] < 0.2
    assert service.counters.get("pump_rounds") == 5
    stream.write(b"", is_end=True)
    front.run()


def test_pieces_of_a_stream_leave_the_wake_up_to_the_engine() -> None:
    """A reply wakes its reader at its end; the engine wakes it for all pieces of a step."""
    wakes: list[int] = []
    reply = PendingReply(lambda: wakes.append(1))
    reply.begin(TEXT, encode_error)
    assert reply.is_urgent()

    reply.write(b"a")
    reply.take(100)
    reply.write(b"b")

    assert not wakes
    assert reply.has_news()
    assert not reply.is_urgent()
    reply.write(b"c", is_end=True)
    assert len(wakes) == 1
    assert reply.is_urgent()


def test_announced_pieces_are_written_when_they_are_read() -> None:
    """`fill` runs once for all announcements before it, also before an error."""
    pieces: list[bytes] = []
    reply = PendingReply(lambda: None)

    def fill() -> None:
        reply.write(b"".join(pieces))
        pieces.clear()

    reply.begin(TEXT, encode_error, fill)
    for piece in (b"1", b"2"):
        pieces.append(piece)
        reply.announce()
    assert reply.has_news()
    first = reply.take(100)
    assert first.data == b"12"
    assert not reply.has_news()

    pieces.append(b"3")
    reply.announce()
    reply.fail(InternalError("boom"))

    last = reply.take(100)
    assert (last.data, last.is_end) == (b"3!InternalError", True)


def test_stream_whose_pieces_cannot_be_encoded_ends_with_an_error(front: FrontEnd, service: FakeService) -> None:
    """The client gets the stream's own error, and the service is asked to stop."""

    def fill() -> None:
        raise ValueError("no form for this")

    reasons: list[HandlerError] = []
    front.send("a", {})
    front.step()
    reply = service.replies[0]
    reply.on_cancel(reasons.append)
    reply.begin(TEXT, encode_error, fill)
    front.step()

    reply.announce()
    front.run()

    assert front.bodies["a"] == b"!InternalError"
    assert len(reasons) == 1


def test_failed_stream_ends_in_its_own_form(front: FrontEnd, service: FakeService) -> None:
    """After the first piece the status cannot change, so the stream ends with the error."""
    front.send("a", {})
    front.step()
    reply = service.replies[0]
    reply.begin(TEXT, encode_error)
    reply.write(b"half")
    front.step()

    reply.fail(InternalError("boom"))
    reply.write(b"too late")
    front.run()

    assert front.bodies["a"] == b"half!InternalError"
    assert front.over["a"].status == 200


def test_rows_mix_freely(front: FrontEnd, service: FakeService) -> None:
    """Whole, streamed, failed and waiting requests share a step, each with its own answer."""
    for name in "abcd":
        front.send(name, {})
    front.step()
    service.replies[1].finish({}, b"whole")
    service.replies[2].begin(TEXT, encode_error)
    service.replies[3].fail(NotAnImage("x"))

    frames = front.step()

    assert set(frames) == {"b", "c", "d"}
    assert [frames[n].next for n in "bcd"] == [None, "true", None]
    assert [frames[n].status for n in "bcd"] == [200, 200, 415]
    service.replies[2].write(b"end", is_end=True)
    service.replies[0].finish({}, b"last")
    front.run()
    assert front.bodies == {"a": b"last", "b": b"whole", "c": b"end", "d": front.bodies["d"]}


def test_client_that_leaves_cancels_its_request(front: FrontEnd, service: FakeService) -> None:
    """A request whose id is missing from a step is cancelled once; the others are not."""
    for name in "abc":
        front.send(name, {})
    front.step()

    front.leave("b")
    front.step()
    front.step()

    assert service.cancelled == [1]
    service.replies[1].finish({}, b"nobody reads this")
    for number in (0, 2):
        service.replies[number].finish({}, b"")
    front.run()


def test_late_listener_hears_of_a_client_that_left() -> None:
    """A listener that is added after the disconnect is called at once."""
    reply = Exchange().reply
    told: list[int] = []

    reply.cancel()
    reply.on_cancel(lambda reason: told.append(1))

    assert reply.is_cancelled
    assert told == [1]


def test_cancellation_that_fails_harms_nobody(front: FrontEnd, service: FakeService) -> None:
    """An exception in one request's cancellation does not affect others."""

    def fail(reason: HandlerError) -> None:
        raise RuntimeError("cancel")

    for name in "abc":
        front.send(name, {})
    front.step()
    service.replies[0].on_cancel(fail)
    front.leave("a")
    front.leave("b")
    front.send("d", {})

    front.step()

    assert sorted(service.cancelled) == [0, 1]
    assert len(service.asked) == 4
    for number in (2, 3):
        service.replies[number].finish({}, b"fine")
    front.run()
    assert (front.bodies["c"], front.bodies["d"]) == (b"fine", b"fine")


def test_cancelled_request_is_answered_in_the_same_step(front: FrontEnd, service: FakeService) -> None:
    """The service is notified of a cancelled id, and TorchServe may forget the row in the same step."""
    front.send("a", {}, X_Torchmoor_Request_Id="one")
    front.send("b", {}, X_Torchmoor_Request_Id="two")
    front.step()

    num_cancelled = front.cancel("two")
    service.replies[1].finish({}, b"too late")

    assert (num_cancelled, service.cancelled) == (1, [1])
    assert (front.over["b"].status, front.error("b")) == (499, "ClientGone")
    service.replies[0].finish({}, b"fine")
    front.run()
    assert front.bodies["a"] == b"fine"


def test_cancelling_what_is_not_there_does_nothing(front: FrontEnd, service: FakeService) -> None:
    """Ids that are unknown, complete, or not from a proxy change nothing."""
    front.send("a", {}, X_Torchmoor_Request_Id="one")
    front.send("b", {})
    front.step()
    service.replies[0].finish({}, b"whole")
    front.step()

    assert front.cancel("one", "two", "b") == 0

    assert service.cancelled == []
    service.replies[1].finish({}, b"fine")
    front.run()


def test_cancel_that_overtakes_its_request_still_counts(
    front: FrontEnd, service: FakeService, clock: FakeClock
) -> None:
    """A cancellation may arrive before its request, so an unknown id is remembered for a while and used once."""
    front.cancel("one")
    front.cancel("two")

    front.send("a", {}, X_Torchmoor_Request_Id="one")
    front.run()
    front.send("b", {}, X_Torchmoor_Request_Id="one")
    clock.advance(60)
    front.send("c", {}, X_Torchmoor_Request_Id="two")
    front.step()

    assert front.error("a") == "ClientGone"
    assert len(service.asked) == 2
    for reply in service.replies:
        reply.finish({}, b"")
    front.run()


def test_remembered_cancellations_are_bounded(front: FrontEnd, service: FakeService) -> None:
    for start in range(0, 5000, 500):
        front.cancel(*(str(number) for number in range(start, start + 500)))

    forgotten = 5000 - MAX_EARLY - 1
    for name, request_id in (("a", 4999), ("b", forgotten + 1), ("c", forgotten)):
        front.send(name, {}, X_Torchmoor_Request_Id=str(request_id))
    front.step()
    assert [front.error(name) for name in "ab"] == ["ClientGone"] * 2
    (reply,) = service.replies
    reply.finish({}, b"")
    front.run()


def test_cancelled_stream_ends_in_its_own_form(front: FrontEnd, service: FakeService) -> None:
    """A started stream ends with the reason; one without output becomes a whole answer."""
    for name in "ab":
        front.send(name, {}, X_Torchmoor_Request_Id=name)
    front.step()
    service.replies[0].begin(TEXT, encode_error)
    service.replies[0].write(b"half")
    front.step()
    service.replies[1].begin(TEXT, encode_error)

    assert front.cancel("a", "b") == 2

    for reply in service.replies:
        reply.write(b"too late", is_end=True)
    front.run()
    assert front.bodies["a"] == b"half!ClientGone"
    assert front.over["b"].status == 499


def test_full_worker_still_takes_cancellations(make_front: Callable[..., FrontEnd], service: FakeService) -> None:
    """A full worker accepts cancellations, which free rows for the next requests."""
    front = make_front(max_in_flight=1)
    front.send("a", {}, X_Torchmoor_Request_Id="a")
    front.step()

    assert front.cancel("a") == 1
    front.send("b", {})
    front.step()

    assert len(service.asked) == 2
    service.replies[1].finish({}, b"")
    front.run()


def test_operations_take_no_request_s_place(make_front: Callable[..., FrontEnd], service: FakeService) -> None:
    """A worker with one free row accepts a request together with a status and a cancellation."""
    front = make_front(max_in_flight=1)
    service.on_start = lambda incoming, reply: reply.finish({}, b"")
    front.send("s", {}, x_torchmoor_operation="status")
    front.send("c", b'{"request_ids": []}', x_torchmoor_operation="cancel")
    front.send("a", {})

    front.step()

    assert [front.over[name].status for name in "sca"] == [200, 200, 200]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[", b'{"request_ids": "a"}', b'{"request_ids": [1]}', b'{"request_ids": [""]}']
)
def test_malformed_cancellation_is_refused(front: FrontEnd, body: bytes) -> None:
    """The error says what is missing, and nothing is cancelled."""
    front.send("x", body, x_torchmoor_operation="cancel")
    front.run()

    assert front.error("x") == "InvalidRequest"


def test_request_past_its_deadline_is_answered_though_nobody_works_on_it(
    front: FrontEnd, service: FakeService, clock: FakeClock
) -> None:
    """A row is answered at the proxy's deadline even if the service's threads still run."""
    front.send("a", {}, X_Torchmoor_Timeout_Ms="2500")
    front.send("b", {})
    front.step()
    clock.advance(2.4)
    front.step()
    assert front.over == {}

    clock.advance(0.2)
    front.step()

    assert (front.over["a"].status, front.error("a")) == (504, "TurnTimedOut")
    assert [reason.code for reason in service.reasons] == ["TurnTimedOut"]
    service.replies[1].finish({}, b"")
    front.run()


def test_answer_that_is_ready_at_its_deadline_is_delivered(
    front: FrontEnd, service: FakeService, clock: FakeClock
) -> None:
    front.send("a", {}, X_Torchmoor_Timeout_Ms="1000")
    front.step()

    service.replies[0].finish({}, b"in time")
    clock.advance(2)
    front.run()

    assert front.bodies["a"] == b"in time"
    assert service.cancelled == []


@pytest.mark.parametrize("value", ["", "-1", "1.5", "soon", "9" * 40])
def test_deadline_that_is_no_number_is_refused(front: FrontEnd, service: FakeService, value: str) -> None:
    """An invalid deadline is a 400 before the request begins."""
    front.send("a", {}, X_Torchmoor_Timeout_Ms=value)
    front.run()

    assert front.error("a") == "InvalidRequest"
    assert front.over["a"].status == 400
    assert service.asked == []


def test_service_that_raises_fails_its_own_row(front: FrontEnd, service: FakeService) -> None:
    """No exception leaves handle; the row gets a 500 or its own error, the others their answers."""

    def start(incoming: Incoming, reply: PendingReply) -> None:
        if incoming.body == b"crash":
            raise KeyError("service")
        if incoming.body == b"refuse":
            raise NotAnImage("no")
        reply.finish({}, b"fine")

    service.on_start = start
    for name, body in (("a", b"ok"), ("b", b"crash"), ("c", b"refuse"), ("d", b"ok")):
        front.send(name, body, b"application/octet-stream")

    front.run()

    assert [front.over[n].status for n in "abcd"] == [200, 500, 415, 200]
    assert "service" not in front.over["b"].body.decode()


def test_reply_that_raises_fails_its_own_row(
    front: FrontEnd, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception while reading an answer is that row's 500."""
    for name in "ab":
        front.send(name, {})
    front.step()
    broken = service.replies[0]
    original = PendingReply.take

    def take(self: PendingReply, max_bytes: int) -> Any:
        if self is broken:
            raise RuntimeError("take")
        return original(self, max_bytes)

    monkeypatch.setattr(PendingReply, "take", take)
    service.replies[1].finish({}, b"fine")
    front.run()
    front.step()

    assert (front.over["a"].status, front.error("a")) == (500, "InternalError")
    assert front.bodies["b"] == b"fine"


@pytest.mark.parametrize("row", [None, [], {"body": object()}, {"data": None}, {}])
def test_strange_rows_are_answered(service: FakeService, row: Any) -> None:
    """Any row content of TorchServe's gets an answer, and so do the other rows."""
    service.on_start = lambda incoming, reply: reply.finish({}, b"fine")
    pump = Pump(PumpSettings(**QUICK), service.start, service.counters)
    context = Context("llava", "/", {}, 8, None, "0.12.0")
    headers, _, _ = Service.retrieve_data_for_inference([])
    for name in ("a", "b"):
        front = FrontEnd(pump)
        front.send(name, {})
        headers += Service.retrieve_data_for_inference(list(front.active.values()))[0]
    context.request_processor = headers
    context.request_ids = {0: "a", 1: "b"}

    bodies = pump.handle([row, {"body": {}}], context)

    assert set(context.request_ids) == {0, 1}
    assert bodies[1] == b"fine"
    assert context.get_response_status(0)[0] in (200, 500)


def test_in_flight_limit_refuses_but_status_still_works(
    make_front: Callable[..., FrontEnd], service: FakeService
) -> None:
    """Beyond the limit a request is 429 at once, operations are served, and a freed row is used again."""
    front = make_front(max_in_flight=2)
    for name in "ab":
        front.send(name, {})
    front.step()
    front.send("c", {})
    front.send("s", {}, X_TorchMoor_Operation="status")
    front.step()

    assert (front.over["c"].status, front.error("c")) == (429, "Overloaded")
    assert front.over["c"].headers["Retry-After"]
    assert service.asked[2].headers["x-torchmoor-operation"] == "status"
    for reply in service.replies:
        reply.finish({}, b"")
    front.run()
    front.send("d", {})
    front.step()
    assert len(service.asked) == 4
    service.replies[3].finish({}, b"")
    front.run()


def test_answer_larger_than_torchserve_carries_is_an_error(
    make_front: Callable[..., FrontEnd], service: FakeService
) -> None:
    """A frame beyond max_response_size would kill the worker and every request with it.

    The client reads what to do; it would send the same request again after a failure of the server.
    """
    front = make_front(max_response_bytes=100)
    for name in "ab":
        front.send(name, {})
    front.step()

    service.replies[0].finish({}, b"x" * 101)
    service.replies[1].finish({}, b"x" * 100)
    front.run()

    assert (front.over["a"].status, front.error("a")) == (400, "InvalidRequest")
    message = json.loads(front.bodies["a"])["error"]["message"]
    assert message.endswith("may have 100 (handler.pump.max_response_bytes): ask for less at once")
    assert front.bodies["b"] == b"x" * 100


def test_large_pieces_are_spread_over_steps(make_front: Callable[..., FrontEnd], service: FakeService) -> None:
    """A stream ahead of its reader is sent in frames of the allowed size, with the end after the last byte."""
    front = make_front(max_response_bytes=100)
    front.send("a", {})
    front.step()
    data = bytes(range(250))

    service.replies[0].begin(TEXT, encode_error)
    service.replies[0].write(data, is_end=True)
    frames = [front.step()["a"] for _ in range(3)]

    assert [len(frame.body) for frame in frames] == [100, 100, 50]
    assert [frame.next for frame in frames] == ["true", "true", "false"]
    assert front.bodies["a"] == data


def test_news_end_the_wait(
    make_front: Callable[..., FrontEnd], service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that waits returns as soon as one answer is ready."""
    is_waiting, were_woken = threading.Event(), []

    class ObservedCondition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            is_waiting.set()
            were_woken.append(super().wait(60))
            return were_woken[-1]

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Condition", ObservedCondition)
        front = make_front()

    def answer() -> None:
        assert is_waiting.wait(60)
        service.replies[0].finish({}, b"fine")

    thread = threading.Thread(target=answer)
    thread.start()
    front.send("a", {})

    frames = front.step()
    thread.join()

    assert frames["a"].body == b"fine"
    assert were_woken == [True]


def test_many_writers_lose_nothing(front: FrontEnd, service: FakeService) -> None:
    """Streams from several threads arrive whole and in order while the pump reads."""
    num_streams, num_pieces = 8, 200
    for i in range(num_streams):
        front.send(f"r{i}", {})
    front.step()

    def write(number: int) -> None:
        reply = service.replies[number]
        reply.begin(TEXT, encode_error)
        for piece in range(num_pieces):
            reply.write(f"{number}:{piece} ".encode(), is_end=piece == num_pieces - 1)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(num_streams)]
    for thread in threads:
        thread.start()
    front.run()
    for thread in threads:
        thread.join()

    for i in range(num_streams):
        assert front.bodies[f"r{i}"].decode().split() == [f"{i}:{piece}" for piece in range(num_pieces)]


def test_headers_are_lower_case_and_form_fields_are_none_of_them(front: FrontEnd, service: FakeService) -> None:
    """TorchServe keeps the client's spelling and adds each form field's type to the headers as a dict."""
    front.send_parts(
        "a",
        {"data": ("image/png", bytearray(b"\x89PNG")), "note": ("text/plain", "hi")},
        X_Amzn_SageMaker_Session_Id="s",
        ACCEPT="text/event-stream",
    )
    front.step()

    incoming = service.asked[0]
    assert incoming.headers == {"x-amzn-sagemaker-session-id": "s", "accept": "text/event-stream"}
    assert incoming.body == b"\x89PNG"
    service.replies[0].finish({}, b"")
    front.run()


@pytest.mark.parametrize(
    ("row", "body"),
    [
        ({"body": bytearray(b"raw")}, b"raw"),
        ({"data": bytearray(b"raw")}, b"raw"),
        ({"note": b"raw"}, b""),
        ({}, b""),
    ],
)
def test_body_of_a_row(row: dict[str, Any], body: Any) -> None:
    """The body is under "body" or "data"; a form of other fields has none."""
    assert read_row(row, {}).body == body


def test_compressed_body_is_refused_by_name() -> None:
    """The error names the compression, because a parser's error about the bytes would mislead."""
    with pytest.raises(InvalidRequest, match="without Content-Encoding, not in 'gzip'"):
        read_row({"body": b"\x1f\x8b"}, {"Content-Encoding": " GZIP"})

    assert read_row({"body": b"{}"}, {"Content-Encoding": "identity"}).body == b"{}"


def test_repr_tells_the_load(front: FrontEnd, service: FakeService) -> None:
    front.send("a", {})
    front.step()

    assert repr(front.pump) == "<Pump 1 in flight>"
    service.replies[0].finish({}, b"")
    front.run()


def test_chat_service_behind_the_pump(client: Any) -> None:
    """The real service with the real encoder handles open, stream, close, and an error."""
    front = FrontEnd(Pump(PumpSettings(), client.service.start, client.service.counters))
    front.send("open", b'{"requestType": "NEW_SESSION"}', Content_Type="application/json")
    front.run()
    sid = json.loads(front.bodies["open"])["session_id"]
    ask = {"type": "send_text_prompt", "prompt_text": "hello", "parameters": {"max_new_tokens": 8}}

    front.send("whole", json.dumps(ask).encode(), X_Amzn_SageMaker_Session_Id=sid)
    front.run()
    front.send("stream", json.dumps({**ask, "stream": True}).encode(), X_Amzn_SageMaker_Session_Id=sid)
    front.send("error", json.dumps({**ask, "parameters": {"top_k": -2}}).encode(), X_Amzn_SageMaker_Session_Id=sid)
    front.run()
    front.send("close", b'{"requestType": "CLOSE"}', X_Amzn_SageMaker_Session_Id=sid)
    front.run()

    assert front.over["open"].headers["x-amzn-sagemaker-new-session-id"].startswith(sid)
    assert set(json.loads(front.bodies["whole"])) == {"response_text"}
    assert front.heads["stream"].headers["Content-Type"] == TEXT["Content-Type"]
    assert front.over["error"].status == 400
    assert json.loads(front.bodies["close"]) == {"success": True}


def test_failures_are_logged_by_the_ids_of_proxy_and_client(
    front: FrontEnd, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A server error logs one line per request, whole or streamed; a client's mistake logs none."""
    ids = {"x_torchmoor_request_id": "r-1", "x_amzn_sagemaker_inference_id": "order-7\nforged=line"}
    with caplog.at_level("INFO", logger="handlers.torchserve.pump"):
        front.send("whole", b"{}", **ids)
        front.send("stream", b"{}", x_torchmoor_request_id="r-2")
        front.send("mistake", b"{}", x_torchmoor_request_id="r-3")
        front.step()
        whole, stream, mistake = service.replies
        whole.fail(InternalError("broken"))
        stream.begin(TEXT, encode_error)
        front.step()
        stream.fail(InternalError("broken"))
        mistake.fail(NotAnImage("no image"))
        front.run()

    assert [record.getMessage() for record in caplog.records] == [
        "request failed request_id=r-1 inference_id=order-7forged=line code=InternalError status=500",
        "request failed request_id=r-2 inference_id=- code=InternalError status=500",
    ]


def test_what_is_in_flight_is_told_without_those_who_ask(front: FrontEnd, service: FakeService) -> None:
    """The number of requests in flight, at whose zero an instance stops, does not include operations."""
    front.send("a", {})
    front.send("b", {})
    front.step()

    front.send("q", {}, X_Torchmoor_Operation="in-flight")
    front.send("r", {}, X_Torchmoor_Operation="status")
    front.step()

    assert json.loads(front.bodies["q"]) == {"in_flight": 2}
    for reply in service.replies:
        reply.finish({}, b"fine")
    front.run()
    front.send("s", {}, X_Torchmoor_Operation="in-flight")
    front.step()
    assert json.loads(front.bodies["s"]) == {"in_flight": 0}


@pytest.mark.parametrize("text", ["", "-1", "1.5", "\u0663", "1" * 13])
def test_a_timeout_that_is_refused_has_its_range_in_the_error(text: str) -> None:
    with pytest.raises(InvalidRequest, match="a whole number of milliseconds, of at most 12 digits"):
        read_timeout_s({wire.TIMEOUT_MS: text})

    assert read_timeout_s({wire.TIMEOUT_MS: "9" * 12}) == 999_999_999.999


def test_an_operation_that_takes_several_steps_is_not_a_request(
    make_front: Callable[..., FrontEnd], service: FakeService
) -> None:
    """A close, which waits for the journal, leaves the room for requests as it is, and is not in flight."""
    front = make_front(max_in_flight=1)
    front.send("close", b"{}", x_torchmoor_operation="close")
    front.send("left", b"{}", x_torchmoor_operation="close")
    front.step()
    front.leave("left")

    front.send("q", b"{}", x_torchmoor_operation="in-flight")
    front.step()
    front.send("a", b"{}")
    front.step()
    front.send("b", b"{}")
    front.step()

    assert json.loads(front.bodies["q"]) == {"in_flight": 0}
    assert "a" not in front.over
    assert front.error("b") == "Overloaded"
    for reply in service.replies:
        reply.finish({}, b"{}")
    front.run()
    front.send("q", b"{}", x_torchmoor_operation="in-flight")
    front.step()
    assert json.loads(front.over["q"].body) == {"in_flight": 0}
