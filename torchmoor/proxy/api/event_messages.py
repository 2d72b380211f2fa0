"""Takes an answer of the Responses API apart: its events become messages, its error the event of an error."""

from __future__ import annotations

import json
from typing import Any

MAX_ERROR_BYTES = 1 << 20  # of an answer that is not a stream
_EVENT_END = b"\n\n"
_DATA = b"data: "
_BROKEN = {"code": "server_error", "message": "The answer was broken off.", "param": None, "type": "server_error"}


def error_message(status: int, error: dict[str, Any]) -> bytes:
    """Encode the event by which a WebSocket's client sees an error."""
    return json.dumps({"type": "error", "status": status, "error": error}).encode()


class EventMessages:
    """Reads one answer. last: its last event with a response; None before there is one.

    is_failed: the answer is an error, or ends with one.
    """

    def __init__(self) -> None:
        self.last: dict[str, Any] | None = None
        self.is_failed = False
        self._held = b""  # the beginning of an event, or of an error

    def read(self, status: int, piece: bytes, previous: str | None) -> list[bytes]:
        """Read a piece. previous: the response that the client has continued, if the instance does not know it."""
        self._held += piece
        if status != 200:
            del_from = min(len(self._held), MAX_ERROR_BYTES)
            self._held = self._held[:del_from]
            return []
        *events, self._held = self._held.split(_EVENT_END)
        return [message for event in events if (message := self._read_event(event, previous))]

    def end(self, status: int, *, is_whole: bool) -> list[bytes]:
        """Read the end. Return the event of an error, if one is to be sent."""
        if status != 200:
            self.is_failed = True
            return [error_message(status, self._read_error())]
        if is_whole and self.last is not None:
            return []
        if self.is_failed:  # the client knows
            return []
        self.is_failed = True
        return [error_message(502, _BROKEN)]

    def _read_event(self, event: bytes, previous: str | None) -> bytes:
        """Return the data of an event. Only those with a response are decoded."""
        name, _, data = event.rpartition(b"\n")
        if not data.startswith(_DATA):
            return b""
        data = data[len(_DATA) :]
        if not name:  # the proxy's own: the stream broke off
            self.is_failed = True
            return error_message(502, json.loads(data).get("error", _BROKEN))
        if b'"response":' not in data[:256]:
            return data
        value = json.loads(data)
        response = value.get("response")
        if not isinstance(response, dict):
            return data
        if response["status"] not in ("in_progress", "queued"):
            self.last = response
            self.is_failed = response["status"] not in ("completed", "incomplete")
        if previous is None:
            return data
        response["previous_response_id"] = previous
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

    def _read_error(self) -> dict[str, Any]:
        try:
            error = json.loads(self._held)["error"]
            assert isinstance(error, dict)
        except (ValueError, KeyError, TypeError, RecursionError, AssertionError):
            return _BROKEN
        return error
