"""Cancelled answers: at each stage their work ends and their resources are free again."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from handlers.engine.builtin.kv_cache import BLOCK
from tests.unit.handlers.test_chat_service import SHORT, Hold, data_url, settled
from tests.waiting import wait_until


class SilentServer:
    """A server that accepts connections and sends nothing."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/a.png"

    def accept(self) -> socket.socket:
        """Return the next connection, whose client now waits for a response."""
        self._listener.settimeout(30)
        connection, _ = self._listener.accept()
        connection.settimeout(30)
        return connection

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def silent() -> Iterator[SilentServer]:
    with closing(SilentServer()) as server:
        yield server


# One thread for downloads and one for other images; the intake's own time-outs are longer than the test.
PATIENT = {
    "num_threads": 1,
    "fetch_threads": 1,
    "allowed_hosts": ("127.0.0.1",),
    "read_timeout_s": 300.0,
    "total_timeout_s": 300.0,
    "fetching_timeout_s": 300.0,
}


def until_hung_up(connection: socket.socket) -> None:
    """Wait until the peer has closed the connection, after any data."""
    with connection:
        while connection.recv(65_536):
            pass


def test_client_that_leaves_cuts_the_fetch_of_its_image(make_client: Any, red: Any, silent: SilentServer) -> None:
    """When the client disconnects, the connection to a silent server closes, and thread and session are free."""
    client = make_client(intake=PATIENT)
    sid = client.open()

    for _ in range(2):
        left = client.ask(sid, "and this?", images=[silent.url], **SHORT)
        connection = silent.accept()
        left.reply.cancel()
        until_hung_up(connection)

    assert client.ask(sid, "this one?", images=[data_url(red)], **SHORT).wait().status == 200
    turns = settled(client)["turns"]
    assert (turns["cancelled"], turns["failed"], turns["in_progress"]) == (2, 0, 0)


def test_opening_whose_client_leaves_ends_its_fetch(make_client: Any, red: Any, silent: SilentServer) -> None:
    """A cancelled opening creates no session and frees its thread."""
    client = make_client(intake=PATIENT)

    for _ in range(2):
        left = client.send({"type": "start_session", "path": silent.url})
        connection = silent.accept()
        left.reply.cancel()
        until_hung_up(connection)

    client.open(data_url(red))
    assert settled(client)["sessions"]["opened"] == 1


def test_question_that_waits_for_a_thread_is_cancelled_at_once(make_client: Any, silent: SilentServer) -> None:
    """A question that waits for a thread of downloads is cancelled while another still uses that thread."""
    client = make_client(intake=PATIENT)
    sid = client.open()
    slow = client.ask(client.open(), "and this?", images=[silent.url], **SHORT)
    connection = silent.accept()
    queued = client.ask(sid, "and this?", images=[silent.url], **SHORT)

    queued.reply.cancel()

    assert queued.wait().status == 499
    turns = settled(client)["turns"]
    assert (turns["cancelled"], turns["in_progress"]) == (1, 1)
    assert client.ask(sid, "hello", **SHORT).wait().status == 200
    slow.reply.cancel()
    until_hung_up(connection)
    wait_until(lambda: settled(client)["turns"]["cancelled"] == 2, "both turns are cancelled")
    client.open()


def test_turn_that_is_cancelled_while_it_begins_ends(
    make_client: Any, endless_llava: Any, silent: SilentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client leaves after the turn before it has ended, and its image still waits for a thread."""
    client = make_client(endless_llava, intake=PATIENT)
    sid, queues = client.open(), client.service.queues
    slow = client.ask(client.open(), "and this?", images=[silent.url], **SHORT)
    connection = silent.accept()
    hold = Hold(endless_llava)
    earlier = client.ask(sid, "first", **SHORT)
    hold.wait()
    queued = client.ask(sid, "and this?", images=[silent.url], **SHORT)
    dequeue = queues.dequeue

    def dequeue_before_cancel(session: Any, turn: Any) -> Any:
        following = dequeue(session, turn)
        queued.reply.cancel()
        return following

    monkeypatch.setattr(queues, "dequeue", dequeue_before_cancel)
    hold.release()

    assert (earlier.wait().status, queued.wait().status) == (200, 499)
    assert client.ask(sid, "next", **SHORT).wait().status == 200
    slow.reply.cancel()
    until_hung_up(connection)
    wait_until(lambda: settled(client)["turns"]["cancelled"] == 2, "both turns are cancelled")


@pytest.mark.parametrize("where", ["waiting", "fetching", "generating"])
def test_turn_past_its_deadline_ends_wherever_it_is(
    make_client: Any, endless_llava: Any, silent: SilentServer, where: str
) -> None:
    """In the queue, during an image fetch, or in the batch, an expired turn gives 504 and frees its session."""
    client = make_client(endless_llava, intake=PATIENT)
    sid = client.open()
    hold = Hold(endless_llava)
    earlier = client.ask(sid, "first", **SHORT) if where == "waiting" else None
    images = [silent.url] if where == "fetching" else []
    asked_at = time.monotonic()
    late = client.ask(sid, "late", images=images, parameters={"max_new_tokens": 1500})
    if where == "fetching":
        connection = silent.accept()
    else:
        hold.wait()

    deadline = late.reply.deadline
    assert asked_at + 300 <= deadline <= time.monotonic() + 300
    late.reply.expire(deadline - 0.001)
    assert not late.reply.is_cancelled
    late.reply.expire(deadline)
    hold.release()

    assert (late.wait().status, late.error) == (504, "TurnTimedOut")
    if earlier is not None:
        assert earlier.wait().status == 200
    if where == "fetching":
        until_hung_up(connection)
    assert client.ask(sid, "next", **SHORT).wait().status == 200
    turns = settled(client)["turns"]
    assert (turns["timed_out"], turns["failed"], turns["in_progress"]) == (1, 0, 0)


def test_cancelled_answer_gives_its_memory_back(make_client: Any, endless_llava: Any) -> None:
    """Memory reserved for the rest of an answer is free at once, also while the answer waits for a row."""
    client = make_client(endless_llava, engine={"max_rows": 1})
    sessions = [client.open() for _ in range(2)]
    caches = [client.session(sid).cache for sid in sessions]
    long = {"parameters": {"max_new_tokens": 1500}}
    hold = Hold(endless_llava, num_steps=3)
    hold_now = endless_llava.before_step
    endless_llava.before_step = lambda *step: client.service.numbers()["engine"]["queued"] and hold_now(*step)
    running = client.ask(sessions[0], "one", stream=True, **long)
    running.wait_until(lambda exchange: bool(exchange.headers))
    queued = client.ask(sessions[1], "two", **long)
    hold.wait()
    assert caches[0].capacity >= 1500

    queued.reply.cancel()
    running.reply.cancel()
    hold.release()
    settled(client)

    numbers = client.service.numbers()
    assert (numbers["engine"]["rows"], numbers["engine"]["queued"]) == (0, 0)
    assert numbers["tokens"]["generated"] > 2
    assert numbers["memory"]["kv_bytes"] == sum(cache.num_bytes for cache in caches)
    assert all(cache.capacity - cache.length < BLOCK for cache in caches)


def test_completion_whose_client_leaves_ends_with_its_fetch(make_client: Any, silent: SilentServer) -> None:
    """A request without a session is cancelled in the same way."""
    client = make_client(intake=PATIENT)
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": silent.url}}]}]
    left = client.send({"messages": messages, "max_tokens": 4})
    connection = silent.accept()

    left.reply.cancel()

    until_hung_up(connection)
    client.open()
    wait_until(lambda: settled(client)["turns"]["cancelled"] == 1, "the turn is cancelled")
