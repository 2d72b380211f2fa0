"""OpenAI's Responses API over a WebSocket connection: each `response.create` message is a streamed request.

No instance stores a response with `store: false`. So a connection keeps the items of its last such response, and sends
them again with the input of the next one. See docs/decisions/0047-websockets-resend.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from time import monotonic
from typing import Any

from torchmoor.config.websocket import WebSocketSettings
from torchmoor.errors import ApiError, ServiceUnavailable, ValidationError
from torchmoor.proxy.api.affinity_keys import FIELDS, has_header
from torchmoor.proxy.api.runtime_members import make_note
from torchmoor.proxy.api.socket_messages import SocketMessages, error_message
from torchmoor.proxy.http.call import Call, MessageRequest, Upgrade
from torchmoor.proxy.http.field_names import ACCEPT, CONTENT_TYPE, INVOCATION_ID
from torchmoor.proxy.http.fields import BadMessage, FieldKind
from torchmoor.proxy.http.head import HeadBook
from torchmoor.proxy.http.message import Reply, Request, RequestLine
from torchmoor.proxy.http.outgoing import ByteBudget
from torchmoor.proxy.http.websocket import accept
from torchmoor.wire.json_values import BYTES_PER_VALUE, count_values

CREATE = "response.create"
MAX_LANES = 32  # names of lanes on a connection: OpenAI's limit
_LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}", re.ASCII)
_NAMED_LANE = re.compile(rb'"stream_id"\s*:\s*"([A-Za-z0-9_.-]{1,256})"')
_HANDSHAKE = b"sec-websocket-"
_OWN_FIELDS = frozenset((CONTENT_TYPE, ACCEPT, b"accept-encoding", INVOCATION_ID))
_TOO_OLD = {
    "type": "invalid_request_error",
    "code": "websocket_connection_limit_reached",
    "message": "The connection has reached its longest time; open a new one.",
    "param": None,
}


@dataclass(slots=True)
class Unstored:
    """A response that only its connection stores.

    base: the field that refers to the context before the items, if any. num_bytes: memory of the items.
    """

    id: str
    base: dict[str, Any]
    items: list[Any]
    num_bytes: int


@dataclass(slots=True)
class _Asked:
    """The message that is being answered. num_bytes: its memory. named: the unstored response that it continues."""

    is_stored: bool
    base: dict[str, Any]
    items: list[Any]
    num_bytes: int
    named: Unstored | None
    status: int = 0
    events: SocketMessages = field(default_factory=SocketMessages)


class ResponseSockets:
    """Opens connections, and limits their number and the bytes that they keep together."""

    def __init__(self, settings: WebSocketSettings) -> None:
        self.settings = settings
        self.heads = HeadBook(make_note)
        self.budget = ByteBudget(max_total_bytes=settings.max_held_bytes)
        self.num_open = 0

    def open(self, request: Request, handle: Callable[[Request], Call | Reply]) -> Upgrade:
        """Accept a handshake. handle: makes the call for the request of each message. Raises ApiError."""
        if self.num_open >= self.settings.max_connections:
            raise ServiceUnavailable("Too many WebSocket connections. Try again later.")
        try:
            protocol, accepted = accept(request, self.settings.max_message_bytes)
        except BadMessage as bad:
            raise ValidationError(bad.message) from bad
        self.num_open += 1
        return Upgrade(protocol, accepted, ResponseSocket(self, request, handle))


class ResponseSocket:
    """One connection's MessageHandler."""

    farewell = error_message(400, _TOO_OLD)

    def __init__(self, sockets: ResponseSockets, upgrade: Request, handle: Callable[[Request], Call | Reply]) -> None:
        """upgrade: the request that opened the connection, whose fields and access its messages have.

        handle: makes the call for a message's request.
        """
        self._sockets = sockets
        self._budget = sockets.budget
        self._upgrade = upgrade
        self._handle = handle
        self._num_held = 0
        self._last: dict[str, Unstored] = {}  # by lane
        self._lanes: set[str] = set()  # named ones
        self._asked: _Asked | None = None
        self._lane = ""  # of the message that is being read or answered
        self._line = RequestLine(b"POST", upgrade.path, b"", is_http10=False)
        self._kept_lines = _kept_lines(upgrade)
        # Without a session, this affinity key leads to the instance that has the conversation's KV cache.
        self._key_line = b"x-session-id: ws-%b" % token_hex(16).encode()

    # MessageHandler

    def hold(self, num_bytes: int) -> bool:
        added = num_bytes - self._num_held
        if added > 0 and not self._budget.try_take(added):
            return False
        if added < 0:
            self._budget.release(-added)
        self._num_held = num_bytes
        return True

    def begin(self, message: bytes) -> MessageRequest | bytes:
        self._lane = ""
        try:
            body = self._read(message)
            data = json.dumps(body, separators=(",", ":")).encode()
        except RecursionError:
            self._forget_asked()
            return self._refuse(message, ValidationError("The message is nested too deeply."))
        except (ValidationError, ServiceUnavailable) as error:
            return self._refuse(message, error)
        has_key = has_header(self._upgrade) or any(body.get(name) for name in FIELDS)
        request = self._make_request(len(data), () if has_key else (self._key_line,))
        return MessageRequest(request, data, self._handle(request))

    def on_answer(self, status: int, piece: bytes) -> list[bytes]:
        asked = self._asked
        assert asked is not None
        asked.status = status
        return self._mark(asked.events.read(status, piece, None if asked.named is None else asked.named.id))

    def on_answer_end(self, *, is_whole: bool) -> list[bytes]:
        asked = self._asked
        assert asked is not None
        self._forget_asked()
        messages = asked.events.end(asked.status, is_whole=is_whole)
        if asked.events.is_failed:
            if asked.named is not None and self._last.get(self._lane) is asked.named:
                self._keep(self._lane, None)
        elif not asked.is_stored and asked.events.last is not None:
            last, num_bytes = asked.events.last, asked.num_bytes + asked.events.num_bytes
            if asked.named is not None:
                num_bytes += asked.named.num_bytes
            items = [*asked.items, *last.get("output", ())]
            self._keep(self._lane, Unstored(last.get("id", ""), asked.base, items, num_bytes))
        return self._mark(messages)

    def close(self) -> None:
        self.hold(0)
        self._forget_asked()
        for lane in list(self._last):
            self._keep(lane, None)
        self._sockets.num_open -= 1

    # Messages

    def _read(self, message: bytes) -> dict[str, Any]:
        """Read a message as the body of its request. Raises ValidationError, ServiceUnavailable."""
        num_values, max_values = count_values(message), self._sockets.settings.max_message_values
        if num_values > max_values:
            raise ValidationError(f"The message has up to {num_values} JSON values; the limit is {max_values}.")
        num_bytes = len(message) + num_values * BYTES_PER_VALUE
        if not self._budget.try_take(num_bytes):
            raise ServiceUnavailable("Too many messages are being answered. Try again later.")
        try:
            return self._take(message, num_bytes)
        finally:
            if self._asked is None:
                self._budget.release(num_bytes)

    def _take(self, message: bytes, num_bytes: int) -> dict[str, Any]:
        """Parse a message that is to be answered. Raises ValidationError."""
        try:
            body = json.loads(message)
        except ValueError as error:
            raise ValidationError("The message is not valid JSON.") from error
        if not isinstance(body, dict) or body.pop("type", None) != CREATE:
            raise ValidationError(f"A message must be an object of the type '{CREATE}'; other types are not supported.")
        self._lane = self._read_lane(body)
        if body.get("background"):
            raise ValidationError("'background' is not supported over WebSocket.")
        named = self._find_named(body)
        items, base = _items(body.get("input")), _base(body)
        if named is not None:
            if not isinstance(body.get("input"), str | list | None):
                raise ValidationError("'input' must be a text or a list of items.")
            del body["previous_response_id"]
            items, base = [*named.items, *items], named.base
            body.update(base, input=items)
        self._asked = _Asked(body.get("store") is not False, base, items, num_bytes, named)
        body["stream"] = True
        return body

    def _forget_asked(self) -> None:
        if self._asked is not None:
            self._budget.release(self._asked.num_bytes)
            self._asked = None

    def _read_lane(self, body: dict[str, Any]) -> str:
        """Take the name of a message's lane; "" for the lane without a name. Raises ValidationError."""
        lane = body.pop("stream_id", None)
        if lane is None:
            return ""
        if not isinstance(lane, str) or not _LANE.fullmatch(lane):
            raise _lane_error("'stream_id' must have 1 to 256 letters, digits, _, - or .", "invalid_stream_id")
        if lane not in self._lanes and len(self._lanes) >= MAX_LANES:
            raise _lane_error(f"A connection has {MAX_LANES} lanes; open another.", "websocket_stream_limit_reached")
        self._lanes.add(lane)
        return lane

    def _mark(self, messages: Sequence[bytes]) -> list[bytes]:
        """Add the lane's name to the messages of its answer."""
        name = b'{"stream_id":"%b",' % self._lane.encode()
        return [name + message[1:] for message in messages] if self._lane else list(messages)

    def _refuse(self, message: bytes, error: ApiError) -> bytes:
        """Render an error in the message's lane, for which a client waits also if the message was not parsed."""
        if not self._lane and (named := _NAMED_LANE.search(message)):
            self._lane = named[1].decode()
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        refused = {"type": kind, "code": error.kind, "message": error.message, "param": None}
        return self._mark([error_message(error.status, refused)])[0]

    def _find_named(self, body: dict[str, Any]) -> Unstored | None:
        """Return the unstored response that a message continues, whichever lane it is of."""
        named = body.get("previous_response_id")
        if body.get("conversation"):
            return None
        return next((last for last in self._last.values() if last.id == named), None)

    def _make_request(self, length: int, added: tuple[bytes, ...]) -> Request:
        lines = [*self._kept_lines, *added, b"content-type: application/json", b"content-length: %d" % length]
        request = Request(self._line, *self._sockets.heads.read(lines), monotonic())
        request.principal = self._upgrade.principal
        return request

    def _keep(self, lane: str, response: Unstored | None) -> None:
        """Keep a response in place of the lane's last one, if the budget allows."""
        before = self._last.pop(lane, None)
        if before is not None:
            self._budget.release(before.num_bytes)
        if response is not None and self._budget.try_take(response.num_bytes):
            self._last[lane] = response


def _kept_lines(upgrade: Request) -> list[bytes]:
    """Return the header lines of the handshake that are repeated in every message's request."""
    return [
        field.line.removesuffix(b"\r\n")
        for field in upgrade.fields
        if field.role.kind in (FieldKind.HOST, FieldKind.PLAIN)
        and field.name not in upgrade.layout.options
        and field.name not in _OWN_FIELDS
        and not field.name.startswith(_HANDSHAKE)
    ]


def _items(given: Any) -> list[Any]:
    """Return an input as items."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return given if isinstance(given, list) else []


def _base(body: dict[str, Any]) -> dict[str, Any]:
    """Return the field that refers to the context before the input."""
    return {name: value for name, value in body.items() if name == "previous_response_id" and value}


def _lane_error(message: str, code: str) -> ValidationError:
    error = ValidationError(message)
    error.kind = code
    return error
