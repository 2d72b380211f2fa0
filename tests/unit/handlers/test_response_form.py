"""The form of OpenAI's responses: an answer as events, as an object, and as its stored stream."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from handlers.chat.answer_parts import AnswerMessage, Content, Reasoning
from handlers.chat.dialects.response_form import ResponseForm
from handlers.chat.forms import Summary, Token
from handlers.chat.items import parse_input

ITEMS = parse_input("hi", 1)


def make_form() -> ResponseForm:
    form = ResponseForm({"status": "in_progress", "usage": None}, ITEMS)
    form.place("ts-seq-a", 3)
    return form


def summarise(text: str, tokens: list[Token], message: AnswerMessage | None = None) -> Summary:
    return Summary(text, "eos_token", len(tokens), 11, None, tokens, message, 4)


def read(data: bytes) -> list[dict[str, Any]]:
    """Read events as OpenAI's client does, by their data."""
    return [json.loads(event.partition("\ndata: ")[2]) for event in data.decode().split("\n\n") if event]


@given(st.lists(st.text(max_size=5), min_size=1, max_size=8), st.data())
def test_stored_stream_is_the_first_one(texts: list[str], data: st.DataObject) -> None:
    """The events after any number are those that the client would have got, with equal numbers."""
    form, tokens = make_form(), [Token(i, text, 0.0, False) for i, text in enumerate(texts)]
    summary = summarise("".join(texts), tokens)
    first = form.begin() + b"".join(form.token(token, None) for token in tokens[:-1])
    answer, response = form.record(summary)
    first += form.token(tokens[-1], summary)

    events = read(first)
    number = data.draw(st.integers(-1, len(events) - 1))

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event.get("delta", "") for event in events) == "".join(texts)
    assert read(make_form().repeat(answer, response, number)) == events[number + 1 :]
    assert json.loads(make_form().whole(summary))["output"] == events[-1]["response"]["output"]
    assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 4


def test_reasoning_is_not_part_of_the_answer() -> None:
    """The output has the content only, streamed and whole."""
    said = [(Reasoning("why"),), (Content("It "),), (Content("is."),)]
    tokens = [Token(i, "raw", 0.0, False, parts) for i, parts in enumerate(said)]
    summary = summarise("rawrawraw", tokens, AnswerMessage("It is.", "why"))
    form = make_form()

    events = read(form.begin() + b"".join(form.token(t, summary if t is tokens[-1] else None) for t in tokens))

    assert [event["delta"] for event in events if "delta" in event] == ["It ", "is."]
    [item] = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == "It is."
