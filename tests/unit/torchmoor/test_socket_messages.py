"""The events of an answer that becomes WebSocket messages."""

import json

import pytest

from torchmoor.proxy.api import socket_messages
from torchmoor.proxy.api.socket_messages import SocketMessages

EVENTS = b'event: a\ndata: {"type":"a"}\n\nevent: b\ndata: {"type":"b"}\n\nevent: c\ndata: {"type":"c"}'


def test_events_are_found_wherever_the_pieces_end() -> None:
    """An event's end may be in two pieces, and a piece may have several ends."""
    for first in range(len(EVENTS) + 1):
        for second in range(first, len(EVENTS) + 1):
            messages = SocketMessages()
            pieces = (EVENTS[:first], EVENTS[first:second], EVENTS[second:], b"\n\n")

            found = [message for piece in pieces for message in messages.read(200, piece, None)]

            assert found == [b'{"type":"a"}', b'{"type":"b"}', b'{"type":"c"}']


def test_a_long_event_in_many_pieces_takes_linear_time() -> None:
    """A quadratic one would hold up all requests of the proxy for minutes, and exceed this test's limit."""
    messages, piece, num_pieces = SocketMessages(), b"x" * 4096, 15_000
    assert messages.read(200, b"event: a\ndata: ", None) == []

    for _ in range(num_pieces):
        assert messages.read(200, piece, None) == []

    assert messages.read(200, b"\n\n", None) == [piece * num_pieces]


@pytest.mark.parametrize("num_bytes", [1, 7, 40])
def test_of_a_longer_event_only_the_end_is_read(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """It is left out, and the events after it are read."""
    monkeypatch.setattr(socket_messages, "MAX_EVENT_BYTES", 30)
    messages = SocketMessages()
    text = b"event: a\ndata: " + b"x" * 50 + b"\n\n" + EVENTS + b"\n\n"

    found = [
        message
        for start in range(0, len(text), num_bytes)
        for message in messages.read(200, text[start : start + num_bytes], None)
    ]

    assert found[-3:] == [b'{"type":"a"}', b'{"type":"b"}', b'{"type":"c"}']


def test_an_error_that_arrives_in_pieces_is_read_at_the_end() -> None:
    messages = SocketMessages()
    for piece in (b'{"error": {"code"', b': "no"}}'):
        assert messages.read(400, piece, None) == []

    [error] = messages.end(400, is_whole=True)

    assert json.loads(error) == {"type": "error", "status": 400, "error": {"code": "no"}}
