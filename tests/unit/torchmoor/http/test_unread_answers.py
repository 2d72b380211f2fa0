"""Clients that send requests without reading the answers."""

from collections.abc import Callable, Coroutine
from typing import Any

from tests.fuzz.connections import LOOP, Stage, Transport, turn
from torchmoor.proxy.http.reader import MAX_AT_ONCE

PING = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
ANSWER = b"HTTP/1.1 200"


def play(script: Callable[[Stage, Transport], Coroutine[Any, Any, None]]) -> None:
    """Run a script for a client on a new stage; at its end nothing may be left."""

    async def run() -> None:
        stage = LOOP.stage = Stage()
        client = stage.take_client()
        await script(stage, client)
        client.lose()
        await turn()
        stage.check_clean()

    LOOP.run_until_complete(run())


def test_no_further_request_is_served_until_the_answers_are_read() -> None:
    """The connection stops reading, so the proxy holds one answer and the received bytes; later all are answered."""

    async def script(stage: Stage, client: Transport) -> None:
        client.pause_writing(True)
        for _ in range(10):
            client.receive(PING * 100)
        await turn()
        assert client.written.count(ANSWER) == 1
        assert client.is_reading_paused

        client.pause_writing(False)
        await turn(100)
        assert client.written.count(ANSWER) == 1000
        assert not client.is_closing()

    play(script)


def test_many_requests_at_once_let_other_connections_in() -> None:
    """Each turn of the loop answers some of them, in order, and reads nothing further until all are answered."""

    async def script(stage: Stage, client: Transport) -> None:
        other = stage.take_client()
        client.receive(PING * 1000)
        other.receive(PING)
        assert client.written.count(ANSWER) == MAX_AT_ONCE
        assert other.written.count(ANSWER) == 1
        assert client.is_reading_paused

        await turn()
        assert MAX_AT_ONCE < client.written.count(ANSWER) < 1000
        await turn(100)
        assert client.written.count(ANSWER) == 1000
        assert not client.is_reading_paused
        other.lose()

    play(script)


def test_a_client_that_leaves_is_answered_no_further() -> None:
    """Requests that a disconnected client has sent at once are dropped."""

    async def script(stage: Stage, client: Transport) -> None:
        client.receive(PING * 1000)
        client.lose()
        await turn(100)
        assert client.written.count(ANSWER) <= 2 * MAX_AT_ONCE

    play(script)


def test_each_answer_that_fills_the_connection_stops_it_again() -> None:
    """A client that reads one answer at a time gets the next one after each."""

    async def script(stage: Stage, client: Transport) -> None:
        client.pause_writing(True)
        client.receive(PING * 3)
        for number in (1, 2, 3):
            await turn()
            assert client.written.count(ANSWER) == number
            write = client.write

            def write_and_fill(data: bytes, write: Callable[[bytes], None] = write) -> None:
                write(data)
                client.pause_writing(True)

            client.write = write_and_fill
            client.pause_writing(False)
            client.write = write

    play(script)


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    """The keep-alive time-out closes the connection of a client that reads nothing."""

    async def script(stage: Stage, client: Transport) -> None:
        client.pause_writing(True)
        client.receive(PING * 2)
        await turn()
        client.protocol.expire()
        await turn()

        assert client.is_closing()
        assert client.written.count(ANSWER) == 1

    play(script)
