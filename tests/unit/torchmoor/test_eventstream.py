"""The encoder against botocore's own decoder."""

import itertools
import json
import re

from botocore.eventstream import EventStreamBuffer
from hypothesis import given
from hypothesis import strategies as st

from torchmoor.proxy.api.stream_encoders import EventPartEncoder, PartEncoder, TextPartEncoder
from torchmoor.proxy.http.answer import Loss
from torchmoor.proxy.http.eventstream import encode_frame, encode_headers, exception, payload_part
from torchmoor.wire.marked_text import MAX_HELD_BYTES


def decode(data: bytes) -> list[tuple[dict[str, object], bytes]]:
    """Decode with botocore, which checks lengths and both checksums."""
    buffer = EventStreamBuffer()
    buffer.add_data(data)
    return [(event.headers, event.payload) for event in buffer]


@given(st.lists(st.binary(max_size=2000)))
def test_parts_are_decoded_as_they_were(payloads: list[bytes]) -> None:
    """Any bytes in any number of consecutive frames are decoded unchanged."""
    events = decode(b"".join(map(payload_part, payloads)))

    expected = {
        ":message-type": "event",
        ":event-type": "PayloadPart",
        ":content-type": "application/octet-stream",
    }
    assert [(expected, payload) for payload in payloads] == events


@given(st.lists(st.integers(0, 27), max_size=4))
def test_no_part_has_two_events_wherever_the_answer_is_cut(cuts: list[int]) -> None:
    """Nor the second line feed of an event that was cut before it, and another event: clients would read neither."""
    answer = b"data: 1\n\ndata: 2\n\ndata: 3\n\n"
    pieces = [answer[start:end] for start, end in itertools.pairwise([0, *sorted(cuts), len(answer)])]

    parts = [part for piece in pieces for _, part in decode(EventPartEncoder().encode(piece))]

    assert b"".join(parts) == answer
    assert all(re.fullmatch(rb"[^\n]*\n{0,2}", part) for part in parts)


@given(st.dictionaries(st.text("abc-:", min_size=1, max_size=20), st.text(max_size=50), max_size=5), st.binary())
def test_any_headers_are_decoded_as_they_were(headers: dict[str, str], payload: bytes) -> None:
    assert [(headers, payload)] == decode(encode_frame(encode_headers(headers), payload))


def test_exception_carries_its_kind_and_body() -> None:
    """An exception has its kind as header, and ErrorCode as a member of the body."""
    [(headers, payload)] = decode(exception("ModelStreamError", "why", "StreamBroken"))

    assert (headers[":message-type"], headers[":exception-type"]) == ("exception", "ModelStreamError")
    assert json.loads(payload) == {"Message": "why", "ErrorCode": "StreamBroken"}


def kinds(data: bytes) -> list[object]:
    return [headers.get(":event-type") or headers.get(":exception-type") for headers, _ in decode(data)]


def text_of(data: bytes) -> bytes:
    return b"".join(payload for headers, payload in decode(data) if ":event-type" in headers)


@given(st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=5))
def test_text_without_an_error_passes_however_it_is_cut(text: bytes, cuts: list[int]) -> None:
    """Text that looks like the error mark arrives unchanged, wherever it is divided."""
    encoder = TextPartEncoder()
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]

    data = b"".join(encoder.encode(text[start:end]) for start, end in itertools.pairwise(places))
    data += encoder.finish()

    assert text == text_of(data)


def test_what_is_held_back_is_bounded() -> None:
    """The text that is held back after a mark is limited; a longer stream is text."""
    encoder = TextPartEncoder()
    data = encoder.encode(b"\x1e")

    for _ in range(3):
        data += encoder.encode(bytes(MAX_HELD_BYTES // 2))
    data += encoder.finish()

    assert len(text_of(data)) == 1 + 3 * (MAX_HELD_BYTES // 2)


def test_what_is_nested_deeply_behind_the_mark_is_text() -> None:
    """Deeply nested JSON after the mark is text, and does not make the reader fail."""
    encoder, text = TextPartEncoder(), b"\x1e" + b"[" * 50_000

    assert text_of(encoder.encode(text) + encoder.finish()) == text


def test_a_stream_that_breaks_off_ends_with_its_reason() -> None:
    """The message names the code, since botocore drops ErrorCode."""
    for loss, code in ((Loss.RESET, "StreamBroken"), (Loss.TIMEOUT, "ModelInvocationTimeExceeded")):
        for encoder in (PartEncoder(), TextPartEncoder()):
            [(_, payload)] = decode(encoder.fail(loss))
            body = json.loads(payload)
            assert code == body["ErrorCode"]
            assert code in body["Message"]


def test_a_stream_that_breaks_off_after_its_error_ends_once() -> None:
    """A stream truncated after the handler's error ends with that error once, and text held back is sent before."""
    encoder = TextPartEncoder()
    encoder.encode(b'\x1e{"error": {"code": "InternalError", "message": "boom"}}')
    assert kinds(encoder.fail(Loss.RESET)) == ["ModelStreamError"]

    encoder = TextPartEncoder()
    encoder.encode(b"\x1ehalf")
    assert kinds(encoder.fail(Loss.RESET)) == ["PayloadPart", "ModelStreamError"]
