"""Slow addresses of images: they delay their own caller, end in time, and are forgotten with their clients."""

import gc
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from handlers.chat.images.fetch_pool import EarlyFetch, FetchPool, find_line
from handlers.chat.images.loader import ImageLoader
from handlers.errors import ImageUnreachable, InternalError, Overloaded
from handlers.requests.incoming import Caller
from handlers.requests.reply import PendingReply
from handlers.settings.intake import IntakeSettings
from tests.torchserve.drawings import data_url, encoded
from tests.unit.handlers.conftest import FakeClock
from tests.unit.handlers.test_chat_intake import PNG, WebServer, answer
from tests.waiting import wait_until

ALICE, BOB = ({"x-torchmoor-endpoint": "e", "x-torchmoor-principal": name} for name in ("alice", "bob"))
# The intake's own time-outs are longer than the test.
ALLOWED = {
    "allowed_hosts": ("127.0.0.1", "::1"),
    "read_timeout_s": 300.0,
    "total_timeout_s": 300.0,
    "fetching_timeout_s": 300.0,
}


class Tarpit(WebServer):
    """A server that keeps requests for /slow.png until `release`. arrived: counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Semaphore(0)
        self._may_answer = threading.Event()
        self.routes["/slow.png"] = self._answer_late

    def _answer_late(self, connection: socket.socket) -> None:
        self.arrived.release()
        assert self._may_answer.wait(60)
        connection.sendall(answer(PNG))

    def await_arrivals(self, number: int) -> None:
        for _ in range(number):
            assert self.arrived.acquire(timeout=60)

    def release(self) -> None:
        self._may_answer.set()


@pytest.fixture
def tarpit() -> Iterator[Tarpit]:
    server = Tarpit()
    yield server
    server.release()
    server.stop()


def opening(*images: str) -> dict[str, Any]:
    return {"type": "start_session", "images": list(images)}


def test_callers_with_slow_addresses_delay_nobody_else(make_client: Any, tarpit: Tarpit, red: Any) -> None:
    """While one caller's fetches wait for slow hosts, others open, ask, close and fetch images without delay."""
    client = make_client(intake={**ALLOWED, "fetch_threads": 4, "num_threads": 1})
    slow = [client.send(opening(tarpit.url("/slow.png")), ALICE) for _ in range(9)]
    tarpit.await_arrivals(2)

    sent = client.call(opening(data_url(red)), BOB)
    fetched = client.call(opening(tarpit.url("/a.png")), BOB)
    turn = {"type": "send_text_prompt", "session_id": sent.json["session_id"], "prompt_text": "what colour?"}
    asked = client.call(turn, BOB)
    shown = client.call({"inputs": f"![]({tarpit.url('/a.png')})what?", "parameters": {"max_new_tokens": 1}}, BOB)
    closed = client.call({"type": "close_session", "session_id": fetched.json["session_id"]}, BOB)
    own = client.call(opening(data_url(red)), ALICE)

    statuses = [each.status for each in (sent, fetched, asked, shown, closed, own)]
    assert statuses == [200] * 6
    assert not any(each.reply.has_news() for each in slow)
    assert not tarpit.arrived.acquire(blocking=False)  # half of the threads, and no more
    tarpit.release()
    assert [each.wait().status for each in slow] == [200] * 9
    assert client.service.numbers()["images"]["fetched"] == 11


def test_without_a_name_of_the_caller_a_slow_host_delays_itself(make_client: Any, tarpit: Tarpit) -> None:
    """Without a caller's name, images of other hosts are fetched while one host is slow."""
    other = WebServer()
    client = make_client(intake={**ALLOWED, "fetch_threads": 2})
    slow = [client.send(opening(tarpit.url("/slow.png"))) for _ in range(3)]
    tarpit.await_arrivals(1)

    assert client.call(opening(other.url())).status == 200

    tarpit.release()
    assert [each.wait().status for each in slow] == [200] * 3
    other.stop()


@pytest.mark.parametrize(
    ("references", "line"),
    [
        ((), None),
        ((b"raw", "data:image/png;base64,aHR0cHM6", "aHR0cA=="), None),
        (("data:,x", " HTTPS://Example.com:81/a.png"), "Example.com:81"),
        (("s3://bucket/key",), "bucket"),
        (("http://[::1/a.png",), ""),
    ],
)
def test_line_is_that_of_the_first_fetched_address(references: tuple[bytes | str, ...], line: str | None) -> None:
    """None if nothing is fetched; a named caller has one line for all addresses."""
    named = Caller("e", "alice")

    assert find_line(Caller(), references) == line
    assert find_line(named, references) == (None if line is None else named.line)


def test_images_of_a_request_are_fetched_at_the_same_time(make_client: Any, tarpit: Tarpit, red: Any) -> None:
    """They keep their order, and leave the caller's third thread to another request."""
    client = make_client(intake={**ALLOWED, "fetch_threads": 6})
    tarpit.routes["/red.png"] = lambda connection: connection.sendall(answer(encoded(red)))
    ordered = client.send(opening(tarpit.url("/slow.png"), tarpit.url("/red.png"), tarpit.url("/slow.png")), ALICE)

    tarpit.await_arrivals(2)

    assert client.call(opening(tarpit.url("/a.png")), ALICE).status == 200
    tarpit.release()
    assert ordered.wait().status == 200
    assert client.service.numbers()["images"]["fetched"] == 4
    first, second, third = client.service.store.find(ordered.json["session_id"]).pending_images
    assert first.digest == third.digest != second.digest


def test_a_request_that_fails_ends_its_other_downloads(make_client: Any, tarpit: Tarpit) -> None:
    """They would keep their threads for the rest of their time, although no request needs them."""
    client = make_client(intake={**ALLOWED, "fetch_threads": 6})
    tarpit.routes["/missing.png"] = lambda connection: tarpit.await_arrivals(2)

    failed = client.call(opening(tarpit.url("/missing.png"), *[tarpit.url("/slow.png")] * 2), ALICE)
    asked = [client.send(opening(tarpit.url("/slow.png")), ALICE) for _ in range(3)]
    tarpit.await_arrivals(3)

    assert failed.status == 502
    tarpit.release()
    assert [each.wait().status for each in asked] == [200] * 3


class Held:
    """A pool whose threads are busy until `release`, and the order in which actions run."""

    def __init__(self, threads: int = 1, **settings: Any) -> None:
        self.now = 1000.0
        self.pool = FetchPool(IntakeSettings(fetch_threads=threads, **settings), clock=lambda: self.now)
        self.order: list[str] = []
        self._may_go_on = threading.Event()
        self.pool.submit("held", make_reply(), lambda: void(self._may_go_on.wait(60)))

    def submit(self, name: str, reply: PendingReply | None = None) -> Any:
        return self.pool.submit(name[0], reply or make_reply(), lambda: self.order.append(name))

    def release(self) -> None:
        self._may_go_on.set()


def void(value: object) -> None:
    """Drop a result."""


def make_reply() -> PendingReply:
    return PendingReply(lambda: None)


def test_lines_take_turns() -> None:
    """A line with many requests does not hold up one with few; within a line the order is that of arrival."""
    held = Held()
    last = [held.submit(name) for name in ("a1", "a2", "a3", "b1", "c1", "b2")]

    held.release()
    for future in last:
        future.result(60)

    assert held.order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    held.pool.shutdown()


def test_cancelled_requests_leave_their_line() -> None:
    held = Held()
    reply = make_reply()
    gone, stays = held.submit("a1", reply), held.submit("a2")

    reply.cancel()
    assert gone.cancelled()
    held.release()
    stays.result(60)

    assert held.order == ["a2"]
    held.pool.shutdown()


def test_an_action_that_is_cancelled_leaves_nothing_of_its_request() -> None:
    """The pool forgets a request whose action is cancelled before its turn, as when a session is closed."""
    held = Held()
    reply = make_reply()
    waiting, answered = held.submit("a1", reply), weakref.ref(reply)

    assert waiting.cancel()
    del waiting, reply
    gc.collect()
    is_forgotten = answered() is None
    held.release()
    held.pool.shutdown()

    assert is_forgotten
    assert held.order == []


def test_stop_answers_requests_that_wait() -> None:
    """Their replies say that the worker stops; further requests are refused."""
    held = Held()
    reply = make_reply()
    held.submit("a1", reply)

    stopping = threading.Thread(target=held.pool.shutdown)
    stopping.start()
    wait_until(lambda: reply.is_cancelled, "the waiting reply is cancelled")
    held.release()
    stopping.join(60)

    assert isinstance(reply.error, InternalError)
    assert held.order == []
    with pytest.raises(RuntimeError):
        held.submit("b1")


@pytest.mark.parametrize(("time_s", "expected_s"), [(30, 20), (600, 40)])
def test_fetches_end_before_the_request_does(time_s: float, expected_s: float) -> None:
    """A fetch ends at two thirds of the request's time or at fetching_timeout_s.

    The client gets the reason, and no circuit breaker counts it.
    """
    held = Held()
    reply = make_reply()
    reply.shorten_deadline(held.now + time_s)

    held.submit("a1", reply)

    assert reply.fetches_end_at == held.now + expected_s
    held.release()
    held.pool.shutdown()


def test_slow_fetch_ends_with_the_requests_time(tarpit: Tarpit) -> None:
    """A fetch ends with the request's time as a client error, and does not begin if that time is over."""
    clock, reply = FakeClock(), make_reply()
    loader = ImageLoader(IntakeSettings(allowed_hosts=("127.0.0.1",)), clock=clock)
    reply.fetches_end_at = clock.now + 0.05

    with pytest.raises(ImageUnreachable, match="did not arrive in time"):
        loader.read(tarpit.url("/slow.png"), reply)
    clock.advance(0.05)
    with pytest.raises(Overloaded, match="too many images are being fetched"):
        loader.read(tarpit.url("/a.png"), reply)

    assert not any("/a.png" in request for request in tarpit.requests)


def test_request_fetches_by_itself_what_no_thread_has_begun() -> None:
    """A request never waits for a thread while it has one."""
    held, reply = Held(2), make_reply()  # each line may use one thread
    early: list[EarlyFetch] = []
    taken: list[bytes | None] = []

    def run() -> None:
        early.append(held.pool.fetch_early(reply, lambda own: b"image"))
        taken.append(early[0].take())

    held.pool.submit("a", reply, run).result(60)

    assert taken == [None]
    assert early[0].future.cancelled()
    held.release()
    held.pool.shutdown()


def test_stop_waits_for_a_request_with_early_fetches() -> None:
    """A request that runs is not lost because threads for its further images were not free."""
    held, reply = Held(2), make_reply()
    may_take = threading.Event()
    early: list[EarlyFetch] = []
    taken: list[bytes | None] = []

    def run() -> None:
        early.append(held.pool.fetch_early(reply, lambda own: b"image"))
        assert may_take.wait(60)
        taken.append(early[0].take())

    held.pool.submit("a", reply, run)
    wait_until(lambda: bool(early), "the request runs")
    stopping = threading.Thread(target=held.pool.shutdown)
    stopping.start()
    future = early[0].future
    wait_until(future.cancelled, "the pool leaves the image to the request")
    held.release()
    may_take.set()
    stopping.join(60)

    assert taken == [None]
    assert not reply.is_cancelled
