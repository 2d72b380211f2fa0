"""Images of listed items, which clients send again by the ids that the list has."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from handlers.journal.directory import DirectoryJournal
from handlers.settings.journal import JournalSettings
from tests.torchserve.drawings import data_url, encoded
from tests.unit.handlers.conftest import Client, Exchange, ServiceFactory
from torchmoor.wire import headers as wire
from torchmoor.wire.background import run_resource

TEXT = {"type": "text", "text": "What color is it?"}
QUESTION = {**TEXT, "type": "input_text"}


def ask(client: Client, resource: str, body: Any = None, caller: str = "alice") -> Exchange:
    return client.call(body, {wire.PRINCIPAL: caller, wire.RESOURCE: resource})


def say(*images: Image.Image) -> dict[str, Any]:
    pictures = [{"type": "input_image", "image_url": data_url(image)} for image in images]
    return {"role": "user", "content": [*pictures, QUESTION]}


def images_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for item in items for part in item.get("content", ()) if part["type"] == "input_image"]


def respond(client: Client, items: list[Any], **options: Any) -> Exchange:
    return ask(client, "POST responses", {"model": "llava", "input": items, "max_output_tokens": 3, **options})


@pytest.fixture(params=["journal", "memory"])
def clients(request: pytest.FixtureRequest, make_client: ServiceFactory, tmp_path: Path) -> list[Client]:
    """Return the client of a worker, and that of another one which has the journal, or of the same without one."""
    if request.param == "memory":
        return [make_client()] * 2
    return [make_client(journal=DirectoryJournal(tmp_path, JournalSettings())) for _ in range(2)]


def test_the_items_of_a_conversation_are_a_prompt_with_its_images(
    clients: list[Client], red: Image.Image, blue: Image.Image
) -> None:
    """Listed items can be sent as a prompt: each stored image has an id, and an image by address keeps its address."""
    first, other = clients
    number = ask(first, "POST conversations", {"items": [say(red), say(blue, red)]}).json["id"]
    whole = respond(first, [say(red), say(blue, red)], store=False).json

    items = ask(other, f"GET conversations/{number}/items?order=asc").json["data"]
    again = respond(other, items)

    assert again.status == 200, again.body
    assert again.json["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert again.json["output"][0]["content"] == whole["output"][0]["content"]
    ids = [part["file_id"] for part in images_of(items)]
    assert len(set(ids)) == 3
    pixels = [ask(other, f"GET files/{each}/content").body for each in ids]
    assert pixels[0] == pixels[2] != pixels[1]


def test_the_input_of_a_response_has_ids_of_its_images(clients: list[Client], red: Image.Image) -> None:
    """The ids of images in a response's input are valid as long as the response, and do not name files."""
    first, other = clients
    kept = ask(first, "POST files", {"file": encoded(red), "purpose": b"vision"}).json["id"]
    named = {"role": "user", "content": [{"type": "input_image", "file_id": kept}, QUESTION]}
    response = respond(first, [named, say(red)]).json

    items = ask(other, f"GET responses/{response['id']}/input_items?order=asc").json["data"]
    by_name, by_id = [part["file_id"] for part in images_of(items)]

    assert by_name == kept
    assert ask(other, f"GET files/{by_id}/content").status == 200
    for resource in (f"GET files/{by_id}", f"DELETE files/{by_id}", f"GET files/{by_id[:-1]}2/content"):
        assert ask(other, resource).status == 404, resource
    assert ask(other, f"GET files/{by_id}/content", caller="bob").status == 404
    assert ask(first, f"DELETE responses/{response['id']}").status == 200
    assert respond(other, items).status == 404


@pytest.mark.parametrize("is_in_conversation", [False, True])
def test_the_images_of_a_response_in_the_background_have_ids_before_its_answer(
    clients: list[Client], red: Image.Image, blue: Image.Image, is_in_conversation: bool
) -> None:
    first, other = clients
    options: dict[str, Any] = {"background": True}
    if is_in_conversation:
        options["conversation"] = ask(first, "POST conversations", {"items": [say(blue)]}).json["id"]
    response = respond(first, [say(blue, red)], **options).json

    items = ask(other, f"GET responses/{response['id']}/input_items?order=asc").json["data"]

    assert response["status"] == "queued"
    ids = [part["file_id"] for part in images_of(items)]
    assert [ask(other, f"GET files/{each}/content").body for each in ids] == [encoded(blue), encoded(red)]
    assert respond(other, items).status == 200


CALL = {"type": "function_call", "call_id": "call_x", "name": "look", "arguments": "{}"}


def look(**image: str) -> dict[str, Any]:
    """Make the result of a call, with an image."""
    picture = {"type": "input_image", **image}
    return {"type": "function_call_output", "call_id": "call_x", "output": [QUESTION, picture]}


def test_a_tools_result_may_have_images(clients: list[Client], red: Image.Image, blue: Image.Image) -> None:
    """Images in a tool's result are placed by the template, stored, listed and sent again like those of a question."""
    first, other = clients
    kept = ask(first, "POST files", {"file": encoded(red), "purpose": b"vision"}).json["id"]
    asked = [say(blue), CALL, look(image_url=data_url(red))]
    picture = {"type": "image_url", "image_url": {"url": data_url(red)}}
    chat = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(blue)}}, TEXT]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "call_x", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "call_x", "content": [TEXT, picture]},
    ]

    by_name = respond(first, [say(blue), CALL, look(file_id=kept)]).json
    talk = ask(first, "POST conversations", {"items": asked}).json["id"]
    items = ask(other, f"GET conversations/{talk}/items?order=asc").json["data"]
    answers = [respond(other, given).json for given in (asked, items)]
    follow_up = respond(other, [say()], previous_response_id=by_name["id"])
    whole = first.call({"messages": chat, "max_tokens": 3}).json

    for answer in answers:
        assert answer["output"][0]["content"] == by_name["output"][0]["content"]
    assert [answer["usage"]["input_tokens"] for answer in answers] == [whole["usage"]["prompt_tokens"]] * 2
    assert follow_up.status == 200, follow_up.body
    result = items[2]
    assert result["output"][1]["file_id"]
    assert ask(other, f"GET files/{result['output'][1]['file_id']}/content").body == encoded(red)
    assert ask(other, f"DELETE conversations/{talk}/items/{result['id']}").status == 400


def name_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


@pytest.mark.parametrize("options", [{}, {"store": False}, {"background": True}])
def test_items_that_are_named_have_their_images(
    clients: list[Client], red: Image.Image, blue: Image.Image, options: dict[str, Any]
) -> None:
    """A question and a tool's result that are named by id bring their images in order.

    Images of no item are left out.
    """
    first, other = clients
    asked = [say(blue, red), CALL, look(image_url=data_url(red))]
    talk = ask(first, "POST conversations", {"items": [say(red)]}).json["id"]
    response = respond(first, asked, conversation=talk).json
    items = ask(other, f"GET responses/{response['id']}/input_items?order=asc").json["data"]
    again = [*asked, say(blue)]
    whole = respond(first, again, store=False).json

    answer = respond(other, [*map(name_of, items), say(blue)], **options)

    assert answer.status == 200, answer.body
    named = answer.json
    if "background" in options:
        assert other.call(None, {wire.PRINCIPAL: "alice", wire.RESOURCE: run_resource(named["id"])}).status == 200
        named = ask(other, f"GET responses/{named['id']}").json
    assert named["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert named["output"][0]["content"] == whole["output"][0]["content"]
    if options.get("store", True):
        assert ask(first, f"DELETE conversations/{talk}").status == 200
        shown = ask(other, f"GET responses/{named['id']}/input_items?order=asc").json["data"]
        ids = [part["file_id"] for part in (*images_of(shown), shown[2]["output"][1])]
        pixels = [ask(other, f"GET files/{each}/content").body for each in ids]
        assert pixels == [encoded(each) for each in (blue, red, blue, red)]


def test_a_conversation_gets_named_items_with_their_images(clients: list[Client], red: Image.Image) -> None:
    first, other = clients
    response = respond(first, [say(red)]).json["id"]
    items = ask(first, f"GET responses/{response}/input_items").json["data"]

    talks = [ask(other, "POST conversations", {"items": [name_of(items[0])]}).json["id"] for _ in range(2)]
    ask(other, f"POST conversations/{talks[1]}/items", {"items": [name_of(items[0])]})

    for talk, number in zip(talks, (1, 2), strict=True):
        shown = images_of(ask(first, f"GET conversations/{talk}/items").json["data"])
        assert [ask(first, f"GET files/{each['file_id']}/content").body for each in shown] == [encoded(red)] * number
    assert respond(other, [name_of(items[0])] * 3).status == 200
    assert ask(other, "POST responses", {"model": "llava", "input": [name_of(items[0])]}, "bob").status == 404
