"""The form of OpenAI's responses: an answer as events, as an object, and as its stored stream."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from handlers.chat.answer_parts import AnswerPart, AnswerReader
from handlers.chat.dialects.response_form import ResponseForm
from handlers.chat.forms import Summary, Token
from handlers.chat.items import parse_input
from handlers.models.answer_style import CALL, THOUGHT, AnswerStyle

ITEMS = parse_input("hi", 1)
STYLE = AnswerStyle(call=CALL, thought=THOUGHT, knows_tools=True)
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def make_form(*, has_logprobs: bool = True) -> ResponseForm:
    form = ResponseForm({"status": "in_progress", "usage": None}, ITEMS, has_logprobs=has_logprobs)
    form.place("ts-seq-a", 3)
    return form


def make_token(number: int, text: str, parts: Sequence[AnswerPart] | None = None) -> Token:
    top = [Token(number + place, "", -place, False, own_text=f"{text}{place}") for place in range(2)]
    return Token(number, text, -float(number), False, parts, top, own_text=text)


def summarize(tokens: list[Token], reader: AnswerReader | None = None) -> Summary:
    """Make the summary of an answer. tokens: those that have not been streamed."""
    message = None if reader is None else reader.message
    return Summary("".join(token.text for token in tokens), "eos_token", 9, 11, None, tokens, message, 4)


def read(data: bytes) -> list[dict[str, Any]]:
    """Read events as OpenAI's client does, by their data."""
    return [json.loads(event.partition("\ndata: ")[2]) for event in data.decode().split("\n\n") if event]


def split(texts: list[str]) -> tuple[list[Token], AnswerReader]:
    """Return the tokens of an answer with their parts."""
    reader, tokens = AnswerReader(STYLE, has_tools=True, name="x"), []
    for i, text in enumerate(texts):
        parts = reader.read(text)
        tokens.append(make_token(i, text, parts + reader.finish() if i == len(texts) - 1 else parts))
    return tokens, reader


def write(
    tokens: list[Token], reader: AnswerReader | None = None, **options: bool
) -> tuple[list[Any], tuple[str, str]]:
    """Return the events of a streamed answer, and what is stored of it."""
    form = make_form()
    data = form.begin() + b"".join(form.token(token, None) for token in tokens[:-1])
    summary = summarize(tokens[-1:], reader)
    stored = form.record(summary)
    return read(data + form.token(tokens[-1], summary)), stored


@given(st.lists(st.text(max_size=5), min_size=1, max_size=8), st.data())
def test_stored_stream_is_the_first_one(texts: list[str], data: st.DataObject) -> None:
    """The events after any number are those of the first stream, with equal numbers."""
    tokens = [make_token(i, text) for i, text in enumerate(texts)]

    events, (answer, response) = write(tokens)
    number = data.draw(st.integers(-1, len(events) - 1))

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event.get("delta", "") for event in events) == "".join(texts)
    assert read(make_form().repeat(answer, response, number)) == events[number + 1 :]
    assert json.loads(make_form().whole(summarize(tokens)))["output"] == events[-1]["response"]["output"]
    assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 4


ANSWER = (
    "<think>\nWhy \u00fc?\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\nDone.'
)


@given(st.lists(st.integers(0, len(ANSWER)), max_size=12))
@example([ANSWER.index("Done.")])  # the token that ends the second call begins the text after it
def test_reasoning_text_and_calls_are_items(cuts: list[int]) -> None:
    """Reasoning, text and calls have event types that OpenAI's client parses, wherever tokens divide the answer."""
    borders = [0, *sorted(cuts), len(ANSWER)]
    tokens, reader = split([ANSWER[a:b] for a, b in pairwise(borders)])

    events, (answer, response) = write(tokens, reader)
    last = events[-1]["response"]

    for event in events[2:-1]:
        EVENTS.validate_python(event)
    thought, text, first, second, rest = last["output"]
    assert [item["type"] for item in last["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert thought["summary"] == [{"type": "summary_text", "text": "Why \u00fc?"}]
    assert [item["content"][0]["text"] for item in (text, rest)] == ["I look.", "\nDone."]
    assert (first["name"], json.loads(first["arguments"])) == ("f", {"a": [1, "}"]})
    assert (second["name"], second["arguments"], second["status"]) == ("g", "{}", "completed")
    assert len({item["id"] for item in last["output"]} | {first["call_id"], second["call_id"]}) == 7
    for item in (text, rest):
        scored = "".join(each["token"] for each in item["content"][0]["logprobs"])
        assert item["content"][0]["text"] in scored  # a token may also have a mark
    for index, item in enumerate(last["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert (own[-1]["type"], own[-1]["item"]) == ("response.output_item.done", item)
        deltas = "".join(event["delta"] for event in own if "delta" in event)
        assert deltas == (item.get("arguments") or (item.get("content") or item["summary"])[0]["text"])
    assert read(make_form().repeat(answer, response, 6)) == events[7:]
    whole = json.loads(make_form().whole(summarize(tokens, reader)))
    assert whole["output"] == last["output"]
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_an_answer_that_was_given_before_is_streamed_again() -> None:
    """A repeated request gets the stored items as events of a stream."""
    tokens, reader = split([ANSWER])
    events, stored = write(tokens, reader)
    form = make_form()

    text = form.restore(*stored)
    again = read(form.begin() + form.token(Token(0, text, 0.0, False), summarize([])))

    assert again == events


@given(st.lists(st.integers(0, len(ANSWER)), max_size=12), st.data(), st.booleans())
def test_a_stream_goes_on_with_the_answer_that_was_stored(cuts: list[int], data: st.DataObject, is_whole: bool) -> None:
    """A stream continues with the stored answer after any of its tokens, without losing or repeating any."""
    tokens, reader = split([ANSWER[a:b] for a, b in pairwise([0, *sorted(cuts), len(ANSWER)])])
    events, stored = write(tokens, reader)
    if is_whole:
        stored = make_form().record(summarize(tokens, reader))
    num_given = data.draw(st.integers(0, len(tokens) - 1))
    form, unlike = make_form(), make_form()
    begun = form.begin() + b"".join(form.token(token, None) for token in tokens[:num_given])
    unlike.begin()
    unlike.token(split(["Something else."])[0][0], None)

    for each in (form, unlike):
        each.restore(*stored)
    rest = form.token(Token(0, "", 0.0, False), summarize([]))

    assert form.has_begun_as_restored()
    assert not unlike.has_begun_as_restored()
    continued = read(begun + rest)
    assert [event["sequence_number"] for event in continued] == list(range(len(continued)))
    assert continued[-1]["response"]["output"] == events[-1]["response"]["output"]
    if is_whole:
        assert [_told(continued, index) for index in range(5)] == [_told(events, index) for index in range(5)]
    else:
        assert continued == events


def _told(events: list[dict[str, Any]], index: int) -> tuple[str, list[str]]:
    """Return an item's text by its deltas, and its other events."""
    own = [event for event in events if event.get("output_index") == index]
    others = [event["type"] for event in own if "delta" not in event]
    return "".join(event.get("delta", "") for event in own), others


def test_log_probabilities_are_those_of_the_text() -> None:
    """Only tokens of the text have log probabilities, each delta those of its own.

    Reasoning, calls and marks have none.
    """
    texts = ["<think>", "Why", "?", "</think>", "\n\n", "I", " lo", "ok", ".\n", "<tool_call>", ANSWER[44:]]
    tokens, reader = split(texts)

    events, stored = write(tokens, reader)

    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    told = [(each["delta"], [(one["token"], one["logprob"]) for one in each["logprobs"]]) for each in deltas]
    assert told[:4] == [("I", [("I", -5)]), (" lo", [(" lo", -6)]), ("ok", [("ok", -7)]), (".", [(".\n", -8)])]
    text = events[-1]["response"]["output"][1]["content"][0]
    assert text["logprobs"] == [one for each in deltas[:4] for one in each["logprobs"]]
    assert text["logprobs"][0]["top_logprobs"][1] == {"token": "I1", "logprob": -1, "bytes": [73, 49]}
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == text["logprobs"]
    assert '"logprobs": [{' not in stored[0]


def test_without_a_request_there_are_no_log_probabilities() -> None:
    tokens = [make_token(i, text) for i, text in enumerate(["a", "b"])]
    form = make_form(has_logprobs=False)

    summary = summarize(tokens)
    response = json.loads(form.whole(summary))

    assert response["output"][0]["content"][0]["logprobs"] == []


def test_a_stop_string_is_in_the_log_probabilities() -> None:
    """The tokens of a stop string follow those of the text, with text that was held back, as in chat completions."""
    own_texts, texts = ["x", "y", "\u00e9", "", "S"], ["", "", "xy\u00e9", "", ""]
    tokens = [replace(make_token(i, text), text=texts[i]) for i, text in enumerate(own_texts)]

    events, _ = write(tokens)

    [delta] = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [each["token"] for each in delta["logprobs"]] == own_texts[:3]
    logprobs = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in logprobs] == own_texts


def test_a_call_that_is_cut_is_incomplete() -> None:
    """A call that is cut off is incomplete, with the arguments generated so far."""
    tokens, reader = split(['<tool_call>\n{"name": "f", "arguments": {"a": ', "1"])
    summary = Summary("", "length", 2, 11, None, tokens, reader.message, 0)

    response = json.loads(make_form().whole(summary))

    [item] = response["output"]
    assert (item["status"], item["arguments"], response["status"]) == ("incomplete", '{"a": 1', "incomplete")
    [again] = parse_input(response["output"], 4)
    assert again.message.calls[0].arguments == {"arguments": '{"a": 1'}
