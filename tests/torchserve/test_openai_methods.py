"""Every method of OpenAI's client on responses, conversations and files is served."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.resources.conversations import Conversations
from openai.resources.files import Files
from openai.resources.responses import Responses
from pydantic import BaseModel

from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import draw
from tests.torchserve.openai_client import at_both_bases, gpt

__all__ = ["gpt"]  # a fixture
pytestmark = pytest.mark.torchserve
MODEL: Any = {"model": "llava"}
ITEM: Any = {"type": "message", "role": "user", "content": "What color is the circle?"}


class Shape(BaseModel):
    is_round: bool


class Things:
    """Arguments for the methods: one of each resource."""

    def __init__(self, gpt: openai.OpenAI) -> None:
        self.gpt = gpt
        self.response = gpt.responses.create(**MODEL, input="Hello").id
        self.conversation = gpt.conversations.create(items=[ITEM]).id
        self.item = gpt.conversations.items.list(self.conversation).data[0].id or ""
        self.file = gpt.files.create(file=draw("circle", "red"), purpose="vision").id


def stream(things: Things) -> str:
    with things.gpt.responses.stream(**MODEL, input="Hello") as events:
        return events.get_final_response().output_text


def connect(things: Things) -> str:
    message: Any = {"type": "response.create", **MODEL, "input": "Hello"}
    with things.gpt.responses.connect() as connection:
        connection.send(message)
        return next(event.type for event in connection if event.type in ("response.completed", "error"))


SERVED: dict[str, Callable[[Things], Any]] = {
    "responses.create": lambda it: it.gpt.responses.create(**MODEL, input="Hello").output_text,
    "responses.parse": lambda it: it.gpt.responses.parse(**MODEL, input="Hello", text_format=Shape).output_parsed,
    "responses.stream": stream,
    "responses.connect": connect,
    "responses.retrieve": lambda it: it.gpt.responses.retrieve(it.response).output_text,
    "responses.compact": lambda it: it.gpt.responses.compact(**MODEL, input="Hello").output,
    "responses.input_items.list": lambda it: it.gpt.responses.input_items.list(it.response).data,
    "responses.input_tokens.count": lambda it: it.gpt.responses.input_tokens.count(**MODEL, input="Hi").input_tokens,
    "responses.cancel": lambda it: (
        it.gpt.responses.cancel(it.gpt.responses.create(**MODEL, input="Hello", background=True).id).status
    ),
    "responses.delete": lambda it: it.gpt.responses.delete(it.response) is None,
    "conversations.create": lambda it: it.gpt.conversations.create().id,
    "conversations.retrieve": lambda it: it.gpt.conversations.retrieve(it.conversation).id,
    "conversations.update": lambda it: it.gpt.conversations.update(it.conversation, metadata={"a": "b"}).metadata,
    "conversations.items.create": lambda it: it.gpt.conversations.items.create(it.conversation, items=[ITEM]).data,
    "conversations.items.list": lambda it: it.gpt.conversations.items.list(it.conversation).data,
    "conversations.items.retrieve": lambda it: it.gpt.conversations.items.retrieve(
        it.item, conversation_id=it.conversation
    ),
    "conversations.items.delete": lambda it: (
        it.gpt.conversations.items.delete(it.item, conversation_id=it.conversation).id
    ),
    "conversations.delete": lambda it: it.gpt.conversations.delete(it.conversation).deleted,
    "files.create": lambda it: it.gpt.files.create(file=draw("square", "blue"), purpose="vision").id,
    "files.retrieve": lambda it: it.gpt.files.retrieve(it.file).id,
    "files.list": lambda it: it.file in {file.id for file in it.gpt.files.list()},
    "files.content": lambda it: it.gpt.files.content(it.file).read(),
    "files.retrieve_content": lambda it: it.gpt.files.retrieve_content(it.file),
    "files.wait_for_processing": lambda it: it.gpt.files.wait_for_processing(it.file).status == "processed",
    "files.delete": lambda it: it.gpt.files.delete(it.file).deleted,
}


def methods(resource: type, name: str) -> Iterator[str]:
    """Yield the names of a resource's methods, and of those of the resources below it."""
    for each, value in vars(resource).items():
        if each.startswith(("_", "with_")):
            continue
        if callable(value):
            yield f"{name}.{each}"
        else:
            below = getattr(value, "func", None) or getattr(value, "fget", None)
            yield from methods(type(below(resource(openai.OpenAI(api_key="any")))), f"{name}.{each}")


def test_each_method_is_known() -> None:
    """Each method of the client is known here; a new version may add some."""
    resources = {"responses": Responses, "conversations": Conversations, "files": Files}
    found = {each for name, resource in resources.items() for each in methods(resource, name)}
    assert found == set(SERVED)


@at_both_bases
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # retrieve_content; connect, by its own library
def test_each_method_is_served(fleet: Fleet, gpt: openai.OpenAI) -> None:
    things = Things(gpt)
    for name, call in SERVED.items():
        assert call(things), name
