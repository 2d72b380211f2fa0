"""OpenAI's Responses API through OpenAI's own client, on real TorchServe instances."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.torchserve.conftest import Fleet
from tests.torchserve.drawings import data_url, draw
from tests.torchserve.openai_client import at_both_bases, gpt

__all__ = ["gpt"]  # a fixture
pytestmark = pytest.mark.torchserve
LOGPROBS: Any = "message.output_text.logprobs"
COLOR, SHAPE, NUMBER = "What color is the circle?", "What shape is it?", "How many shapes are there?"
PICTURE: Any = {"type": "input_image", "image_url": data_url(draw("circle", "red")), "detail": "auto"}
FIRST: Any = [{"role": "user", "content": [{"type": "input_text", "text": COLOR}, PICTURE]}]


def ask(gpt: openai.OpenAI, text: str, previous: Response | None = None, **options: Any) -> Response:
    """Ask a question, after a response if one is given."""
    after = {} if previous is None else {"previous_response_id": previous.id}
    return gpt.responses.create(model="llava", input=text, **after, **options)


class Shape(BaseModel):
    is_round: bool


def num_input(response: Response) -> int:
    return response.usage.input_tokens


def cached(response: Response) -> int:
    return response.usage.input_tokens_details.cached_tokens


def test_a_chain_sends_its_image_once(gpt: openai.OpenAI) -> None:
    """Each turn sees the first one's image and reports its cached tokens; stored responses can be shown."""
    first = gpt.responses.create(model="llava", input=FIRST, metadata={"who": "me"})
    second = ask(gpt, SHAPE, first)
    third = ask(gpt, COLOR, second, temperature=0.5, top_p=0.9, max_output_tokens=64)
    fourth = ask(gpt, COLOR, third, instructions="Be brief.")
    fifth = ask(gpt, COLOR, fourth)

    assert ("red" in first.output_text, "circle" in second.output_text) == (True, True)
    for response, previous in ((first, None), (second, first), (third, second)):
        usage = response.usage
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert response.previous_response_id == (previous and previous.id)
        assert gpt.responses.retrieve(response.id) == response
    assert 0 < cached(second) < num_input(second)
    assert num_input(fourth) - num_input(third) > num_input(fifth) - num_input(fourth)  # instructions apply to one turn
    assert (fourth.instructions, fifth.instructions) == ("Be brief.", None)
    assert (first.metadata, first.temperature, third.temperature, third.top_p) == ({"who": "me"}, 0.0, 0.5, 0.9)
    [item] = gpt.responses.input_items.list(first.id)
    text, picture = item.content
    assert (text.text, picture.type) == (COLOR, "input_image")


def test_answers_equal_those_of_the_whole_conversation(gpt: openai.OpenAI) -> None:
    """Items of every role, with `phase`, and a response's output can be sent again unchanged."""
    first = gpt.responses.create(model="llava", input=FIRST)
    second = ask(gpt, SHAPE, first)

    output: Any = [item.to_dict() for item in first.output]
    whole = gpt.responses.create(model="llava", input=[*FIRST, *output, {"role": "user", "content": SHAPE}])
    phases = gpt.responses.create(
        model="llava",
        input=[
            {"role": "developer", "content": "Answer."},
            {"role": "assistant", "phase": "commentary", "content": "I look at it."},
            {"role": "assistant", "phase": "final_answer", "content": [{"type": "output_text", "text": "It is red."}]},
            {"role": "user", "content": SHAPE},
        ],
    )

    assert (whole.output_text, num_input(whole)) == (second.output_text, num_input(second))
    assert [getattr(item, "phase", None) for item in gpt.responses.input_items.list(phases.id, order="asc")] == [
        None,
        "commentary",
        "final_answer",
        None,
    ]


def test_branches_of_one_response(gpt: openai.OpenAI) -> None:
    """Concurrent branches of one response, and of an earlier one, stay separate, and share the image's cache."""
    first = gpt.responses.create(model="llava", input=FIRST)
    questions = [COLOR, SHAPE, NUMBER]
    with ThreadPoolExecutor(3) as pool:
        branches = list(pool.map(lambda text: ask(gpt, text, first), questions))
    again = [ask(gpt, text, branch) for text, branch in zip(questions, branches, strict=True)]

    assert len({response.id for response in (first, *branches, *again)}) == 7
    for text, branch, more in zip(questions, branches, again, strict=True):
        alone = ask(gpt, text, first, store=False)
        assert (branch.output_text, num_input(branch)) == (alone.output_text, num_input(alone))
        assert cached(branch) > 0
        assert cached(more) > cached(branch)
    gpt.responses.delete(first.id)
    assert "red" in ask(gpt, COLOR, again[1]).output_text


@at_both_bases
@pytest.mark.parametrize("is_stored", [True, False])
def test_stream_has_every_event(gpt: openai.OpenAI, is_stored: bool) -> None:
    """OpenAI's helper accumulates the response, and the last event has the stored one."""
    first = gpt.responses.create(model="llava", input=FIRST)
    with gpt.responses.stream(model="llava", input=SHAPE, previous_response_id=first.id, store=is_stored) as stream:
        events = list(stream)
        response = stream.get_final_response()

    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == response.output_text
    )
    if is_stored:
        assert gpt.responses.retrieve(response.id).output_text == response.output_text
    else:
        with pytest.raises(openai.NotFoundError):
            gpt.responses.retrieve(response.id)


@at_both_bases
def test_stream_of_a_stored_response_is_repeated(gpt: openai.OpenAI) -> None:
    """A client that has lost its connection gets the events that it missed; a whole answer has one delta."""
    events = list(gpt.responses.create(model="llava", input=FIRST, stream=True))
    response = gpt.responses.retrieve(events[-1].response.id)

    for number in (0, 5, len(events) - 2):
        assert list(gpt.responses.retrieve(response.id, stream=True, starting_after=number)) == events[number + 1 :]
    assert list(gpt.responses.retrieve(response.id, stream=True)) == events
    with gpt.responses.stream(response_id=response.id, starting_after=3) as stream:
        assert stream.get_final_response().output_text == response.output_text
    whole = ask(gpt, SHAPE, response)
    deltas = [
        each for each in gpt.responses.retrieve(whole.id, stream=True) if each.type == "response.output_text.delta"
    ]
    assert [each.delta for each in deltas] == [whole.output_text]


@pytest.mark.parametrize("is_background", [False, True])
def test_log_probabilities_of_whole_and_streamed_answers(gpt: openai.OpenAI, is_background: bool) -> None:
    """A delta has its tokens' log probabilities, the last events have all, and stored responses with `include`."""
    asked: dict[str, Any] = {"model": "llava", "input": FIRST, "include": [LOGPROBS], "top_logprobs": 2}
    whole = gpt.responses.create(**asked)
    events = list(gpt.responses.create(**asked, stream=True, background=is_background))
    streamed = events[-1].response

    scores = logprobs_of(whole)
    assert "".join(each.token for each in scores) == whole.output_text
    assert all(each.top_logprobs[0].logprob == each.logprob for each in scores)  # a greedy answer
    assert {len(each.top_logprobs) for each in scores} == {2}
    assert [each.token for each in logprobs_of(streamed)] == [each.token for each in scores]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    told = [each.token for delta in deltas for each in delta.logprobs]
    assert told == [each.token for each in scores][: len(told)]
    assert all("".join(each.token for each in delta.logprobs) == delta.delta for delta in deltas)
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [each.logprob for each in done.logprobs] == [each.logprob for each in logprobs_of(streamed)]
    assert gpt.responses.retrieve(streamed.id, include=[LOGPROBS]) == streamed
    assert logprobs_of(gpt.responses.retrieve(streamed.id)) == []
    assert list(gpt.responses.retrieve(streamed.id, stream=True, starting_after=2)) == events[3:]
    second = ask(gpt, SHAPE, whole, top_logprobs=2)
    assert (second.top_logprobs, logprobs_of(second)) == (2, [])


def logprobs_of(response: Response) -> list[Any]:
    [message] = response.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    return part.logprobs or []


def test_deleted_and_cut_responses(gpt: openai.OpenAI) -> None:
    """A deleted response can be neither shown nor continued; one that is cut is incomplete."""
    first = gpt.responses.create(model="llava", input=FIRST)
    second = gpt.responses.create(model="llava", input=SHAPE, previous_response_id=first.id, max_output_tokens=2)
    assert (second.status, second.incomplete_details and second.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    third = ask(gpt, COLOR, second)

    gpt.responses.delete(second.id)

    for use in (gpt.responses.retrieve, gpt.responses.delete, gpt.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            use(second.id)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(gpt, SHAPE, second)
    assert caught.value.code == "previous_response_not_found"
    assert "circle" in ask(gpt, SHAPE, third).output_text


@at_both_bases
def test_conversation_has_items_of_clients_and_answers(gpt: openai.OpenAI) -> None:
    """The model reads added items, with an image; each can be shown, and text items can be deleted."""
    talk = gpt.conversations.create(items=FIRST, metadata={"topic": "shapes"})
    first = gpt.responses.create(model="llava", input=COLOR, conversation=talk.id)
    gpt.conversations.items.create(talk.id, items=[{"role": "user", "content": NUMBER}])
    second = gpt.responses.create(model="llava", input=SHAPE, conversation={"id": talk.id})

    assert "red" in first.output_text
    assert first.conversation.id == talk.id
    assert cached(second) > 0
    items = list(gpt.conversations.items.list(talk.id, order="asc", limit=2))
    texts = [item.content[-1 if i else 0].text for i, item in enumerate(items)]
    assert texts == [COLOR, COLOR, first.output_text, NUMBER, SHAPE, second.output_text]
    assert gpt.conversations.items.retrieve(items[3].id, conversation_id=talk.id) == items[3]

    kept = gpt.conversations.items.delete(items[3].id, conversation_id=talk.id)
    with pytest.raises(openai.NotFoundError):
        gpt.conversations.items.retrieve(items[3].id, conversation_id=talk.id)
    third = gpt.responses.create(model="llava", input=COLOR, conversation=talk.id)
    whole: Any = [*FIRST, *(item.to_dict() for item in items[1:3] + items[4:]), {"role": "user", "content": COLOR}]
    assert num_input(third) == num_input(gpt.responses.create(model="llava", input=whole, store=False))
    assert gpt.conversations.update(talk.id, metadata={"topic": "colors"}).metadata == {"topic": "colors"}
    assert gpt.conversations.retrieve(talk.id).created_at == kept.created_at == talk.created_at

    branch = ask(gpt, SHAPE, first)  # does not change the conversation
    assert branch.conversation is None
    assert len(list(gpt.conversations.items.list(talk.id))) == 7
    assert gpt.conversations.delete(talk.id).deleted
    for use in (gpt.conversations.retrieve, gpt.conversations.delete, gpt.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            use(talk.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.create(model="llava", input=COLOR, conversation=talk.id)


def test_items_are_named_with_their_images_and_shown_with_their_log_probabilities(gpt: openai.OpenAI) -> None:
    """A reference may omit `type`; an item in a conversation has the same log probabilities as in its response."""
    first = gpt.responses.create(model="llava", input=FIRST)
    [question] = gpt.responses.input_items.list(first.id)
    [answer] = first.output
    named: list[Any] = [{"type": "item_reference", "id": question.id}, {"id": answer.id}]
    talk = gpt.conversations.create(items=named)
    second = gpt.responses.create(model="llava", input=[*named, {"role": "user", "content": SHAPE}])
    third = gpt.responses.create(
        model="llava", input=SHAPE, conversation=talk.id, include=[LOGPROBS], top_logprobs=2, store=True
    )

    assert "circle" in second.output_text
    assert (third.output_text, num_input(third)) == (second.output_text, num_input(second))
    for included, expected in (([LOGPROBS], len(logprobs_of(third))), ([], 0)):
        last = gpt.conversations.items.list(talk.id, include=included).data[0]
        assert last.type == "message"
        assert len(last.to_dict()["content"][0]["logprobs"]) == expected


def test_listed_items_are_sent_again_with_their_images(gpt: openai.OpenAI) -> None:
    """Each turn sends all items of the conversation, like OpenAIConversationsSession of OpenAI's Agents SDK."""
    talk = gpt.conversations.create()
    asked: list[Any] = [FIRST[0]]
    for question, expected in ((None, "red"), (SHAPE, "circle"), (COLOR, "red")):
        listed: list[Any] = [
            item.model_dump(exclude_unset=True) for item in gpt.conversations.items.list(talk.id, order="asc")
        ]
        asked = [{"role": "user", "content": question}] if question else asked
        response = gpt.responses.create(model="llava", input=[*listed, *asked])
        assert expected in response.output_text
        output: list[Any] = [item.model_dump(exclude_unset=True) for item in response.output]
        gpt.conversations.items.create(talk.id, items=[*asked, *output])

    [question] = [item for item in gpt.responses.input_items.list(response.id, order="asc") if len(item.content) == 2]
    assert gpt.files.content(question.content[1].file_id).read() == draw("circle", "red")


def test_tokens_are_counted_as_usage_counts_them(gpt: openai.OpenAI) -> None:
    """The count equals the usage, with an image and after a response."""
    first = gpt.responses.create(model="llava", input=FIRST)
    second = ask(gpt, SHAPE, first)

    assert gpt.responses.input_tokens.count(model="llava", input=FIRST).input_tokens == num_input(first)
    after = gpt.responses.input_tokens.count(model="llava", input=SHAPE, previous_response_id=first.id)
    assert after.input_tokens == num_input(second)


def test_compaction_stands_for_a_conversation(gpt: openai.OpenAI) -> None:
    """The client's system messages return unchanged; one short item stands for the rest, with its image."""
    first = gpt.responses.create(model="llava", input=FIRST)
    system: Any = {"role": "developer", "content": "Answer."}
    compacted = gpt.responses.compact(
        model="llava", input=[system, {"role": "user", "content": SHAPE}], previous_response_id=first.id
    )
    *instructions, item = compacted.output
    texts = [part.text for each in instructions for part in each.content]
    # For the SDK, a system message is not an output.
    base: Any = [each.to_dict(warnings=False) for each in compacted.output]

    again = gpt.responses.create(model="llava", input=[*base, {"role": "user", "content": COLOR}])
    gpt.responses.delete(first.id)
    whole: Any = [system, *FIRST, *(each.to_dict() for each in first.output), {"role": "user", "content": SHAPE}]
    resent = gpt.responses.create(model="llava", input=[*whole, {"role": "user", "content": COLOR}])

    assert (compacted.object, texts, item.type) == ("response.compaction", ["Answer."], "compaction")
    assert len(str(base[-1])) < 512
    assert (again.output_text, num_input(again)) == (resent.output_text, num_input(resent))
    with pytest.raises(openai.NotFoundError):
        gpt.responses.create(model="llava", input=[{**base[-1], "encrypted_content": "cmp_other"}])
    with pytest.raises(openai.BadRequestError, match="model"):
        gpt.responses.compact(model=None, input="x")


def test_file_is_sent_once_and_named_by_many(gpt: openai.OpenAI) -> None:
    """An uploaded image is a file until it is deleted; responses that use it keep it."""
    picture = draw("circle", "red")
    file = gpt.files.create(file=("circle.png", picture, "image/png"), purpose="vision")
    see: Any = [{"role": "user", "content": [{"type": "input_text", "text": COLOR}, {**PICTURE, "image_url": None}]}]
    see[0]["content"][1]["file_id"] = file.id

    first = gpt.responses.create(model="llava", input=see)
    talk = gpt.conversations.create(items=see)

    assert (file.object, file.bytes, file.purpose, file.status) == ("file", len(picture), "vision", "processed")
    assert file.filename == "circle.png"
    assert gpt.files.retrieve(file.id) == file
    assert gpt.files.content(file.id).read() == picture
    assert "red" in first.output_text
    [item] = gpt.responses.input_items.list(first.id)
    assert item.content[1].file_id == file.id
    assert gpt.files.delete(file.id).deleted
    for use in (gpt.files.retrieve, gpt.files.content, gpt.files.delete):
        with pytest.raises(openai.NotFoundError):
            use(file.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.create(model="llava", input=see)
    assert "red" in ask(gpt, COLOR, first).output_text
    assert "red" in gpt.responses.create(model="llava", input=COLOR, conversation=talk.id).output_text


def test_files_are_listed_in_pages(gpt: openai.OpenAI) -> None:
    """OpenAI's pagination returns each file once, whichever instance has it; other purposes return none."""
    before = {file.id for file in gpt.files.list()}
    made = [gpt.files.create(file=draw("circle", color), purpose="vision") for color in ("red", "green", "blue")]

    pages = [file.id for file in gpt.files.list(limit=2, order="asc", purpose="vision")]

    assert len(pages) == len(set(pages))
    assert set(pages) - before == {file.id for file in made}
    assert {file.id: file for file in gpt.files.list(limit=1)}[made[0].id] == made[0]
    assert gpt.files.list(purpose="batch").data == []
    for file in made:
        gpt.files.delete(file.id)
    assert {file.id for file in gpt.files.list()} == before
    after_deleted = gpt.files.list(after=made[0].id).data
    assert {file.id for file in after_deleted} <= before
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.files.list(limit=0)
    assert caught.value.param == "limit"


@pytest.mark.parametrize(("content", "purpose"), [(b"no picture", "vision"), (draw("circle", "red"), "batch")])
def test_only_images_are_files(gpt: openai.OpenAI, content: bytes, purpose: Any) -> None:
    """Files of other purposes and contents are refused."""
    with pytest.raises(openai.BadRequestError):
        gpt.files.create(file=content, purpose=purpose)


def test_parsed_answer_follows_its_schema(gpt: openai.OpenAI) -> None:
    """OpenAI's helper returns an object of the requested class."""
    first = gpt.responses.create(model="llava", input=FIRST)
    parsed = gpt.responses.parse(
        model="llava", input=SHAPE, previous_response_id=first.id, text_format=Shape, max_output_tokens=100
    )

    assert isinstance(parsed.output_parsed, Shape)
    assert gpt.responses.retrieve(parsed.id).output_text == parsed.output_text


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"colour": "red"}, "colour", "unknown_parameter"),
        ({"input": []}, "input", "missing_required_parameter"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0].role", "InvalidRequest"),
        ({"input": [{"role": "user", "content": [{"type": "text"}]}]}, "input[0].content[0].type", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "InvalidRequest"),
        ({"metadata": {"a": 1}}, "metadata", "InvalidRequest"),
        ({"background": "yes"}, "background", "unsupported_value"),
        ({"include": ["everything"]}, "include", "unsupported_value"),
        ({"top_logprobs": 21}, "top_logprobs", "unsupported_value"),
    ],
)
def test_bad_fields_are_named(fleet: Fleet, body: dict[str, Any], param: str, code: str) -> None:
    """OpenAI's error object names the field."""
    with (
        openai.OpenAI(base_url=f"{fleet.runtime}/v1", api_key="any", timeout=90, max_retries=0) as gpt,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        gpt.responses.create(model="llava", input="x", extra_body=body)
    assert (caught.value.param, caught.value.code) == (param, code)
