"""One invocation id for several requests: a retry gets the first answer, and another image makes another request."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from handlers.journal.directory import DirectoryJournal
from handlers.models.llava import LlavaModel
from handlers.settings.journal import JournalSettings
from tests.torchserve.drawings import data_url, draw_image
from tests.unit.handlers.conftest import Client, Exchange, FakeClock, ServiceFactory
from torchmoor.wire import headers as wire
from torchmoor.wire.receipt import CACHE_TIER

COLOR = "What color is the circle?"
ONE_ID = {wire.INVOCATION_ID: "one-id"}


@pytest.fixture
def green() -> Image.Image:
    return draw_image("ellipse", "green")


def items(image: Image.Image) -> list[dict[str, Any]]:
    picture = {"type": "input_image", "image_url": data_url(image)}
    return [{"role": "user", "content": [{"type": "input_text", "text": COLOR}, picture]}]


def create(client: Client, image: Image.Image, **fields: Any) -> str:
    body = {"model": "llava", "input": items(image), **fields}
    answer = client.call(body, {wire.RESOURCE: "POST responses", **ONE_ID})
    assert answer.status == 200, answer.body
    return str(answer.json["id"])


def open_conversation(client: Client) -> str:
    return str(client.call({}, {wire.RESOURCE: "POST conversations"}).json["id"])


def test_question_about_another_image_is_answered(
    make_client: ServiceFactory, demo_llava: LlavaModel, red: Image.Image, green: Image.Image
) -> None:
    client = make_client(demo_llava)
    sid = client.open()

    def ask(image: Image.Image) -> Exchange:
        return client.ask(sid, COLOR, headers=ONE_ID, image=data_url(image)).wait()

    answers = [ask(image) for image in (red, red, green)]

    assert answers[0].body == answers[1].body
    assert ["red" in answers[0].json["response_text"], "green" in answers[2].json["response_text"]] == [True, True]
    assert [each.headers[CACHE_TIER] == "answer" for each in answers] == [False, True, False]
    assert len(client.session(sid).images) == 2


def test_response_about_another_image_is_generated(client: Client, red: Image.Image, green: Image.Image) -> None:
    first = client.call({"model": "llava", "input": "Hello"}, {wire.RESOURCE: "POST responses"}).json["id"]

    ids = [create(client, image, previous_response_id=first) for image in (red, red, green)]

    assert ids[0] == ids[1] != ids[2]


def test_response_in_the_background_about_another_image_is_queued(
    client: Client, red: Image.Image, green: Image.Image
) -> None:
    talk = open_conversation(client)

    ids = [create(client, image, conversation=talk, background=True) for image in (red, red, green)]

    assert ids[0] == ids[1] != ids[2]


def test_items_with_another_image_are_added(client: Client, red: Image.Image, green: Image.Image) -> None:
    talk = open_conversation(client)

    for image in (red, red, green):
        answer = client.call({"items": items(image)}, {wire.RESOURCE: f"POST conversations/{talk}/items", **ONE_ID})
        assert answer.status == 200, answer.body

    assert len(client.call({}, {wire.RESOURCE: f"GET conversations/{talk}/items"}).json["data"]) == 2


@pytest.mark.parametrize(
    ("has_journal", "end"),
    [(False, "closed"), (False, "expired"), (True, "closed"), (True, "closed elsewhere"), (True, "expired")],
)
def test_an_opening_after_the_end_of_the_first_session_opens_another(
    make_client: ServiceFactory, tmp_path: Path, clock: FakeClock, has_journal: bool, end: str
) -> None:
    """An opening whose id's session has ended opens a session, and a retry of that one finds it."""
    journal = DirectoryJournal(tmp_path, JournalSettings()) if has_journal else None
    client, other = (make_client(instance=f"llava-{i}", journal=journal) for i in range(2))
    body = {"requestType": "NEW_SESSION", "ttl_s": 60}
    first, retried = (client.call(body, ONE_ID).json["session_id"] for _ in range(2))

    if end == "expired":
        clock.advance(61)
    else:
        closing = other if end == "closed elsewhere" else client
        assert closing.call({"type": "close_session", "session_id": first}).status == 200
    second = client.call(body, ONE_ID).json["session_id"]
    retrying = other if has_journal else client
    retried_second = retrying.call(body, ONE_ID).json["session_id"]

    assert first == retried != second == retried_second
    assert client.answer(second, "hello")
