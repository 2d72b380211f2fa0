"""Bodies of OpenAI's Responses API as clients may send them: what is refused, and which fields may be left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from handlers.journal.directory import DirectoryJournal
from handlers.settings.handler import JournalSettings
from tests.unit.handlers.conftest import Client, Exchange, ServiceFactory
from torchmoor.wire import headers as wire
from torchmoor.wire.background import run_resource

CREATE = {wire.RESOURCE: "POST responses"}
BODY: dict[str, Any] = {"model": "llava", "input": "Hello", "max_output_tokens": 2}
QUESTIONS = [{"role": "user", "content": text} for text in ("Hello.", "What color is the circle?")]
TOOL = {"type": "function", "name": "f", "parameters": {}}
HALF = "\ud800"  # of a surrogate pair
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"store": False}, {"background": True}])
@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("text", {"text": {"format": {**SCHEMA, "name": HALF}}}),
        ("text", {"text": {"format": {"type": "text", HALF: 1}}}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f", "x": HALF}}),
        ("stop", {"stop": [HALF]}),
        ("stream_options", {"stream_options": {"x": HALF}}),
    ],
)
def test_half_a_surrogate_pair_is_refused_before_the_answer(
    make_client: ServiceFactory, tmp_path: Path, param: str, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    """The response repeats these fields, and the journal keeps them; the error is not a failure of the journal."""
    client = make_client(journal=DirectoryJournal(tmp_path, JournalSettings()))

    answer = client.call({**BODY, **fields, **options}, CREATE)

    assert (answer.status, answer.error, answer.json["error"]["param"]) == (400, "InvalidRequest", param)
    assert client.service.counters.get("journal_failures") == 0
    assert client.service.store.session_ids() == []


@pytest.mark.parametrize("kind", [[], {}, 7, "item_reference"])
def test_an_item_of_another_type_is_refused(client: Client, kind: Any) -> None:
    answer = client.call({**BODY, "input": [{"type": kind}]}, CREATE)

    assert (answer.status, answer.json["error"]["param"]) == (400, "input[0]")


def test_an_image_with_half_a_surrogate_pair_is_refused(client: Client) -> None:
    image = {"type": "input_image", "image_url": f"data:image/png,{HALF}"}

    answer = client.call({**BODY, "input": [{"role": "user", "content": [image]}]}, CREATE)

    assert (answer.status, answer.error) == (415, "NotAnImage")


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_what_is_nested_too_deeply_for_the_template_is_refused(client: Client) -> None:
    """A tool, and the arguments of a call, which are JSON in a text of their own."""
    deep = nested(700)
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": json.dumps(deep)}

    bodies = [{**BODY, "tools": [{**TOOL, "parameters": deep}]}, {**BODY, "input": [call]}]
    answers = [client.call(json.dumps(body).encode(), CREATE) for body in bodies]

    assert [(each.status, each.error) for each in answers] == [(400, "InvalidRequest")] * 2
    assert "nested too deeply" in answers[0].json["error"]["message"]


def test_metadata_may_be_null(client: Client) -> None:
    """As in the types of OpenAI's client."""
    made = client.call({"metadata": None}, {wire.RESOURCE: "POST conversations"})
    conversation = {wire.RESOURCE: f"POST conversations/{made.json['id']}"}
    client.call({"metadata": {"a": "b"}}, conversation)

    updated = client.call({"metadata": None}, conversation)

    assert (made.status, updated.status, updated.json["metadata"]) == (200, 200, {})


def test_a_response_is_deleted_by_a_worker_that_lacks_later_turns(make_client: ServiceFactory, tmp_path: Path) -> None:
    """Another worker has answered in its chain meanwhile."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    one, other = (make_client(instance=name, journal=journal) for name in ("llava-0", "llava-1"))
    first = one.call(BODY, CREATE).json["id"]
    second = other.call({**BODY, "previous_response_id": first}, CREATE).json["id"]

    deleted = one.call({}, {wire.RESOURCE: f"DELETE responses/{first}"})

    assert (deleted.status, deleted.json.get("deleted")) == (200, True)
    assert [one.call({}, {wire.RESOURCE: f"GET responses/{each}"}).status for each in (first, second)] == [404, 200]


def num_input(answer: Exchange) -> int:
    assert answer.status == 200, answer.body
    return int(answer.json["usage"]["input_tokens"])


def test_tokens_of_a_conversation_are_counted_as_usage_counts_them(client: Client) -> None:
    talk = client.call({"items": QUESTIONS}, {wire.RESOURCE: "POST conversations"}).json["id"]
    body = {"model": "llava", "input": "And now?", "conversation": talk}

    counted = client.call(body, {wire.RESOURCE: "POST responses/input_tokens"})
    answer = client.call({**body, "max_output_tokens": 2}, CREATE)

    assert counted.json == {"object": "response.input_tokens", "input_tokens": num_input(answer)}


def test_a_compaction_has_no_conversation(client: Client) -> None:
    talk = client.call({}, {wire.RESOURCE: "POST conversations"}).json["id"]
    body = {"model": "llava", "input": "Hello", "conversation": talk}

    refused = client.call(body, {wire.RESOURCE: "POST responses/compact"})

    assert (refused.status, refused.json["error"]["code"]) == (400, "unknown_parameter")
    assert refused.json["error"]["param"] == "conversation"


@pytest.mark.parametrize("options", [{}, {"store": False}])
def test_input_may_be_left_out_after_a_response(client: Client, options: dict[str, Any]) -> None:
    """The response's conversation is the prompt, for an answer, a count and a compaction."""
    first = client.call(BODY, CREATE).json["id"]
    body = {"model": "llava", "previous_response_id": first}

    counted, compacted = (
        client.call(body, {wire.RESOURCE: f"POST responses/{each}"}) for each in ("input_tokens", "compact")
    )
    answer = client.call({**body, **options, "max_output_tokens": 2}, CREATE)

    assert counted.json["input_tokens"] == num_input(answer)
    assert [item["type"] for item in compacted.json["output"]] == ["compaction"]
    if not options:
        asked = client.call({}, {wire.RESOURCE: f"GET responses/{answer.json['id']}/input_items"})
        assert asked.json["data"] == []


@pytest.mark.parametrize("is_background", [False, True])
def test_input_may_be_left_out_in_a_conversation(client: Client, *, is_background: bool) -> None:
    """The items that a client has added are the question; the answer is the same as to these items alone."""
    talk = client.call({"items": QUESTIONS}, {wire.RESOURCE: "POST conversations"}).json["id"]

    body = {"model": "llava", "conversation": talk, "background": is_background}
    response_id = client.call(body, CREATE).json["id"]
    if is_background:
        assert client.call({}, {wire.RESOURCE: run_resource(response_id)}).status == 200
    answer = client.call({}, {wire.RESOURCE: f"GET responses/{response_id}"})

    alone = client.call({"model": "llava", "input": QUESTIONS}, CREATE)
    assert (num_input(answer), text_of(answer)) == (num_input(alone), text_of(alone))
    items = client.call({}, {wire.RESOURCE: f"GET conversations/{talk}/items?order=asc"}).json["data"]
    assert [item["role"] for item in items] == ["user", "user", "assistant"]


def test_input_is_required_elsewhere(client: Client) -> None:
    refused = client.call({"model": "llava", "input": []}, CREATE)

    assert (refused.status, refused.json["error"]["code"]) == (400, "missing_required_parameter")


def text_of(answer: Exchange) -> str:
    return str(answer.json["output"][0]["content"][0]["text"])
