"""One step of TorchServe: the rows of all requests in flight, and their answers.

TorchServe's `continuousBatching` calls the handler repeatedly with all requests in flight. A step gives each one of
three answers (measured on 0.12, see docs/decisions/0001-continuous-batching-pump.md):

    not known yet  its index is deleted from `context.request_ids`, and the request waits
    whole answer   status, headers, body; the criterion returns None: sent with its Content-Length
    stream         headers with the first piece; the criterion returns False for more to come, True for the end
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from handlers.errors import InvalidRequest
from handlers.requests.incoming import Incoming
from handlers.requests.reply import ReplyPieces, WholeReply
from torchmoor.wire import headers as wire
from torchmoor.wire import operations
from torchmoor.wire.operations import MAX_CANCELLED

MAX_TIMEOUT_DIGITS = 12  # of a time-out in milliseconds


def _whole(_: Any) -> None:
    return None


def _more(_: Any) -> bool:
    return False


def _end(_: Any) -> bool:
    return True


class Step:
    """The rows of a step. bodies: of the answers, empty for rows without an answer yet."""

    def __init__(self, rows: list[dict[str, Any]], context: Any) -> None:
        self._rows = rows
        self._context = context
        self.bodies = [b""] * len(rows)
        context.stopping_criteria = [_whole] * len(rows)

    @property
    def request_ids(self) -> dict[int, str]:
        """TorchServe's ids of the requests by the indexes of their rows."""
        ids: dict[int, str] = self._context.request_ids
        return ids

    def read(self, index: int) -> Incoming:
        """Read a row. Raises InvalidRequest."""
        return read_row(self._rows[index], self._context.get_all_request_header(index))

    def num_bytes(self, index: int) -> int:
        return sum(len(part) for part in self._rows[index].values())

    def defer(self, index: int) -> None:
        """Let a row wait for a later step."""
        del self._context.request_ids[index]

    def put(self, index: int, answer: WholeReply | ReplyPieces) -> None:
        """Set a row's answer, or the next piece of it."""
        context = self._context
        for name, value in (answer.headers or {}).items():
            context.set_response_header(index, name, value)
        if isinstance(answer, WholeReply):
            context.set_response_status(answer.status, "", index)
            self.bodies[index] = answer.body
            context.stopping_criteria[index] = _whole
        else:
            self.bodies[index] = answer.data
            context.stopping_criteria[index] = _end if answer.is_end else _more


def read_row(row: dict[str, Any], headers: dict[str, Any]) -> Incoming:
    """Read a TorchServe row. A long body is a bytearray, which is not copied.

    TorchServe adds each form field's headers to the request's as dicts; those are skipped. Raises InvalidRequest if the
    body is compressed.
    """
    lower = {name.lower(): value for name, value in headers.items() if isinstance(value, str)}
    coding = lower.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise InvalidRequest(
            f"compressed bodies are not read: send it without Content-Encoding, not in {coding[:40]!r}"
        )
    body = row.get("body", row.get("data"))
    if body is None:  # a form, such as that of a file, or nothing
        return Incoming(lower, form={name: bytes(part) for name, part in row.items()})
    return Incoming(lower, body)


def read_timeout_s(headers: Mapping[str, str]) -> float:
    """Read how long the proxy waits for the answer. Raises InvalidRequest."""
    text = headers.get(wire.TIMEOUT_MS)
    if text is None:
        return math.inf
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_TIMEOUT_DIGITS):
        raise InvalidRequest(
            f"{wire.TIMEOUT_MS} must be a whole number of milliseconds, of at most {MAX_TIMEOUT_DIGITS} digits"
        )
    return int(text) / 1000


def read_cancelled(body: bytes | bytearray) -> set[str]:
    """Read the body of a cancel operation, {"request_ids": [...]}. Raises InvalidRequest."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest("the body of a cancel operation must be JSON") from exc
    ids = content.get(operations.REQUEST_IDS) if isinstance(content, dict) else None
    if not isinstance(ids, list) or not all(isinstance(i, str) and i for i in ids) or len(ids) > MAX_CANCELLED:
        raise InvalidRequest(f"a cancel operation needs 'request_ids', a list of at most {MAX_CANCELLED} ids")
    return set(ids)
