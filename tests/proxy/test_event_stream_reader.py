"""The reader of boto3's event streams, with the real boto3 client against the proxy."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.proxy.conftest import Stage
from tests.proxy.fake_instance import Behaviour, Gate, Received, Wire
from tests.waiting import wait_until
from torchmoor.clients.errors import ModelStreamError, StreamCut
from torchmoor.clients.events import abort, payload_parts, read_event_stream

FIRST = '{"token": {"id": 1, "text": "größer "}}\n'.encode()
LINES = FIRST + '{"token": {"id": 2, "text": "€"}, "generated_text": "größer €"}\n'.encode()


def writing(*chunks: bytes, is_whole: bool = True) -> Behaviour:
    """Return a behaviour that streams these chunks and possibly breaks off."""

    async def behave(request: Received, wire: Wire) -> None:
        await wire.begin_stream("application/jsonlines")
        for chunk in chunks:
            await wire.chunk(chunk)
        if is_whole:
            await wire.chunk(b"")
        else:
            wire.reset()

    return behave


def body(stage: Stage) -> Any:
    answer = stage.client().invoke_endpoint_with_response_stream(EndpointName="llava", Body=b"{}")
    return answer["Body"]


def test_parts_may_be_cut_anywhere(stage: Stage) -> None:
    """A line, a JSON value and a character over several PayloadParts."""
    stage.a.behave = stage.b.behave = writing(*(LINES[at : at + 3] for at in range(0, len(LINES), 3)))

    assert [piece.text for piece in read_event_stream(body(stage))] == ["größer ", "€"]


def test_a_broken_stream_tells_what_had_come(stage: Stage) -> None:
    """After an instance's death boto3's error becomes a ModelStreamError with its code and the text so far."""
    stage.a.behave = stage.b.behave = writing(LINES[:60], is_whole=False)

    with pytest.raises(ModelStreamError) as caught:
        list(read_event_stream(body(stage)))

    assert caught.value.received == "größer "
    assert (caught.value.code, caught.value.error_code) == ("ModelStreamError", "StreamBroken")


def test_an_answer_that_just_ends_is_not_whole(stage: Stage) -> None:
    """An orderly end of the stream in mid-answer is not a whole answer."""
    stage.a.behave = stage.b.behave = writing(LINES[:60])

    with pytest.raises(StreamCut) as caught:
        list(read_event_stream(body(stage)))

    assert caught.value.received == "größer "


def test_whoever_stops_reading_ends_the_request(stage: Stage) -> None:
    """Closing the iterator, or a stop sequence, closes the connection, and so the proxy's to the instance."""
    left: list[int] = []

    async def endless(request: Received, wire: Wire) -> None:
        await wire.begin_stream("application/jsonlines")
        await wire.chunk(LINES[:60])
        with suppress(ConnectionError):
            while not wire.writer.transport.is_closing():
                await wire.chunk(b"\n")
                await asyncio.sleep(0)
        left.append(1)

    stage.a.behave = stage.b.behave = endless

    pieces = read_event_stream(body(stage))
    assert next(pieces).text == "größer "
    pieces.close()
    stage.until(lambda: len(left) == 1, "the instance sees that the client left")
    assert [piece.text for piece in read_event_stream(body(stage), ["ßer"])] == ["grö"]
    stage.until(lambda: len(left) == 2, "the instance sees that the client left")


def test_a_reader_that_waits_can_be_ended_from_another_thread(stage: Stage) -> None:
    """Closing a reader from another thread wakes the one that waits for a token, before its time-out."""
    gate = Gate()

    async def silent(request: Received, wire: Wire) -> None:
        await wire.begin_stream("application/jsonlines")
        await wire.chunk(FIRST)
        await gate.pass_through()
        await wire.chunk(b"")

    stage.a.behave = stage.b.behave = silent
    events = body(stage)
    pieces = read_event_stream(events)
    assert next(pieces).text == "größer "

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(next, pieces)
        wait_until(waiting.running, "the thread waits")
        abort(events)
        with pytest.raises(StreamCut):
            waiting.result(60)
    gate.open()


def test_clients_that_give_errors_as_events_are_understood() -> None:
    """Errors that a client returns as events, instead of raising the model's exceptions, are understood."""
    events = [{"PayloadPart": {"Bytes": b"{"}}, {"InternalStreamFailure": {"Message": "our fault"}}]

    with pytest.raises(ModelStreamError, match="our fault") as caught:
        list(payload_parts(events))

    assert caught.value.code == "InternalStreamFailure"
