"""Splits a streamed answer of the Responses API into messages, one for each event; an error becomes an error event."""

from __future__ import annotations

import json
from typing import Any

MAX_EVENT_BYTES = 64 << 20  # of a longer event or error, only the end is read; it is not forwarded
_EVENT_END = b"\n\n"
_DATA = b"data: "
_BEGINNING = 256  # bytes of an event with a response that have the field's name
_BROKEN = {"code": "server_error", "message": "The answer was broken off.", "param": None, "type": "server_error"}


def error_message(status: int, error: dict[str, Any]) -> bytes:
    """Encode an error as an event for a WebSocket's client."""
    return json.dumps({"type": "error", "status": status, "error": error}).encode()


class SocketMessages:
    """Reads one answer.

    last: the response in its last event, None before the end. num_bytes: size of that event. is_failed: the answer is
    an error, or ends with one.
    """

    def __init__(self) -> None:
        self.last: dict[str, Any] | None = None
        self.num_bytes = 0
        self.is_failed = False
        self._held = bytearray()  # the beginning of an event, or of an error
        self._num_searched = 0  # bytes of it in which no event's end begins

    def read(self, status: int, piece: bytes, previous: str | None) -> list[bytes]:
        """Read a piece. previous: the response that the client has continued, if the instance does not know it."""
        self._held += piece
        events = self._take_events() if status == 200 else []
        if (num_excess := len(self._held) - MAX_EVENT_BYTES) > 0:
            del self._held[:num_excess]
            self._num_searched = max(0, self._num_searched - num_excess)
        return [message for event in events if (message := self._read_event(event, previous))]

    def _take_events(self) -> list[bytes]:
        """Take the whole events. A long event arrives in many pieces, and no byte of it is searched or copied twice."""
        events: list[bytes] = []
        begin, end = 0, self._held.find(_EVENT_END, self._num_searched)
        while end >= 0:
            events.append(bytes(self._held[begin:end]))
            begin = end + len(_EVENT_END)
            end = self._held.find(_EVENT_END, begin)
        del self._held[:begin]
        self._num_searched = max(0, len(self._held) - len(_EVENT_END) + 1)
        return events

    def end(self, status: int, *, is_whole: bool) -> list[bytes]:
        """Read the end. Return an error event if the answer ended before its last event."""
        if (is_whole and self.last is not None) or self.is_failed:
            return []
        self.is_failed = True
        return [error_message(502, _BROKEN) if status == 200 else error_message(status, self._read_error())]

    def _read_event(self, event: bytes, previous: str | None) -> bytes:
        """Return the data of an event. Only events with a response or without a name are decoded."""
        name, _, data = event.rpartition(b"\n")
        if not data.startswith(_DATA):
            return b""
        data = data[len(_DATA) :]
        if name and b'"response":' not in data[:_BEGINNING]:
            return data
        try:
            value = json.loads(data)
            if not name and "error" in value:  # by which the proxy ends a stream that broke off
                self.is_failed = True
                return error_message(502, value["error"])
            response = value["response"]
            status = response["status"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return data
        if status not in ("in_progress", "queued"):
            self.last, self.num_bytes = response, len(data)
            self.is_failed = status not in ("completed", "incomplete")
        if previous is None:
            return data
        response["previous_response_id"] = previous
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

    def _read_error(self) -> dict[str, Any]:
        try:
            error: dict[str, Any] = json.loads(self._held)["error"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return _BROKEN
        return error
