"""Each form of an answer, read as its published clients read it, however the network splits it."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handlers.chat.dialects.chat_completions import ChatCompletionForm
from handlers.chat.dialects.completion_fields import OpenAIAnswer
from handlers.chat.dialects.completions import CompletionForm
from handlers.chat.dialects.session import SessionForm
from handlers.chat.dialects.tgi_lmi import LmiForm, LmiJsonForm, TgiForm
from handlers.chat.forms import AnswerForm, Summary, Token
from handlers.errors import HandlerError, InvalidRequest, OutOfMemory, Overloaded, TurnTimedOut

TEXTS = ["Grün", "", " 🟢", "\n\n", ' "data:{}" ', "です", ""]
OPENAI = ChatCompletionForm(id="chatcmpl-1", created=7, model="llava")


def tokens_of(texts: Sequence[str]) -> list[Token]:
    end = len(texts) - 1
    return [Token(i, text, -0.5 * i, i == end, own_text=text, number=i + 1) for i, text in enumerate(texts)]


def summary_of(texts: Sequence[str], finish_reason: str = "eos_token") -> Summary:
    tokens = tokens_of(texts)
    return Summary("".join(texts), finish_reason, len(texts), 11, 3, tokens)


def stream(form: AnswerForm, texts: Sequence[str] = TEXTS, finish_reason: str = "eos_token") -> bytes:
    tokens = tokens_of(texts)
    last = summary_of(texts, finish_reason)
    pieces = [form.token(token, last if token is tokens[-1] else None) for token in tokens]
    return form.begin() + b"".join(pieces)


def parts(data: bytes, cuts: Iterable[int]) -> list[dict[str, Any]]:
    """Return boto3's event stream, cut at these places."""
    places = [0, *sorted(cuts), len(data)]
    return [{"PayloadPart": {"Bytes": data[a:b]}} for a, b in pairwise(places)]


def lines(events: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """Join parts into lines, as the line iterators in AWS's examples do."""
    held = b""
    for one in events:
        held += one["PayloadPart"]["Bytes"]
        while (end := held.find(b"\n")) >= 0:
            yield held[:end]
            held = held[end + 1 :]


def read_tgi(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Read TGI's form: each line with a brace contains JSON from there on."""
    return [json.loads(line[line.find(b"{") :].decode()) for line in lines(events) if line != b"" and b"{" in line]


def read_lmi(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Read LMI's form: every line is JSON."""
    return [json.loads(line) for line in lines(events)]


def read_openai(data: bytes) -> list[Any]:
    """Read OpenAI's events up to [DONE], which must come last."""
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def every_cut(data: bytes) -> Iterator[list[dict[str, Any]]]:
    """Return every split into two pieces, and the split into single bytes."""
    for place in range(len(data) + 1):
        yield parts(data, [place])
    yield parts(data, range(1, len(data)))


def test_tgi_stream_is_read_through_any_cut() -> None:
    """The published line iterator gets each token's text, and the whole text at the end."""
    for events in every_cut(stream(TgiForm())):
        found = read_tgi(events)

        assert [event["token"]["text"] for event in found] == TEXTS
        assert [event["index"] for event in found] == [1, 2, 3, 4, 5, 6, 7]
        assert [event["generated_text"] for event in found] == [None] * 6 + ["".join(TEXTS)]
        assert found[-1]["details"]["finish_reason"] == "eos_token"


def test_lmi_stream_is_read_through_any_cut() -> None:
    """Newer LMI lines have a token each, and the last has the text and the details."""
    for events in every_cut(stream(LmiForm())):
        found = read_lmi(events)

        assert [line["token"]["text"] for line in found] == TEXTS
        assert ["generated_text" in line for line in found] == [False] * 6 + [True]
        assert set(found[0]["token"]) == {"id", "text", "log_prob", "special_token"}
        assert found[-1]["details"]["generated_tokens"] == len(TEXTS)


def test_older_lmi_stream_is_read_through_any_cut() -> None:
    """Older LMI lines have texts only."""
    for events in every_cut(stream(LmiForm(are_outputs=True))):
        found = read_lmi(events)

        assert all(list(line) == ["outputs"] for line in found)
        assert "".join(line["outputs"][0] for line in found) == "".join(TEXTS)


def test_json_of_older_lmi_is_one_object() -> None:
    """Its beginning has the published client's space, and each token is its text alone."""
    raw = stream(LmiJsonForm())

    assert raw.startswith(b'{"generated_text": "')
    assert raw.endswith(b'"}')
    assert json.loads(raw) == {"generated_text": "".join(TEXTS)}
    assert [json.loads(b'"' + LmiJsonForm().token(token, None) + b'"') for token in tokens_of(TEXTS)] == TEXTS
    assert json.loads(stream(LmiJsonForm(has_details=True)))["details"]["finish_reason"] == "eos_token"
    broken = LmiJsonForm().begin() + LmiJsonForm().token(tokens_of(["ab"])[0], None)
    broken += LmiJsonForm().error(OutOfMemory("no room"))
    assert json.loads(broken) == {"generated_text": "ab", "error": "no room", "code": 507}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=6), st.data())
def test_any_text_passes_every_line_reader(texts: list[str], data: st.DataObject) -> None:
    """Newlines, braces, quotes and separators in a text never end a line or an event."""
    for form, read, key in (
        (TgiForm(), read_tgi, "token"),
        (LmiForm(), read_lmi, "token"),
        (LmiForm(are_outputs=True), read_lmi, "outputs"),
    ):
        raw = stream(form, texts)
        found = read(parts(raw, data.draw(st.lists(st.integers(0, len(raw)), max_size=8))))

        shown = [line[key]["text"] if key == "token" else line[key][0] for line in found]
        assert "".join(shown) == "".join(texts)
    assert json.loads(stream(LmiJsonForm(), texts)) == {"generated_text": "".join(texts)}
    chunks = [c for c in read_openai(stream(OPENAI, texts)) if c["choices"]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "".join(texts)


def test_no_piece_of_a_stream_ends_within_a_character() -> None:
    """Each piece of every form is valid UTF-8 by itself."""
    for form in (SessionForm(), TgiForm(), LmiForm(), LmiForm(are_outputs=True), LmiJsonForm(), OPENAI):
        for token in tokens_of(TEXTS):
            form.token(token, None).decode()


def test_openai_stream() -> None:
    """The role comes first, then content, the finish reason and [DONE]; tokens without text give no chunk."""
    chunks = read_openai(stream(OPENAI))

    assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
        ("chatcmpl-1", "chat.completion.chunk", 7, "llava")
    }
    choices = [c["choices"][0] for c in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["delta"]["content"] for c in choices[1:-1]] == [text for text in TEXTS if text]
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "stop")
    assert all(c["finish_reason"] is None and c["logprobs"] is None for c in choices[:-1])
    assert not any("usage" in c for c in chunks)


def test_openai_stream_with_usage() -> None:
    """stream_options.include_usage adds a last chunk without choices, and null before it."""
    *chunks, last = read_openai(stream(ChatCompletionForm(id="x", created=7, model="m", has_usage=True)))

    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    counts = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    details = {
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 11},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert last["usage"] == {**counts, **details}


def test_completions() -> None:
    """OpenAI's text completions are written whole, and as a stream with the usage at its end."""
    form = CompletionForm(id="cmpl-1", created=7, model="llava", has_usage=True)

    *chunks, last = read_openai(stream(form, finish_reason="length"))
    whole = json.loads(form.whole(summary_of(TEXTS)))

    assert {(c["id"], c["object"], c["created"], c["model"]) for c in (*chunks, last, whole)} == {
        ("cmpl-1", "text_completion", 7, "llava")
    }
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"] == "".join(TEXTS)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"] == 18


def test_openai_logprobs() -> None:
    """Each token has one entry, also when its text comes later, streamed and whole."""
    form = ChatCompletionForm(id="x", created=7, model="m", has_logprobs=True)

    chunks = read_openai(stream(form))
    whole = json.loads(form.whole(summary_of(TEXTS)))["choices"][0]["logprobs"]

    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole["content"]
    assert [(e["token"], e["logprob"]) for e in streamed] == [(t.text, t.logprob) for t in tokens_of(TEXTS)]
    assert bytes(streamed[2]["bytes"]).decode() == TEXTS[2]


@pytest.mark.parametrize(("reason", "openai"), [("eos_token", "stop"), ("stop_sequence", "stop"), ("length", "length")])
def test_finish_reasons_are_each_dialects_own(reason: str, openai: str) -> None:
    """TGI and LMI use the engine's reasons; OpenAI has two."""
    summary = summary_of(TEXTS, reason)

    assert json.loads(OPENAI.whole(summary))["choices"][0]["finish_reason"] == openai
    assert read_openai(stream(OPENAI, finish_reason=reason))[-1]["choices"][0]["finish_reason"] == openai
    [tgi] = json.loads(TgiForm(has_details=True).whole(summary))
    lmi = json.loads(LmiForm(has_details=True).whole(summary))
    assert tgi["details"]["finish_reason"] == lmi["details"]["finish_reason"] == reason


def test_whole_answers() -> None:
    """Each dialect has its own object, with details only on request."""
    summary, text = summary_of(TEXTS), "".join(TEXTS)

    assert json.loads(SessionForm().whole(summary)) == {"response_text": text}
    assert json.loads(TgiForm().whole(summary)) == [{"generated_text": text}]
    assert json.loads(TgiForm(is_list=False).whole(summary)) == {"generated_text": text}
    assert json.loads(LmiForm().whole(summary)) == {"generated_text": text}
    completion = json.loads(OPENAI.whole(summary))
    assert completion["object"] == "chat.completion"
    message = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    assert completion["choices"][0]["message"] == message
    assert completion["usage"]["total_tokens"] == 18
    assert json.loads(SessionForm(has_details=True).whole(summary))["details"]["seed"] == 3
    [tgi] = json.loads(TgiForm(has_details=True).whole(summary))
    assert [token["text"] for token in tgi["details"]["tokens"]] == TEXTS
    assert tgi["details"]["prefill"] == []
    lmi = json.loads(LmiForm(has_details=True).whole(summary))
    assert [token["log_prob"] for token in lmi["details"]["tokens"]] == [t.logprob for t in summary.tokens]


@pytest.mark.parametrize("form", [ChatCompletionForm, CompletionForm])
def test_usage_so_far_of_a_stored_answer_is_that_of_its_end(form: type[OpenAIAnswer]) -> None:
    """A stored answer that is sent again counts no tokens, in no chunk."""
    usage = {"has_usage": True, "has_running_usage": True}
    summary = Summary("Grün", "eos_token", 0, 0, None)

    data = form(id="x", created=7, model="m", **usage).token(Token(0, "Grün", 0.0, False, number=1), summary)

    assert {chunk["usage"]["completion_tokens"] for chunk in read_openai(data)} == {0}


def test_of_tokens_with_one_text_the_likeliest_counts() -> None:
    """Parts of characters have the same text, by which completions show log probabilities."""
    top = [Token(i, text, -i, False, own_text=text) for i, text in enumerate(["\ufffd", "a", "\ufffd"])]
    form = CompletionForm(id="x", created=7, model="m", has_logprobs=True)

    chunk, _ = read_openai(form.token(Token(0, "a", 0.0, False, top=top), summary_of(["a"])))

    assert chunk["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": 0, "a": -1}]


def test_text_before_comes_once() -> None:
    """return_full_text puts the prompt before the answer, where the dialect has a field for it."""
    text = "Q: " + "".join(TEXTS)
    summary = summary_of(TEXTS)

    assert stream(SessionForm(text_before="Q: ")).decode() == text
    assert read_tgi(parts(stream(TgiForm(text_before="Q: ")), []))[-1]["generated_text"] == text
    assert read_lmi(parts(stream(LmiForm(text_before="Q: ")), []))[-1]["generated_text"] == text
    older = read_lmi(parts(stream(LmiForm(text_before="Q: ", are_outputs=True)), []))
    assert "".join(line["outputs"][0] for line in older) == text
    assert json.loads(SessionForm(text_before="Q: ").whole(summary))["response_text"] == text
    assert json.loads(TgiForm(text_before="Q: ").whole(summary))[0]["generated_text"] == text
    assert json.loads(LmiForm(text_before="Q: ").whole(summary))["generated_text"] == text
    older_json = LmiJsonForm(text_before="Q: ")
    assert (
        stream(older_json)
        == older_json.whole(summary)
        == json.dumps({"generated_text": text}, ensure_ascii=False).encode()
    )


@pytest.mark.parametrize(
    ("error", "tgi_type"),
    [
        (InvalidRequest("no", param="x"), "validation"),
        (Overloaded("no"), "overloaded"),
        (TurnTimedOut("no"), "generation"),
    ],
)
def test_errors_in_a_stream_are_each_dialects_own(error: HandlerError, tgi_type: str) -> None:
    """A client can read the text before an error, and cannot mistake the error for text."""
    begun = {
        form: form.token(Token(1, "ü", 0.0, False), None) for form in (TgiForm(), LmiForm(), SessionForm(), OPENAI)
    }

    tgi = read_tgi(parts(begun[TgiForm()] + TgiForm().error(error), []))[-1]
    assert tgi == {"error": "no", "error_type": tgi_type}
    lmi = read_lmi(parts(begun[LmiForm()] + LmiForm().error(error), []))[-1]
    assert lmi == {"error": "no", "code": error.status}
    text, _, late = (begun[SessionForm()] + SessionForm().error(error)).partition(b"\x1e")
    assert (text.decode(), json.loads(late)["error"]["code"]) == ("ü", error.code)
    data = (begun[OPENAI] + OPENAI.error(error)).decode()
    assert json.loads(data.split("\n\n")[-2].removeprefix("data: "))["error"]["message"] == "no"
    assert "[DONE]" not in data


def test_error_body_is_openais_too() -> None:
    """One error object serves all dialects: our code and message, and the fields that OpenAI's clients read."""
    assert json.loads(InvalidRequest("no", param="tools").body())["error"] == {
        "code": "InvalidRequest",
        "message": "no",
        "type": "invalid_request_error",
        "param": "tools",
    }
    assert json.loads(Overloaded("busy").body())["error"]["type"] == "rate_limit_error"
    assert json.loads(TurnTimedOut("late").body())["error"]["type"] == "server_error"
