"""Streams are read alike wherever they are cut, and end at stop sequences; the handlers' output is the reference."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.chat.dialects.chat_completions import ChatCompletionForm
from handlers.chat.dialects.tgi_lmi import LmiForm, TgiForm
from handlers.chat.forms import AnswerForm, Summary, Token
from handlers.errors import Overloaded
from torchmoor.clients.errors import ErrorInStream, StreamCut, StreamError, UnreadableStream
from torchmoor.clients.pieces import Piece, Usage
from torchmoor.clients.streams import STOP_SEQUENCE, StopCutter, StreamReader, aread_stream, read_stream

FORMS: dict[str, AnswerForm] = {
    "tgi": TgiForm(),
    "lmi": LmiForm(),
    "lmi-outputs": LmiForm(are_outputs=True),
    "openai": ChatCompletionForm(id="chatcmpl-1", created=1, model="llava", has_usage=True),
}
NAMES = st.sampled_from(list(FORMS))
# Text with characters of several bytes, line ends, and what JSON and event streams themselves are made of.
TEXTS = st.lists(st.text(st.sampled_from('aabb \n\r"\\{}[]:data,ß€😀\u2028\ufeff'), max_size=6), min_size=1, max_size=6)
TEXTS = TEXTS.filter(any)  # the stream of an empty answer in old LMI's form is empty, like that of a failed server
CUTS = st.lists(st.integers(0, 3000), max_size=12)

WORDS = st.text("ab", max_size=12)


def write(form: AnswerForm, texts: Sequence[str]) -> bytes:
    """Return the stream of these tokens, as a handler writes it."""
    data = form.begin()
    for index, text in enumerate(texts):
        is_last = index == len(texts) - 1
        summary = Summary("".join(texts), "length", len(texts), 7, None) if is_last else None
        data += form.token(Token(index, text, -0.5, False), summary)
    return data


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(min(place, len(data)) for place in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(places)]


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def sse(*values: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)


def token(text: str, **more: Any) -> dict[str, Any]:
    return {"token": {"id": 1, "text": text, "logprob": -1.0, "special": False}, "generated_text": None, **more}


# Cuts


@given(name=NAMES, texts=TEXTS, cuts=CUTS)
def test_cuts_do_not_change_what_is_read(name: str, texts: list[str], cuts: list[int]) -> None:
    """Pieces, counts and reason do not depend on where the bytes are cut."""
    data = write(FORMS[name], texts)

    at_once, in_parts, one_by_one = (
        list(read_stream(chunks)) for chunks in ([data], cut(data, cuts), [bytes([byte]) for byte in data])
    )

    assert at_once == in_parts == one_by_one
    assert text_of(at_once) == "".join(texts)
    if name != "lmi-outputs":
        assert [piece.finish_reason for piece in at_once if piece.finish_reason] == ["length"]
        assert [piece.usage for piece in at_once if piece.usage] == [Usage(7, len(texts))]


@given(name=NAMES.filter(lambda name: name != "lmi-outputs"), texts=TEXTS, where=st.floats(0, 1))
def test_half_a_stream_is_never_taken_for_whole(name: str, texts: list[str], where: float) -> None:
    """A stream that ends too soon raises StreamCut with the text so far, unless only bytes after its end are lost."""
    data = write(FORMS[name], texts)
    expected = "".join(texts)

    reader = StreamReader()
    pieces = list(reader.feed(data[: int(where * (len(data) - 1))]))
    try:
        pieces += reader.close()
    except StreamCut:
        assert expected.startswith(reader.text)
    else:
        assert text_of(pieces) == reader.text == expected


@given(name=NAMES, end=st.sampled_from([b"\r\n", b"\r"]), texts=TEXTS, cuts=CUTS)
def test_line_ends_may_be_any(name: str, end: bytes, texts: list[str], cuts: list[int]) -> None:
    """CR LF and CR end a line like LF, also if the bytes are cut between them."""
    data = write(FORMS[name], texts)

    assert list(read_stream(cut(data.replace(b"\n", end), cuts))) == list(read_stream([data]))


@given(
    name=NAMES,
    texts=TEXTS,
    cuts=CUTS,
    stop=st.lists(st.text(st.sampled_from("ab \n"), min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_stop_sequences_end_the_answer_wherever_they_are_cut(
    name: str, texts: list[str], cuts: list[int], stop: list[str]
) -> None:
    """The text ends before the first complete stop sequence, also if it spans tokens and chunks."""
    data, whole = write(FORMS[name], texts), "".join(texts)
    ends = [(whole.find(sequence) + len(sequence), whole.find(sequence)) for sequence in stop if sequence in whole]

    pieces = list(read_stream(cut(data, cuts), stop))

    assert text_of(pieces) == (whole[: min(ends)[1]] if ends else whole)
    if ends:
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [STOP_SEQUENCE]


def test_text_that_was_held_back_comes_before_the_end() -> None:
    """The finish reason comes with the last text, not before it."""
    pieces = list(read_stream([write(FORMS["openai"], ["a", "b ST"])], ["STOP"]))

    (last,) = [piece for piece in pieces if piece.finish_reason]
    assert (last.text, last.finish_reason) == ("ST", "length")
    assert text_of(pieces) == "ab ST"


def test_a_stop_sequence_closes_the_source() -> None:
    """Reading stops at a stop sequence and closes the source, so that the model can stop, too."""
    is_closed = False

    def source() -> Iterator[bytes]:
        nonlocal is_closed
        try:
            yield sse(token("one. "))
            yield sse(token("two."))
            raise AssertionError("read on after the stop sequence")
        finally:
            is_closed = True

    assert text_of(list(read_stream(source(), ["two"]))) == "one. "
    assert is_closed


async def test_async_sources_are_read_alike() -> None:
    """An asynchronous iterator gives the same pieces, and is closed."""
    data = write(FORMS["tgi"], ["größer ", "als ", "😀"])
    is_closed = False

    async def source() -> AsyncIterator[bytes]:
        nonlocal is_closed
        try:
            for byte in data:
                yield bytes([byte])
        finally:
            is_closed = True

    assert text_of([piece async for piece in aread_stream(source(), ["als"])]) == "größer "
    assert is_closed


# What servers write


def end(text: str) -> dict[str, Any]:
    return token(text, generated_text="ignored", details={"finish_reason": "eos_token", "generated_tokens": 2})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b": hello\n\nevent: x\nid: 3\nretry: 5\n" + sse(end("a")), "a", id="comments and other fields"),
        pytest.param(b"\xef\xbb\xbf" + sse(end("a")), "a", id="byte order mark"),
        pytest.param(b'data:{"token":{"text":"a"},\ndata: "generated_text":"a"}\n\n', "a", id="data on two lines"),
        pytest.param(
            b'data:{"token":{"text":"a"},\r\ndata: "generated_text":"a"}\r\n\r\n',
            "a",
            id="two lines that end with CR LF",
        ),
        pytest.param(sse(token("a"), end("b")).replace(b"\n\n", b"\n"), "ab", id="no empty lines"),
        pytest.param(sse(token("a"), end("b")).rstrip(), "ab", id="no line end at the end"),
        pytest.param(sse(token("a"), token("</s>", generated_text="a")), "a</s>", id="a text like a special token"),
        pytest.param(
            sse(token("a"), {"token": {"id": 2, "text": "</s>", "special": True}, "generated_text": "a"}),
            "a",
            id="a special token",
        ),
        pytest.param(
            b'{"token": {"id": [5], "text": "a", "log_prob": -1}}\n{"generated_text": "a"}\n', "a", id="early LMI"
        ),
        pytest.param(b'{"outputs": ["a"]}\n{"outputs": []}\n{"outputs": ["b"]}\n', "ab", id="old LMI"),
        pytest.param(
            sse({"choices": [], "prompt_filter_results": []}, {"choices": [{"delta": {"content": "a"}}]})
            + b"data: [DONE]\n\n",
            "a",
            id="OpenAI on Azure",
        ),
        pytest.param(
            sse({"choices": [{"delta": {"content": "a"}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            "a",
            id="no DONE",
        ),
        pytest.param(sse({"choices": [{"text": "a", "finish_reason": "stop"}]}), "a", id="plain completions"),
        pytest.param(b'[{"generated_text": "a"}]', "a", id="whole answer of TGI"),
        pytest.param(b'{"generated_text": "a"}', "a", id="whole answer of LMI"),
        pytest.param(b'{"response_text": "a"}', "a", id="whole answer in a session"),
        pytest.param(
            b'{"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}',
            "a",
            id="whole answer of OpenAI",
        ),
        pytest.param(
            json.dumps({"generated_text": "a", "details": {"tokens": [{"id": 1}], "seed": None}}, indent=2).encode(),
            "a",
            id="a dictionary in TorchServe's form",
        ),
        pytest.param(json.dumps([{"generated_text": "a"}], indent=2).encode() + b"\n", "a", id="a list in that form"),
    ],
)
def test_servers_differ_in_small_things(data: bytes, expected: str) -> None:
    """Comments, fields, line ends, special tokens and unstreamed answers of different servers are accepted."""
    for chunks in ([data], [bytes([byte]) for byte in data]):
        assert text_of(list(read_stream(chunks))) == expected


def test_openais_log_probabilities_are_read() -> None:
    """A piece of several tokens has none, because it has one number."""

    def choice(*scores: float | None) -> dict[str, Any]:
        content = [{"token": "a", "logprob": score} for score in scores]
        return {"choices": [{"delta": {"content": "a" * len(scores)}, "logprobs": {"content": content}}]}

    values = [choice(-0.5), choice(-0.5, -1.0), choice(None), {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    pieces = list(read_stream([b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in values)]))

    assert [piece.logprob for piece in pieces] == [-0.5, None, None, None]


def test_logprobs_ids_and_counts_are_told() -> None:
    """A piece has its log probability, token id and counts beside its text."""
    reader = StreamReader()

    pieces = list(reader.feed(write(FORMS["lmi"], ["a", "b"]))) + list(reader.close())

    assert pieces[0] == Piece("a", 0, -0.5)
    assert (reader.text, reader.finish_reason, reader.usage) == ("ab", "length", Usage(7, 2))


# Errors


@given(name=NAMES, texts=TEXTS, cuts=CUTS)
def test_an_error_in_the_stream_comes_after_the_text(name: str, texts: list[str], cuts: list[int]) -> None:
    """The pieces before the error are delivered; the error has the server's words and the text so far."""
    form = FORMS[name]
    before = b"".join(form.token(Token(1, text, 0.0, False), None) for text in texts)
    pieces: list[Piece] = []

    with pytest.raises(ErrorInStream, match="no room now") as caught:
        pieces.extend(read_stream(cut(before + form.error(Overloaded("no room now")), cuts)))

    assert caught.value.received == "".join(texts)


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        (b'data:{"error": "why", "error_type": "overloaded"}\n\n', "overloaded", None),
        (b'{"error": "why", "code": 424}\n', None, 424),
        (sse({"error": {"message": "why", "type": "server_error", "code": None}}), "server_error", None),
        (sse({"object": "error", "message": "why", "type": "BadRequestError", "code": 400}), "BadRequestError", 400),
    ],
)
def test_errors_keep_the_servers_words(data: bytes, kind: str | None, status: int | None) -> None:
    """An error keeps the server's message, in each dialect's form."""
    with pytest.raises(ErrorInStream, match="why") as caught:
        list(read_stream([data]))

    assert (caught.value.kind, caught.value.status) == (kind, status)


@pytest.mark.parametrize(
    "data",
    [
        b"The circle is red.\n",
        b"data: {no json}\n\n",
        b"{no json}\n",
        b"data: 1\n\n",
        b"[" * 100_000 + b"\n",
        b'{"outputs": ["a", "b"]}\n',
        b'{"outputs": "ab"}\n',
        b'{"token": 5}\n',
        b'{"choices": [{"delta": {"content": 5}}]}\n',
        b'{"choices": 5}\n',
        b'{"something": "else"}\n',
        b'{"outputs": ["\xff"]}\n',
        b"{\n  no json\n}\n",
        b"{\n}\n",
    ],
)
def test_what_is_no_stream_is_refused(data: bytes) -> None:
    """Bytes that are not a stream raise an error; nothing is guessed or skipped."""
    with pytest.raises(UnreadableStream):
        list(read_stream([data, b"\n"]))


@given(st.binary(max_size=200), CUTS)
def test_any_bytes_end_in_text_or_a_stream_error(data: bytes, cuts: list[int]) -> None:
    """Any bytes give text or a StreamError, the same for all cuts."""

    def outcome(read: Callable[[], list[Piece]]) -> object:
        try:
            return read()
        except StreamError as error:
            return type(error), error.received

    assert outcome(lambda: list(read_stream([data]))) == outcome(lambda: list(read_stream(cut(data, cuts))))


def test_a_value_that_ends_within_its_lines_is_not_complete() -> None:
    """A whole answer over several lines whose connection is lost is cut, not unreadable."""
    with pytest.raises(StreamCut):
        list(read_stream([b'{\n  "generated_text": "a",\n']))


def test_a_line_without_an_end_is_bounded() -> None:
    """A server that never ends its line does not fill the client's memory."""
    reader = StreamReader(max_event_bytes=1000)
    list(reader.feed(b"x" * 900))

    with pytest.raises(UnreadableStream, match="1000 bytes"):
        list(reader.feed(b"x" * 101))


def passed(pieces: list[str], stop: list[str]) -> str:
    cutter = StopCutter(stop)
    return "".join(map(cutter.feed, pieces)) + cutter.flush()


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("aaab", ["aab"], "a"),  # its beginning repeats itself
        ("xabcd", ["abcd", "bc"], "xa"),  # the one that is complete first, though it begins later
        ("xabc", ["abc", "bc"], "x"),  # both are complete: the longer one
        ("xab", ["abc"], "xab"),  # only the beginning of one
        ("xab", [""], "xab"),
    ],
)
def test_the_first_complete_sequence_cuts(text: str, stop: list[str], expected: str) -> None:
    """The first complete stop sequence cuts the text, whole and character by character."""
    assert passed([text], stop) == passed(list(text), stop) == expected


@given(WORDS, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(0, 12))
def test_cuts_of_the_text_do_not_matter(text: str, stop: list[str], at: int) -> None:
    """The result does not depend on how the text is divided, with an alphabet of two letters that overlap."""
    ends = [(end, end - len(s)) for s in stop for end in range(len(s), len(text) + 1) if text[:end].endswith(s)]
    expected = text[: min(ends)[1]] if ends else text

    assert passed([text[:at], text[at:]], stop) == passed(list(text), stop) == expected
