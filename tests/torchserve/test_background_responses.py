"""Responses in the background through OpenAI's own client, on real TorchServe instances."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import requests
from openai.types.responses import Response

from tests.torchserve.conftest import Fleet
from tests.torchserve.openai_client import at_both_bases, gpt
from tests.torchserve.test_cancel import ENDLESS
from tests.torchserve.test_faults import slowed_workers
from tests.torchserve.test_responses import COLOR, FIRST, SHAPE
from tests.waiting import wait_until

__all__ = ["gpt"]  # a fixture
pytestmark = pytest.mark.torchserve
LONG: Any = {
    "temperature": ENDLESS["temperature"],
    "max_output_tokens": 300,
    "extra_body": {"seed": ENDLESS["seed"]},
}


def begin(gpt: openai.OpenAI, said: Any = "hello", **options: Any) -> Any:
    return gpt.responses.create(model="llava", input=said, background=True, **options)


def wait_for(gpt: openai.OpenAI, response_id: str, is_there: Callable[[Response], bool]) -> Response:
    """Poll a response until it is in a state."""
    wait_until(lambda: is_there(gpt.responses.retrieve(response_id)), "the response is there")
    return gpt.responses.retrieve(response_id)


def finish(gpt: openai.OpenAI, response_id: str) -> Response:
    """Poll a response as OpenAI's guide does."""
    return wait_for(gpt, response_id, lambda each: each.status not in ("queued", "in_progress"))


def dump(events: Any) -> list[dict[str, Any]]:
    return [event.model_dump() for event in events]


def read_some(events: Iterator[Any], num_events: int) -> list[dict[str, Any]]:
    """Read the first events of a stream, and leave."""
    return [next(events).model_dump() for _ in range(num_events)]


@at_both_bases
def test_a_response_is_generated_while_no_client_is_connected(gpt: openai.OpenAI) -> None:
    """A response is queued and completed without a client; then it is shown with its image and can be continued."""
    queued = begin(gpt, FIRST, metadata={"who": "me"}, instructions="Be brief.")

    assert (queued.status, queued.background, queued.output, queued.metadata) == ("queued", True, [], {"who": "me"})
    done = finish(gpt, queued.id)
    direct = gpt.responses.create(model="llava", input=FIRST, instructions="Be brief.")
    assert (done.status, done.output_text, done.id) == ("completed", direct.output_text, queued.id)
    assert done.usage.input_tokens == direct.usage.input_tokens
    assert gpt.responses.cancel(done.id).output_text == done.output_text
    assert len(gpt.responses.input_items.list(done.id).data) == 1
    after = begin(gpt, SHAPE, previous_response_id=done.id)
    again = gpt.responses.create(model="llava", input=COLOR, previous_response_id=finish(gpt, after.id).id)
    assert ("circle" in finish(gpt, after.id).output_text, "red" in again.output_text) == (True, True)
    gpt.responses.delete(done.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(done.id)


def test_a_client_that_lost_its_stream_gets_all_other_events_once(fleet: Fleet, gpt: openai.OpenAI) -> None:
    """Both of the client's methods give the missing events once, during the generation and after it."""
    with slowed_workers(fleet):
        with begin(gpt, stream=True, **LONG) as stream:
            first = read_some(stream, 8)
        response_id = first[0]["response"]["id"]
        assert gpt.responses.retrieve(response_id).status == "in_progress"
        with gpt.responses.retrieve(response_id, stream=True, starting_after=first[-1]["sequence_number"]) as stream:
            second = read_some(stream, 20)
        assert gpt.responses.retrieve(response_id).status == "in_progress"
        with gpt.responses.stream(response_id=response_id, starting_after=10) as following:
            assert next(iter(following)).sequence_number == 11
    with gpt.responses.retrieve(response_id, stream=True, starting_after=second[-1]["sequence_number"]) as stream:
        rest = dump(stream)

    events = first + second + rest
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:3]] == [
        f"response.{each}" for each in ("created", "queued", "in_progress")
    ]
    assert events[-1]["type"] == "response.incomplete"
    with gpt.responses.retrieve(response_id, stream=True) as stream:
        assert dump(stream) == events
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == gpt.responses.retrieve(response_id).output_text


def test_a_cancelled_response_stops_its_row(fleet: Fleet, gpt: openai.OpenAI) -> None:
    """A client that follows the response gets its end, and cancelling again returns the same response."""
    running = {i["name"]: fleet.status(i["name"])["turns"]["running"] for i in fleet.instances()}
    assert sum(running.values()) == 0
    with slowed_workers(fleet):
        queued = begin(gpt, **{**LONG, "max_output_tokens": 1500})
        wait_for(gpt, queued.id, lambda each: each.status == "in_progress")
        with gpt.responses.retrieve(queued.id, stream=True) as stream:
            read_some(stream, 6)
            cancelled = gpt.responses.cancel(queued.id)
            last = dump(stream)[-1]
    assert (cancelled.status, cancelled.output) == ("cancelled", [])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    assert gpt.responses.cancel(queued.id).model_dump() == cancelled.model_dump()
    wait_until(lambda: not fleet.count("turns", "running"), "the row has stopped")
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        gpt.responses.create(model="llava", input="x", previous_response_id=queued.id)


def test_a_response_that_cannot_be_generated_has_failed(gpt: openai.OpenAI) -> None:
    failed = finish(gpt, begin(gpt, "word " * 3000).id)

    assert (failed.status, failed.output) == ("failed", [])
    assert failed.error.code == "invalid_prompt"  # so clients do not try again
    assert "tokens" in failed.error.message


def test_a_response_joins_its_conversation_when_it_is_complete(gpt: openai.OpenAI) -> None:
    """The turn is added once with its image and the answer of a waiting request; the next turn sees both."""
    talk, direct = gpt.conversations.create(), gpt.conversations.create()
    queued = begin(gpt, FIRST, conversation=talk.id)
    assert (queued.status, queued.conversation.id) == ("queued", talk.id)

    done = finish(gpt, queued.id)

    expected = gpt.responses.create(model="llava", input=FIRST, conversation=direct.id)
    assert (done.status, done.id, done.output_text) == ("completed", queued.id, expected.output_text)
    items = list(gpt.conversations.items.list(talk.id, order="asc"))
    assert [item.id for item in items[1:]] == [item.id for item in done.output]
    after = gpt.responses.create(model="llava", input=SHAPE, conversation=talk.id)
    assert "circle" in after.output_text
    again = gpt.responses.create(model="llava", input=SHAPE, conversation=direct.id)
    assert after.usage.input_tokens == again.usage.input_tokens
    assert len(list(gpt.conversations.items.list(talk.id))) == 4


def test_a_cancelled_response_leaves_its_conversation_as_it_was(fleet: Fleet, gpt: openai.OpenAI) -> None:
    """A cancelled response adds nothing to its conversation, and a request that waits behind it is answered."""
    talk = gpt.conversations.create()
    with slowed_workers(fleet), ThreadPoolExecutor(1) as pool:
        queued = begin(gpt, conversation=talk.id, **{**LONG, "max_output_tokens": 1500})
        wait_for(gpt, queued.id, lambda each: each.status == "in_progress")
        waiting = pool.submit(gpt.responses.create, model="llava", input="hi", conversation=talk.id)
        wait_until(lambda: fleet.count("turns", "waiting"), "the request waits")
        assert gpt.responses.cancel(queued.id).status == "cancelled"
        assert waiting.result(90).status in ("completed", "incomplete")

    items = gpt.conversations.items.list(talk.id, order="asc").data
    assert len(items) == 2
    assert items[0].to_dict()["content"][0]["text"] == "hi"
    assert gpt.responses.retrieve(queued.id).status == "cancelled"
    gpt.responses.delete(queued.id)
    assert len(gpt.conversations.items.list(talk.id).data) == 2


def test_what_cannot_be_in_the_background_is_refused(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        begin(gpt, store=False)
    assert caught.value.param == "background"
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        gpt.responses.cancel(gpt.responses.create(model="llava", input="x").id)


def test_operators_see_and_cancel_responses_as_asynchronous_requests(fleet: Fleet, gpt: openai.OpenAI) -> None:
    """Operators see and cancel responses by a name that is not a credential."""
    with slowed_workers(fleet):
        queued = begin(gpt, **{**LONG, "max_output_tokens": 1500})
        wait_for(gpt, queued.id, lambda each: each.status == "in_progress")
        listed = requests.get(f"{fleet.admin}/async-requests?state=RUNNING", timeout=10).json()
        (name,) = [each["inference_id"] for each in listed["requests"]]
        assert name.startswith("response-")
        assert name.removeprefix("response-") not in queued.id
        requests.post(f"{fleet.admin}/async-requests/{name}/cancel", timeout=10).raise_for_status()
    assert finish(gpt, queued.id).status == "cancelled"
