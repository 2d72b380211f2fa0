"""OpenAI's Responses API over WebSocket, through OpenAI's own client, on real TorchServe instances."""

import json
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import openai
import pytest
import requests
from openai.lib.responses_websocket import ResponsesWebSocketLimits, ResponsesWebSocketSession
from openai.resources.responses.responses import ResponsesConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.torchserve.conftest import Fleet
from tests.torchserve.openai_client import at_both_bases, gpt
from tests.torchserve.test_faults import slowed_workers
from tests.torchserve.test_responses import COLOR, FIRST, SHAPE
from tests.waiting import wait_until

__all__ = ["gpt"]  # a fixture
pytestmark = [
    pytest.mark.torchserve,
    pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager"),  # OpenAI's client does not
]
NUMBERS: Any = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"const": 7}, "minItems": 150, "maxItems": 150}},
    "required": ["numbers"],
    "additionalProperties": False,
}
LONG: Any = {"text": {"format": {"type": "json_schema", "name": "numbers", "schema": NUMBERS, "strict": True}}}
LAST = ("response.completed", "response.incomplete", "response.failed", "error")


@contextmanager
def connected(gpt: openai.OpenAI) -> Iterator[ResponsesConnection]:
    """Open a connection of OpenAI's client."""
    with gpt.responses.connect() as connection:
        yield connection


def events_of(connection: ResponsesConnection, **body: Any) -> list[Any]:
    """Send a message, and return the events of its answer."""
    message: Any = {"type": "response.create", "model": "llava", **body}
    connection.send(message)
    events: list[Any] = []
    while not events or events[-1].type not in LAST:
        events.append(connection.recv())
    return events


def ask(connection: ResponsesConnection, **body: Any) -> Any:
    """Return the response, or the error, of a message."""
    last = events_of(connection, **body)[-1]
    return last.error if last.type == "error" else last.response


@at_both_bases
def test_a_connection_has_the_events_of_http(gpt: openai.OpenAI) -> None:
    """Each response's events are those of HTTP, and nothing follows the last one."""
    over_http = list(gpt.responses.create(model="llava", input=FIRST, stream=True))
    with connected(gpt) as connection:
        first = events_of(connection, input=FIRST)
        second = events_of(connection, input=SHAPE, previous_response_id=first[-1].response.id)

    assert [event.type for event in first] == [event.type for event in over_http]
    assert [getattr(event, "delta", None) for event in first] == [getattr(each, "delta", None) for each in over_http]
    assert [event.sequence_number for event in second] == list(range(len(second)))
    assert "circle" in second[-1].response.output_text
    assert second[-1].response.usage.input_tokens_details.cached_tokens > 0
    assert gpt.responses.retrieve(second[-1].response.id).output_text == second[-1].response.output_text


def test_an_unstored_response_continues_on_its_connection_only(gpt: openai.OpenAI) -> None:
    """Only the new input is sent; the first turn's image and the cache are used."""
    with connected(gpt) as connection, connected(gpt) as other:
        first = ask(connection, input=FIRST, store=False)
        second = ask(connection, input=SHAPE, store=False, previous_response_id=first.id)
        elsewhere = ask(other, input=SHAPE, store=False, previous_response_id=second.id)
        fresh = ask(other, input=FIRST, store=False)
        third = ask(connection, input=COLOR, store=False, previous_response_id=second.id)
        stored = ask(connection, input=SHAPE, previous_response_id=third.id)
        with pytest.raises(openai.NotFoundError):
            gpt.responses.retrieve(third.id)

    assert second.previous_response_id == first.id
    assert "circle" in second.output_text
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert elsewhere.code == "previous_response_not_found"
    assert "red" in fresh.output_text
    assert "red" in third.output_text
    assert "circle" in gpt.responses.retrieve(stored.id).output_text
    assert "red" in gpt.responses.create(model="llava", input=COLOR, previous_response_id=stored.id).output_text


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_response_is_prepared_before_its_question_is_known(gpt: openai.OpenAI, *, is_stored: bool) -> None:
    """The client's `generate` computes a prompt, whose picture and cache the next response uses."""
    with connected(gpt) as connection:
        prepared = events_of(connection, input=FIRST, store=is_stored, generate=False)
        response = prepared[-1].response
        answer = ask(connection, input=SHAPE, store=is_stored, previous_response_id=response.id)

    assert [event.type for event in prepared] == ["response.created", "response.in_progress", "response.completed"]
    assert (response.output, response.usage.output_tokens) == ([], 0)
    assert "circle" in answer.output_text
    assert answer.previous_response_id == response.id
    assert answer.usage.input_tokens_details.cached_tokens > 0


def test_lanes_of_openais_session_have_their_own_chains(gpt: openai.OpenAI) -> None:
    """Its helper sorts the events of a connection by their lanes."""
    limits = ResponsesWebSocketLimits(
        max_lanes=4, max_events_per_lane=256, max_events=512, max_bytes_per_lane=1 << 24, max_bytes=1 << 24
    )
    message = {"type": "response.create", "model": "llava", "store": False}
    with connected(gpt) as connection, ResponsesWebSocketSession(connection, limits=limits) as session:
        lanes: list[Any] = [session.lane("first"), session.lane("second")]
        for lane in lanes:
            lane.send({**message, "input": FIRST})
        answers = [lane.get_final_response(timeout=60) for lane in lanes]
        for lane, question, answer in zip(lanes, (SHAPE, COLOR), answers, strict=True):
            lane.send({**message, "input": question, "previous_response_id": answer.id})
        shape, color = (lane.get_final_response(timeout=60) for lane in lanes)

    assert answers[0].id != answers[1].id
    assert "circle" in shape.output_text
    assert "red" in color.output_text


def test_a_failed_continuation_drops_the_response_that_it_named(gpt: openai.OpenAI) -> None:
    """A stored response stays; an unknown one is not found, and the connection goes on."""
    wrong: Any = [{"type": "function_call_output", "call_id": "call_x", "output": "1"}]
    with connected(gpt) as connection:
        unstored = ask(connection, input=FIRST, store=False)
        failed = ask(connection, input=wrong, store=False, previous_response_id=unstored.id)
        gone = ask(connection, input=SHAPE, store=False, previous_response_id=unstored.id)
        stored = ask(connection, input=FIRST)
        failed_again = ask(connection, input=wrong, previous_response_id=stored.id)
        following = ask(connection, input=SHAPE, previous_response_id=stored.id)
        unknown = ask(connection, input=SHAPE, previous_response_id="resp_unknown")

    assert "No tool call found" in failed.message
    assert gone.code == "previous_response_not_found"
    assert "No tool call found" in failed_again.message
    assert "circle" in following.output_text
    assert (unknown.code, unknown.param) == ("previous_response_not_found", "previous_response_id")


def test_compaction_is_the_base_of_a_connection(gpt: openai.OpenAI) -> None:
    """A response after a compaction may be unstored and continued."""
    compacted = gpt.responses.compact(model="llava", input=FIRST)
    base = [item.to_dict() for item in compacted.output]
    with connected(gpt) as connection:
        first = ask(connection, input=[*base, {"role": "user", "content": COLOR}], store=False)
        second = ask(connection, input=SHAPE, store=False, previous_response_id=first.id)

    assert "red" in first.output_text
    assert "circle" in second.output_text


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("{", "not valid JSON"),
        ("[]", "response.create"),
        ('{"type": "response.steer", "input": "x", "previous_response_id": "r"}', "response.create"),
        ('{"type": "response.create", "model": "llava", "input": "x", "background": true}', "'background'"),
        ('{"type": "response.create", "model": "llava", "input": "x", "stream_id": "a b"}', "'stream_id'"),
        ('{"type": "response.create", "input": "x"}', "'model'"),
    ],
)
def test_refused_message_is_an_error_event(gpt: openai.OpenAI, message: str, told: str) -> None:
    """The connection stays open after a refused message."""
    with connected(gpt) as connection:
        connection.send_raw(message)
        refused: Any = connection.recv()
        answered = ask(connection, input=FIRST, store=False)

    assert refused.type == "error"
    assert told in refused.error.message
    assert "red" in answered.output_text


def test_pages_of_other_sites_may_not_connect(fleet: Fleet) -> None:
    """The checks of Host and Origin apply to WebSocket connections, too."""
    address = fleet.runtime.replace("http://", "ws://") + "/v1/responses"
    foreign: Any = "https://evil.example"
    with pytest.raises(InvalidStatus) as caught, connect(address, origin=foreign, open_timeout=60):
        pass
    assert caught.value.response.status_code == 403
    handshake = {
        **{"Host": "evil.example", "Connection": "Upgrade", "Upgrade": "websocket"},
        **{"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version": "13"},
    }
    assert requests.get(f"{fleet.runtime}/v1/responses", headers=handshake, timeout=60).status_code == 403
    own: Any = fleet.runtime
    with connect(address, origin=own, open_timeout=60) as client:
        client.send("{")
        assert "not valid JSON" in str(client.recv(timeout=60))


def address_of(fleet: Fleet) -> str:
    return fleet.runtime.replace("http://", "ws://") + "/v1/responses"


def num_open(fleet: Fleet) -> float:
    page = requests.get(f"{fleet.admin}/metrics", timeout=60).text
    [value] = re.findall(r"^WebSocketConnections (.*)$", page, re.MULTILINE)
    return float(value)


def create(given: Any, **fields: Any) -> str:
    return json.dumps({"type": "response.create", "model": "llava", "input": given, **fields})


def test_a_cut_connection_ends_its_answer(fleet: Fleet) -> None:
    """The instance stops the turn, and the connection counts no longer."""
    wait_until(lambda: num_open(fleet) == 0, "no connection of another test is left")
    with slowed_workers(fleet):
        client = connect(address_of(fleet), open_timeout=60)
        client.send(create("Count", **LONG))
        while "output_text.delta" not in str(client.recv(timeout=60)):
            pass
        assert num_open(fleet) == 1
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.socket.shutdown(socket.SHUT_RDWR)
        with suppress(ConnectionClosed):
            while True:
                assert "response.completed" not in str(client.recv(timeout=60))

    wait_until(lambda: num_open(fleet) == 0, "the connection is forgotten")
    wait_until(lambda: not fleet.count("turns", "running"), "no turn is left")


def test_many_messages_at_once_are_answered_in_order(fleet: Fleet) -> None:
    """Messages sent without waiting are each answered whole, in order."""
    with connect(address_of(fleet), open_timeout=60) as client:
        for number in range(20):
            client.send(create("Hello", max_output_tokens=1, metadata={"number": str(number)}))
        numbers: list[str] = []
        while len(numbers) < 20:
            event = json.loads(client.recv(timeout=60))
            if event["type"] in LAST:
                numbers.append(event["response"]["metadata"]["number"])

    assert numbers == [str(number) for number in range(20)]
