"""Responses without output: `generate: false` computes the prompt, and later responses continue after it."""

import json
from pathlib import Path
from typing import Any

import pytest

from handlers.journal.directory import DirectoryJournal
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.conftest import Client, Exchange, ServiceFactory
from torchmoor.wire import headers as wire

CREATE = {wire.RESOURCE: "POST responses"}
LONG = "What color is the circle in this picture? " * 8
BODY: dict[str, Any] = {"model": "llava", "input": LONG, "generate": False}
NEXT: dict[str, Any] = {"model": "llava", "input": "And now?", "max_output_tokens": 4}
TOOL = {"type": "function", "name": "f", "parameters": {}}


def create(client: Client, body: dict[str, Any], **fields: Any) -> Any:
    answer = client.call({**body, **fields}, CREATE)
    assert answer.status == 200, answer.body
    return answer.json


def events(answer: Exchange) -> list[Any]:
    return [json.loads(line[len("data: ") :]) for line in answer.body.decode().splitlines() if line[:5] == "data:"]


@pytest.mark.parametrize("fields", [{}, {"store": False}, {"min_tokens": 3}, {"tools": [TOOL], "stop": ["a"]}])
@pytest.mark.parametrize("asked", [{}, {"generate": True, "prompt_cache_options": {"prewarm": True}}])
def test_a_prepared_response_has_no_output(client: Client, asked: dict[str, Any], fields: dict[str, Any]) -> None:
    response = create(client, BODY, **asked, **fields, max_output_tokens=50, include=["message.output_text.logprobs"])

    assert (response["status"], response["output"], response["max_output_tokens"]) == ("completed", [], 50)
    usage = response["usage"]
    assert (usage["output_tokens"], usage["total_tokens"]) == (0, usage["input_tokens"])


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_a_response_continues_after_a_prepared_one(
    make_client: ServiceFactory, tmp_path: Path, *, is_rebuilt: bool
) -> None:
    """The answer is the one to the same items, whose prompt is in the cache; another worker reads them."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    client = make_client(instance="llava-0", journal=journal)
    prepared = create(client, BODY)
    if is_rebuilt:
        client = make_client(instance="llava-1", journal=journal)

    answer = create(client, NEXT, previous_response_id=prepared["id"])
    items = [{"role": "user", "content": text} for text in (LONG, NEXT["input"])]
    whole = create(client, NEXT, input=items, store=False)

    assert [item["content"] for item in answer["output"]] == [item["content"] for item in whole["output"]]
    assert answer["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    if not is_rebuilt:
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] > prepared["usage"]["input_tokens"] // 2
    for path, shown in (("", prepared), ("/input_items", None)):
        found = client.call({}, {wire.RESOURCE: f"GET responses/{prepared['id']}{path}"})
        assert found.status == 200
        assert shown is None or found.json == shown


@pytest.mark.parametrize("fields", [{}, {"store": False}])
def test_the_stream_of_a_prepared_response(client: Client, fields: dict[str, Any]) -> None:
    """It has the events of a response without items, and can be repeated."""
    answer = client.call({**BODY, **fields, "stream": True}, CREATE)

    found = events(answer)
    kinds = ["response.created", "response.in_progress", "response.completed"]
    assert [(each["type"], each["sequence_number"]) for each in found] == [(k, n) for n, k in enumerate(kinds)]
    assert found[-1]["response"]["output"] == []
    if not fields:
        path = f"GET responses/{found[-1]['response']['id']}?stream=true"
        assert events(client.call({}, {wire.RESOURCE: path})) == found


def test_a_retried_request_gets_the_prepared_response(client: Client) -> None:
    headers = {**CREATE, wire.INVOCATION_ID: "once"}

    first, whole, streamed = (client.call({**BODY, **each}, headers) for each in ({}, {}, {"stream": True}))

    assert whole.json == first.json
    assert events(streamed)[-1]["response"] == first.json


def test_instructions_are_enough_to_prepare(client: Client) -> None:
    """A client may know its instructions and tools before its first input."""
    prepared = create(client, {"model": "llava", "instructions": LONG, "generate": False, "tools": [TOOL]}, input=[])

    assert create(client, NEXT, previous_response_id=prepared["id"], instructions=LONG)["output"]
    assert client.call({"model": "llava", "generate": False}, CREATE).json["error"]["param"] == "input"


def test_a_prepared_response_adds_its_input_to_a_conversation(client: Client) -> None:
    talk = client.call({}, {wire.RESOURCE: "POST conversations"}).json["id"]

    create(client, BODY, conversation=talk)

    [item] = client.call({}, {wire.RESOURCE: f"GET conversations/{talk}/items"}).json["data"]
    assert item["content"][0]["text"] == LONG
    assert create(client, NEXT, conversation=talk)["output"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"generate": 1}, "generate"),
        ({"background": True}, "background"),
        ({"generate": True, "prompt_cache_options": {"prewarm": True}, "background": True}, "background"),
    ],
)
def test_what_cannot_be_prepared_is_refused(client: Client, fields: dict[str, Any], param: str) -> None:
    answer = client.call({**BODY, **fields}, CREATE)

    assert (answer.status, answer.json["error"]["param"]) == (400, param)
