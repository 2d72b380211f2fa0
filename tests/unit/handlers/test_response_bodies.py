"""Bodies of OpenAI's Responses API as clients may send them: what is refused, and which fields may be left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from handlers.journal.directory import DirectoryJournal
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.conftest import Client, Exchange, FakeClock, ServiceFactory
from torchmoor.wire import headers as wire
from torchmoor.wire.background import run_resource

CREATE = {wire.RESOURCE: "POST responses"}
BODY: dict[str, Any] = {"model": "llava", "input": "Hello", "max_output_tokens": 2}
QUESTIONS = [{"role": "user", "content": text} for text in ("Hello.", "What color is the circle?")]
TOOL = {"type": "function", "name": "f", "parameters": {}}
LOGPROBS = "message.output_text.logprobs"
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
    """A field with half a surrogate pair is refused first, because the response and the journal repeat it."""
    client = make_client(journal=DirectoryJournal(tmp_path, JournalSettings()))

    answer = client.call({**BODY, **fields, **options}, CREATE)

    assert (answer.status, answer.error, answer.json["error"]["param"]) == (400, "InvalidRequest", param)
    assert client.service.counters.get("journal_failures") == 0
    assert client.service.store.session_ids() == []


@pytest.mark.parametrize("kind", [[], {}, 7, "computer_call"])
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
    """Tools, and the arguments of calls in their JSON text, are refused if nested too deeply for the template."""
    deep = nested(700)
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": json.dumps(deep)}

    bodies = [{**BODY, "tools": [{**TOOL, "parameters": deep}]}, {**BODY, "input": [call]}]
    answers = [client.call(json.dumps(body).encode(), CREATE) for body in bodies]

    assert [(each.status, each.error) for each in answers] == [(400, "InvalidRequest")] * 2
    assert "nested too deeply" in answers[0].json["error"]["message"]


@pytest.mark.parametrize("number", ["-2", "x", "1000000000", "9" * 5000])
def test_a_wrong_number_of_an_event_is_refused_with_its_range(client: Client, number: str) -> None:
    response_id = client.call(BODY, CREATE).json["id"]

    answer = client.call({}, {wire.RESOURCE: f"GET responses/{response_id}?stream=true&starting_after={number}"})

    assert (answer.status, answer.json["error"]["param"]) == (400, "starting_after")
    assert "a whole number from 0 to 999999999" in answer.json["error"]["message"]


def test_a_conversation_says_when_it_ends(client: Client, clock: FakeClock) -> None:
    """Its object has the field in each answer; then its requests get a 404."""
    made = client.call({"metadata": {"a": "b"}}, {wire.RESOURCE: "POST conversations"}).json
    path = f"conversations/{made['id']}"
    shown = client.call({}, {wire.RESOURCE: f"GET {path}"})
    updated = client.call({"metadata": {}}, {wire.RESOURCE: f"POST {path}"}).json

    clock.advance(made["expires_at"] - clock.now)

    assert (shown.json, updated["expires_at"]) == (made, made["expires_at"])
    assert client.call({}, {wire.RESOURCE: f"GET {path}"}).status == 404


def test_metadata_may_be_null(client: Client) -> None:
    """metadata may be null, as in the types of OpenAI's client."""
    made = client.call({"metadata": None}, {wire.RESOURCE: "POST conversations"})
    conversation = {wire.RESOURCE: f"POST conversations/{made.json['id']}"}
    client.call({"metadata": {"a": "b"}}, conversation)

    updated = client.call({"metadata": None}, conversation)

    assert (made.status, updated.status, updated.json["metadata"]) == (200, 200, {})


def test_a_response_is_deleted_by_a_worker_that_lacks_later_turns(make_client: ServiceFactory, tmp_path: Path) -> None:
    """A response is deleted although another worker has answered later turns of its chain."""
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


def reference(item: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_items_are_named_instead_of_sent_again(make_client: ServiceFactory, tmp_path: Path, is_rebuilt: bool) -> None:
    """Stored items are named by id, also on another worker, as the Vercel AI SDK does."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    client = make_client(instance="llava-0", journal=journal)
    called = client.call({**BODY, "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 400}, CREATE).json
    result = {"type": "function_call_output", "call_id": called["output"][0]["call_id"], "output": "Done"}
    asked = [QUESTIONS[0], *called["output"], result]
    answered = client.call({**BODY, "input": asked, "tools": [TOOL]}, CREATE).json
    whole = [*asked, *answered["output"], QUESTIONS[1]]
    if is_rebuilt:
        client = make_client(instance="llava-1", journal=journal)

    named = [reference(item) if "id" in item else item for item in whole]
    answers = [client.call({**BODY, "input": each}, CREATE) for each in (whole, named)]
    unstored = client.call({**BODY, "input": named, "store": False}, CREATE)
    counted = client.call({"model": "llava", "input": named}, {wire.RESOURCE: "POST responses/input_tokens"})
    talk = client.call({"items": named}, {wire.RESOURCE: "POST conversations"}).json["id"]

    assert sum(item.get("type") == "item_reference" for item in named) >= 2
    assert [num_input(each) for each in (*answers, unstored)] == [counted.json["input_tokens"]] * 3
    assert text_of(answers[0]) == text_of(answers[1]) == text_of(unstored)
    paths = (f"responses/{answers[1].json['id']}/input_items", f"conversations/{talk}/items")
    for path in paths:
        shown = client.call({}, {wire.RESOURCE: f"GET {path}?order=asc"}).json["data"]
        assert [item["type"] for item in shown] == [item.get("type", "message") for item in whole]


def test_an_item_that_is_not_stored_is_not_found(make_client: ServiceFactory, tmp_path: Path) -> None:
    """An item that is not stored, is deleted or belongs to another caller is not found, nor is a missing place."""
    client = make_client(journal=DirectoryJournal(tmp_path, JournalSettings()))
    unstored = client.call({**BODY, "store": False}, CREATE).json["output"][0]
    kept, deleted = (client.call(BODY, CREATE).json for _ in range(2))
    client.call({}, {wire.RESOURCE: f"DELETE responses/{deleted['id']}"})
    other = {wire.PRINCIPAL: "other", **CREATE}
    item = kept["output"][0]

    absent = [unstored, deleted["output"][0], {"id": f"{item['id']}7"}, {"id": "msg_x"}, {"id": kept["id"]}]
    answers = [client.call({**BODY, "input": [reference(each)]}, CREATE) for each in absent]
    answers.append(client.call({**BODY, "input": [reference(item)]}, other))

    for answer in answers:
        assert (answer.status, answer.json["error"]["param"]) == (404, "input")
        assert "send the item itself" in answer.json["error"]["message"]
    assert client.call({**BODY, "input": [reference(item)]}, CREATE).status == 200


def test_a_deleted_item_is_not_found_where_it_was_read_before(make_client: ServiceFactory, tmp_path: Path) -> None:
    """A deleted item is not found on an instance that read it before, although another one deleted it."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    one, other = (make_client(instance=name, journal=journal) for name in ("llava-0", "llava-1"))
    kept = one.call(BODY, CREATE).json
    response = one.call({**BODY, "previous_response_id": kept["id"]}, CREATE).json
    talk = one.call({"items": QUESTIONS}, {wire.RESOURCE: "POST conversations"}).json["id"]
    added = one.call({}, {wire.RESOURCE: f"GET conversations/{talk}/items"}).json["data"][0]
    deleted = (response["output"][0], added)
    for item in deleted:
        assert other.call({**BODY, "input": [reference(item)]}, CREATE).status == 200

    one.call({}, {wire.RESOURCE: f"DELETE responses/{response['id']}"})
    one.call({}, {wire.RESOURCE: f"DELETE conversations/{talk}/items/{added['id']}"})

    for client in (one, other):
        assert [client.call({**BODY, "input": [reference(item)]}, CREATE).status for item in deleted] == [404, 404]
        assert client.call({**BODY, "input": [reference(kept["output"][0])]}, CREATE).status == 200


def test_a_deleted_response_is_not_found_where_it_was_read_before(make_client: ServiceFactory, tmp_path: Path) -> None:
    """A deleted response is not found on an instance that held its session before and takes it over again."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    one, other = (make_client(instance=name, journal=journal) for name in ("llava-0", "llava-1"))
    kept = one.call(BODY, CREATE).json["id"]
    deleted = one.call({**BODY, "previous_response_id": kept}, CREATE).json["id"]
    path = f"responses/{deleted}"
    assert other.call({}, {wire.RESOURCE: f"GET {path}"}).status == 200

    one.call({}, {wire.RESOURCE: f"DELETE {path}"})

    for target in (path, f"{path}/input_items", f"{path}?stream=true"):
        assert other.call({}, {wire.RESOURCE: f"GET {target}"}).status == 404
    for options in ({}, {"store": False}, {"background": True}):
        assert other.call({**BODY, "previous_response_id": deleted, **options}, CREATE).status == 404
    assert other.call({}, {wire.RESOURCE: f"GET responses/{kept}"}).status == 200


def test_the_journal_is_read_once_for_a_sessions_items(
    make_client: ServiceFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All items of a session take one read of the journal; a read for each of 512 items would take S3 half a minute."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    client = make_client(journal=journal)
    name = client.call(BODY, CREATE).json["output"][0]["id"]
    read, num_reads = journal.read, 0

    def count(*args: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        return read(*args)

    monkeypatch.setattr(journal, "read", count)
    names = [name, *(name.replace("_1_1", f"_{number}_0") for number in range(2, 50))]

    answer = client.call({**BODY, "input": [reference({"id": each}) for each in names]}, CREATE)

    assert (answer.status, num_reads) == (404, 1)


def test_an_item_that_is_not_found_is_in_the_field_that_names_it(client: Client) -> None:
    missing = {"items": [reference({"id": "msg_x"})]}
    talk = client.call({}, {wire.RESOURCE: "POST conversations"}).json["id"]

    for path in ("conversations", f"conversations/{talk}/items"):
        answer = client.call(missing, {wire.RESOURCE: f"POST {path}"})

        assert (answer.status, answer.json["error"]["param"]) == (404, "items")


def test_a_reference_may_have_fields_that_are_null(client: Client) -> None:
    """Fields of a reference may be null, like those of other items."""
    item = client.call(BODY, CREATE).json["output"][0]

    assert client.call({**BODY, "input": [{**reference(item), "status": None}]}, CREATE).status == 200


@pytest.mark.parametrize("fields", [{}, {"type": None}, {"type": None, "status": None}])
def test_an_items_id_alone_names_it(client: Client, fields: dict[str, Any]) -> None:
    """An item's id is enough; OpenAI's `type` of a reference is optional."""
    item = client.call(BODY, CREATE).json["output"][0]

    names = (reference(item), {"id": item["id"], **fields})
    answers = [client.call({**BODY, "input": [each]}, CREATE) for each in names]

    assert len({num_input(each) for each in answers}) == 1
    missing = client.call({**BODY, "input": [{"id": "msg_x", **fields}]}, CREATE)
    assert (missing.status, missing.json["error"]["param"]) == (404, "input")


@pytest.mark.parametrize(
    ("changed", "param"), [({"id": None}, "input[0].id"), ({"id": 7}, "input[0].id"), ({"role": "user"}, "input[0]")]
)
def test_a_wrong_reference_is_refused(client: Client, changed: dict[str, Any], param: str) -> None:
    item = client.call(BODY, CREATE).json["output"][0]

    answer = client.call({**BODY, "input": [{**reference(item), **changed}]}, CREATE)

    assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_references_beyond_the_limit_are_refused_before_they_are_read(make_client: ServiceFactory) -> None:
    client = make_client(request={"max_messages": 3})

    answer = client.call({**BODY, "input": [reference({"id": "msg_x"})] * 4}, CREATE)

    assert (answer.status, answer.error) == (400, "ContextTooLong")


@pytest.mark.parametrize("options", [{}, {"store": False}])
def test_input_may_be_left_out_after_a_response(client: Client, options: dict[str, Any]) -> None:
    """Without input, the previous response's conversation is the prompt of an answer, a count or a compaction."""
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
    """Without input, the items that a client has added are the question.

    The answer equals the one to these items alone.
    """
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


@pytest.mark.parametrize("is_background", [False, True])
def test_items_of_a_conversation_show_log_probabilities(client: Client, *, is_background: bool) -> None:
    """Log probabilities are on the pages of a conversation's items and on single items, with the same `include`."""
    talk = client.call({"items": QUESTIONS}, {wire.RESOURCE: "POST conversations"}).json["id"]
    body = {**BODY, "conversation": talk, "include": [LOGPROBS], "top_logprobs": 2, "background": is_background}
    response_id = client.call(body, CREATE).json["id"]
    if is_background:
        client.call({}, {wire.RESOURCE: run_resource(response_id)})
    client.call({**BODY, "conversation": talk}, CREATE)
    response = client.call({}, {wire.RESOURCE: f"GET responses/{response_id}?include[]={LOGPROBS}"}).json

    path = f"conversations/{talk}/items"
    listed, plain = (
        client.call({}, {wire.RESOURCE: f"GET {path}?order=asc{query}"}).json["data"]
        for query in (f"&include[]={LOGPROBS}", "")
    )
    [item] = response["output"]
    one = client.call({}, {wire.RESOURCE: f"GET {path}/{item['id']}?include={LOGPROBS}"}).json

    assert item["content"][0]["logprobs"]
    assert listed == [*plain[:3], item, *plain[4:]]
    assert [len(each["content"][0].get("logprobs", ())) for each in plain] == [0] * 6
    assert one == item
    assert client.call({}, {wire.RESOURCE: f"GET {path}/{item['id']}"}).json == plain[3]


def test_instructions_that_are_too_long_are_refused_without_turns_that_could_be_left_out(client: Client) -> None:
    long = [{"role": "system", "content": "word " * 3000}]

    refused = client.call({"model": "llava", "input": long, "truncation": "auto"}, CREATE)

    assert (refused.status, refused.error) == (400, "ContextTooLong")


def test_input_is_required_elsewhere(client: Client) -> None:
    refused = client.call({"model": "llava", "input": []}, CREATE)

    assert (refused.status, refused.json["error"]["code"]) == (400, "missing_required_parameter")


def text_of(answer: Exchange) -> str:
    return str(answer.json["output"][0]["content"][0]["text"])


def test_a_worker_knows_what_another_one_has_deleted(make_client: ServiceFactory, tmp_path: Path) -> None:
    """After a failover and back, a deleted response is not found in a path, as a predecessor, or as an item."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    home, other = (make_client(instance=name, journal=journal) for name in ("llava-0", "llava-1"))
    first = home.call(BODY, CREATE).json
    second = home.call({**BODY, "previous_response_id": first["id"]}, CREATE).json["id"]
    assert other.call({}, {wire.RESOURCE: f"DELETE responses/{first['id']}"}).status == 200

    shown = [home.call({}, {wire.RESOURCE: f"GET responses/{each}"}).status for each in (first["id"], second)]
    follower = home.call({**BODY, "previous_response_id": first["id"]}, CREATE)
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    referring = home.call({**BODY, "input": [reference]}, CREATE)

    assert shown == [404, 200]
    assert (follower.status, follower.json["error"]["code"]) == (404, "previous_response_not_found")
    assert referring.status == 404


def test_a_response_is_deleted_with_the_last_one_of_its_session(make_client: ServiceFactory, tmp_path: Path) -> None:
    """A response can be deleted after another worker has closed its session, in which nothing was left."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    home, other = (make_client(instance=name, journal=journal) for name in ("llava-0", "llava-1"))
    only = home.call(BODY, CREATE).json["id"]
    assert other.call({}, {wire.RESOURCE: f"DELETE responses/{only}"}).status == 200

    assert home.call({}, {wire.RESOURCE: f"GET responses/{only}"}).status == 404


def test_a_response_that_another_worker_has_continued_gets_a_branch(
    make_client: ServiceFactory, tmp_path: Path
) -> None:
    """If another worker has continued a response, a second continuation becomes a branch instead of a 409."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    home, other = (make_client(instance=name, journal=journal) for name in ("llava-0", "llava-1"))
    first = home.call(BODY, CREATE).json["id"]
    assert other.call({**BODY, "previous_response_id": first}, CREATE).status == 200

    assert home.call({**BODY, "previous_response_id": first}, CREATE).status == 200
