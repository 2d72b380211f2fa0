"""The cases of the Open Responses acceptance suite as tests of our own, over plain HTTP and WebSocket clients.

They run one by one, and all at once as the suite sends them, where none may be refused for load.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests
from openai.types.responses import Response
from websockets.sync.client import ClientConnection, connect

from tests.torchserve.conftest import SCRIPTED_NAME, Fleet
from tests.torchserve.drawings import data_url, draw

pytestmark = pytest.mark.torchserve
TIMEOUT_S = 30  # for each case, as in the suite
FIELDS = frozenset(
    (
        *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "error"),
        *("previous_response_id", "instructions", "output", "tools", "tool_choice", "truncation", "text"),
        *("parallel_tool_calls", "temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs"),
        *("reasoning", "usage", "max_output_tokens", "max_tool_calls", "store", "background", "service_tier"),
        *("metadata", "safety_identifier", "prompt_cache_key"),
    )
)
NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
HISTORY = [
    {"type": "message", "role": "user", "content": "My name is Alice."},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello Alice."}]},
    {"type": "message", "role": "user", "content": "What is my name?"},
]
PHASES = [
    {"type": "message", "role": "user", "content": "Look at this."},
    {"type": "message", "role": "assistant", "phase": "commentary", "content": "I look."},
    {"type": "message", "role": "assistant", "phase": "final_answer", "content": "It is a circle."},
    {"type": "message", "role": "user", "content": "Which color?"},
]
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
WRONG_RESULT = [{"type": "function_call_output", "call_id": "call_that_fits_none", "output": "{}"}]


class OpenResponses:
    """A client of the suite."""

    def __init__(self, address: str) -> None:
        self.address = address

    def post(self, path: str = "responses", *, status: int = 200, **body: Any) -> Any:
        answer = requests.post(f"{self.address}/v1/{path}", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == status, answer.text
        return answer.json()

    def ask(self, given: Any, **fields: Any) -> Any:
        """Return a completed response, with every field that the schema requires."""
        return check(self.post(model=SCRIPTED_NAME, input=given, **fields))

    def stream(self, given: Any) -> list[Any]:
        """Return the events of a streamed response."""
        body = {"model": SCRIPTED_NAME, "input": given, "stream": True}
        answer = requests.post(f"{self.address}/v1/responses", json=body, timeout=TIMEOUT_S)
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]

    @contextmanager
    def connected(self) -> Iterator[ClientConnection]:
        address = self.address.replace("http://", "ws://") + "/v1/responses"
        with connect(address, open_timeout=TIMEOUT_S) as socket:
            yield socket


def check(response: Any) -> Any:
    """Return a response that is complete and has the schema's form."""
    assert set(response) >= FIELDS
    assert all(isinstance(response[name], int | float) for name in NUMBERS)
    assert (response["object"], response["status"]) == ("response", "completed")
    assert response["output"]
    Response.model_validate(response, strict=True)
    return response


def send(socket: ClientConnection, given: Any, **fields: Any) -> Any:
    """Return the last event of a message's answer."""
    socket.send(json.dumps({"type": "response.create", "model": SCRIPTED_NAME, "input": given, **fields}))
    while True:
        event = json.loads(socket.recv(timeout=TIMEOUT_S))
        if event["type"] == "response.completed":
            check(event["response"])
            return event
        if event["type"] in ("response.failed", "response.incomplete", "error"):
            return event


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def plain_text(suite: OpenResponses) -> None:
    assert text_of(suite.ask("Say hello."))


def history_with_phases(suite: OpenResponses) -> None:
    assert text_of(suite.ask(PHASES))


def schema_with_phases(suite: OpenResponses) -> None:
    response = suite.ask(PHASES, temperature=0.5, top_p=0.9, metadata={"a": "b"})
    assert (response["temperature"], response["top_p"], response["metadata"]) == (0.5, 0.9, {"a": "b"})
    items = requests.get(f"{suite.address}/v1/responses/{response['id']}/input_items?order=asc", timeout=TIMEOUT_S)
    assert [item.get("phase") for item in items.json()["data"]] == [None, "commentary", "final_answer", None]


def streamed(suite: OpenResponses) -> None:
    events = suite.stream("Count.")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [events[0]["type"], events[-1]["type"]] == ["response.created", "response.completed"]
    told = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert told == text_of(check(events[-1]["response"]))


def system_message(suite: OpenResponses) -> None:
    system = {"type": "message", "role": "system", "content": "You are a pirate."}
    assert text_of(suite.ask([system, *HISTORY[:1]]))


def function_tool(suite: OpenResponses) -> None:
    # The scripted model writes no arguments of its own, so a grammar must.
    response = suite.ask("What is the weather in Paris?", tools=[TOOL], tool_choice="required")
    [call] = [item for item in response["output"] if item["type"] == "function_call"]
    assert call["name"] == "get_weather"
    assert set(json.loads(call["arguments"])) == {"location"}


def picture(suite: OpenResponses) -> None:
    parts = [
        {"type": "input_text", "text": "What is in this picture?"},
        {"type": "input_image", "image_url": data_url(draw("circle", "red"))},
    ]
    assert text_of(suite.ask([{"type": "message", "role": "user", "content": parts}]))


def history(suite: OpenResponses) -> None:
    assert text_of(suite.ask(HISTORY))


def compaction(suite: OpenResponses) -> None:
    compacted = suite.post("responses/compact", model=SCRIPTED_NAME, input=HISTORY[:2], prompt_cache_key="key")
    assert compacted["object"] == "response.compaction"
    assert compacted["output"][-1]["type"] == "compaction"
    assert text_of(suite.ask([*compacted["output"], *HISTORY[2:]]))


def compaction_without_model(suite: OpenResponses) -> None:
    refused = suite.post("responses/compact", status=400, input=HISTORY[:2])
    assert refused["error"]["param"] == "model"


def socket_answers(suite: OpenResponses) -> None:
    with suite.connected() as socket:
        assert send(socket, "Say hello.")["type"] == "response.completed"


def socket_answers_in_sequence(suite: OpenResponses) -> None:
    with suite.connected() as socket:
        first, second = send(socket, "One."), send(socket, "Two.")
    assert first["response"]["id"] != second["response"]["id"]


def socket_continues_unstored(suite: OpenResponses) -> None:
    with suite.connected() as socket:
        first = send(socket, HISTORY[:1], store=False)["response"]
        second = send(socket, HISTORY[2:], store=False, previous_response_id=first["id"])["response"]
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def socket_elsewhere(suite: OpenResponses) -> None:
    with suite.connected() as socket, suite.connected() as other:
        first = send(socket, HISTORY[:1], store=False)["response"]
        refused = send(other, HISTORY[2:], store=False, previous_response_id=first["id"])
        fresh = send(other, HISTORY, store=False)
    assert refused["error"]["code"] == "previous_response_not_found"
    assert fresh["type"] == "response.completed"


def socket_with_unknown_id(suite: OpenResponses) -> None:
    with suite.connected() as socket:
        refused = send(socket, "Hello.", previous_response_id="resp_that_does_not_exist")
    assert refused["error"]["code"] == "previous_response_not_found"


def socket_after_failure(suite: OpenResponses) -> None:
    with suite.connected() as socket:
        first = send(socket, HISTORY[:1], store=False)["response"]
        failed = send(socket, WRONG_RESULT, store=False, previous_response_id=first["id"])
        gone = send(socket, HISTORY[2:], store=False, previous_response_id=first["id"])
    assert failed["type"] == "error"
    assert gone["error"]["code"] == "previous_response_not_found"


def socket_after_compaction(suite: OpenResponses) -> None:
    compacted = suite.post("responses/compact", model=SCRIPTED_NAME, input=HISTORY[:2])
    with suite.connected() as socket:
        event = send(socket, [*compacted["output"], *HISTORY[2:]])
    assert event["type"] == "response.completed"


CASES: tuple[Callable[[OpenResponses], None], ...] = (
    *(plain_text, history_with_phases, schema_with_phases, streamed, system_message, function_tool, picture, history),
    *(compaction, compaction_without_model, socket_answers, socket_answers_in_sequence, socket_continues_unstored),
    *(socket_elsewhere, socket_with_unknown_id, socket_after_failure, socket_after_compaction),
)


@pytest.fixture
def suite(scripted: Fleet) -> OpenResponses:
    return OpenResponses(scripted.runtime)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_each_case_passes(suite: OpenResponses, case: Callable[[OpenResponses], None]) -> None:
    case(suite)


def test_all_cases_pass_at_once(suite: OpenResponses) -> None:
    assert len(CASES) == 17
    with ThreadPoolExecutor(len(CASES)) as pool:
        for future in [pool.submit(case, suite) for case in CASES]:
            future.result()
