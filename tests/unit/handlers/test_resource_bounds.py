"""Bounds of what one client may send to the chat service and keep there with OpenAI's resources."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from handlers.journal.directory import DirectoryJournal
from handlers.settings.journal import JournalSettings
from tests.torchserve.drawings import draw_image, encoded
from tests.unit.handlers.conftest import Client, Exchange, ServiceFactory
from torchmoor.wire import headers as wire


def ask(client: Client, resource: str, body: Any = None) -> Exchange:
    return client.call(body, {wire.RESOURCE: resource})


def say(text: str) -> dict[str, Any]:
    return {"items": [{"role": "user", "content": text}]}


def test_too_many_added_items_are_not_a_long_conversation(make_client: ServiceFactory) -> None:
    """Too many added items do not give ContextTooLong, at which a client would shorten its prompt and retry."""
    client = make_client(request={"max_messages": 3})
    talk = ask(client, "POST conversations", {}).json["id"]
    items = say("a")["items"] * 21

    for resource in ("POST conversations", f"POST conversations/{talk}/items"):
        answer = ask(client, resource, {"items": items})
        assert (answer.status, answer.error, answer.json["error"]["param"]) == (400, "InvalidRequest", "items")
        assert "21 items, more than 20" in answer.json["error"]["message"]
    asked = ask(client, "POST responses", {"model": "llava", "input": items})
    assert (asked.status, asked.error) == (400, "ContextTooLong")


def test_wrong_metadata_is_refused_with_all_of_its_rules(make_client: ServiceFactory) -> None:
    answer = ask(make_client(), "POST conversations", {"metadata": {"a": 1}})

    assert (answer.status, answer.json["error"]["param"]) == (400, "metadata")
    assert "values that are texts" in answer.json["error"]["message"]


@pytest.mark.parametrize(("key", "shown"), [("note", "'note'"), ("k" * 500, f"'{'k' * 40}...'")], ids=["short", "long"])
def test_an_error_names_the_metadata_whose_value_is_too_long(make_client: ServiceFactory, key: str, shown: str) -> None:
    metadata = {"short": "a" * 512, key: "b" * 513}
    answer = ask(make_client(), "POST responses", {"model": "llava", "input": "Hi", "metadata": metadata})

    assert (answer.status, answer.json["error"]["param"]) == (400, "metadata")
    assert f"the value of {shown} has 513" in answer.json["error"]["message"]


def test_a_conversation_has_a_bound_in_characters(make_client: ServiceFactory) -> None:
    """A full conversation refuses items and metadata; other conversations, and its deletion, are not affected."""
    client = make_client(session={"max_history_chars": 2000})
    full, other = (ask(client, "POST conversations", {}).json["id"] for _ in range(2))

    assert ask(client, f"POST conversations/{full}/items", say("a" * 1500)).status == 200
    refused = ask(client, f"POST conversations/{full}/items", say("a" * 500))
    question = ask(client, "POST responses", {"model": "llava", "input": "a" * 500, "conversation": full})
    metadata = ask(client, f"POST conversations/{full}", {"metadata": {"a": "b" * 500}})

    for answer in (refused, question, metadata):
        assert (answer.status, answer.error) == (400, "ContextTooLong")
        assert "session.max_history_chars" in answer.json["error"]["message"]
    assert len(ask(client, f"GET conversations/{full}/items").json["data"]) == 1
    assert ask(client, f"POST conversations/{other}/items", say("a" * 1500)).status == 200
    assert ask(client, f"DELETE conversations/{full}").status == 200


def test_branches_count_against_the_bound_of_all_texts(make_client: ServiceFactory) -> None:
    """One that would exceed it opens no session, and other sessions may still ask."""
    client = make_client(session={"max_history_chars": 2000, "max_total_history_chars": 5000})
    source, other = client.open(), client.open()
    client.answer(source, "a" * 1500, parameters={"max_new_tokens": 1})
    branch = {"type": "branch_session", "session_id": source, "turns": 1}

    answers = [client.call(branch) for _ in range(4)]

    assert [(answer.status, answer.error) for answer in answers] == [(200, None)] * 2 + [(429, "Overloaded")] * 2
    assert len(client.service.store) == 4
    assert client.ask(other, "hello", parameters={"max_new_tokens": 1}).wait().status == 200


@pytest.mark.parametrize("body", [{"messages": [{}] * 600}, {"inputs": "," * 1200}, {"type": [[]] * 600}])
def test_a_body_of_many_values_is_refused_before_it_is_parsed(make_client: ServiceFactory, body: Any) -> None:
    """A body of many values is refused before parsing, which would take many times its bytes.

    Commas in texts count, too.
    """
    client = make_client(request={"max_json_values": 1000})

    answer = client.call(json.dumps(body).encode())

    assert (answer.status, answer.error) == (400, "InvalidRequest")
    assert "the limit is 1000" in answer.json["error"]["message"]


def png(colour: str) -> bytes:
    return encoded(draw_image("ellipse", colour))


def keep(client: Client, colour: str) -> str:
    answer = ask(client, "POST files", {"file": png(colour), "purpose": b"vision"})
    assert answer.status == 200, answer.body
    return str(answer.json["id"])


def looking(files: list[str]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_image", "file_id": name} for name in files]}]


def test_more_files_than_a_conversation_may_have_are_not_read(make_client: ServiceFactory) -> None:
    """Files are counted before they are read; the maximum number is accepted."""
    client = make_client(session={"max_images": 2})
    files = [keep(client, colour) for colour in ("red", "green", "blue")]

    refused = ask(client, "POST responses", {"model": "llava", "input": looking(files)})
    answered = ask(client, "POST responses", {"model": "llava", "input": looking(files[:2]), "max_output_tokens": 2})

    assert (refused.status, refused.error) == (400, "InvalidRequest")
    assert "may have 2 images, not 3" in refused.json["error"]["message"]
    assert answered.status == 200


def test_kept_images_are_read_when_their_request_has_its_turn(make_client: ServiceFactory, tmp_path: Path) -> None:
    """Images of files, stored responses and compacted conversations are read when the turn begins.

    Deleted ones give an error.
    """
    client = make_client(journal=DirectoryJournal(tmp_path, JournalSettings()))
    fields = {"model": "llava", "max_output_tokens": 8}
    file = keep(client, "red")
    first = ask(client, "POST responses", {**fields, "input": looking([file])}).json
    compacted = ask(client, "POST responses/compact", {"model": "llava", "input": looking([file])}).json

    branched = ask(
        client,
        "POST responses",
        {**fields, "input": "What colour?", "previous_response_id": first["id"], "store": False},
    )
    resumed = ask(
        client,
        "POST responses",
        {**fields, "input": [*compacted["output"], {"role": "user", "content": "What colour?"}]},
    )
    assert ask(client, f"DELETE files/{file}").status == 200
    late = ask(client, "POST responses", {**fields, "input": looking([file])})

    assert (branched.status, resumed.status, late.status) == (200, 200, 404), (branched.body, resumed.body)
    assert branched.json["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert resumed.json["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_a_conversation_beyond_the_context_is_refused_before_it_is_tokenized(make_client: ServiceFactory) -> None:
    """A long conversation is refused by its number of characters, because tokenizing takes a second per megabyte."""
    client = make_client()
    conversation = ask(client, "POST conversations", say("a " * 400_000)).json["id"]

    answer = ask(client, "POST responses", {"model": "llava", "input": "Hello", "conversation": conversation})

    assert (answer.status, answer.error) == (400, "ContextTooLong")
    assert re.search(r"has 800\d\d\d characters", answer.json["error"]["message"])
