"""The table of dialects, and the choice of a request's dialect by its body."""

import json
import time
from collections.abc import Callable
from typing import Any

from handlers.chat.commands import Command
from handlers.chat.dialects.inputs import parse_inputs
from handlers.chat.dialects.openai import parse_chat_completion
from handlers.chat.dialects.operations import parse_operation
from handlers.chat.dialects.session import parse_image, parse_session
from handlers.errors import InvalidJson, InvalidRequest
from handlers.requests import Incoming, refuse_other_media
from handlers.settings import RequestSettings
from torchmoor.wire import headers as wire

# The parsers of the dialects without sessions, by the field that marks a body of each. Every other body belongs to the
# session API. A parser gets the request, its body, the settings and the time.
DIALECTS = {"messages": parse_chat_completion, "inputs": parse_inputs}


def parse(
    incoming: Incoming, settings: RequestSettings | None = None, wall: Callable[[], float] = time.time
) -> Command:
    """Read a request. wall: seconds since 1970.

    Raises InvalidJson, InvalidRequest, UnsupportedMedia, ContextTooLong, SessionIdMismatch, SessionLimitReached.
    """
    operation = incoming.headers.get(wire.OPERATION)
    if operation:
        return parse_operation(operation, lambda: _json_object(incoming.body))
    content_type = incoming.headers.get("content-type", "")
    refuse_other_media(content_type)
    if isinstance(incoming.body, bytes) and _is_image(content_type, incoming.body):
        return parse_image(incoming, incoming.body)
    body = _json_object(incoming.body)
    settings = settings or RequestSettings()
    for field, parse_body in DIALECTS.items():
        if field in body:
            _refuse_session(incoming, body)
            return parse_body(incoming, body, settings, wall())
    return parse_session(incoming, body, settings, wall())


def _refuse_session(incoming: Incoming, body: dict[str, Any]) -> None:
    """Raise InvalidRequest if a request of a dialect without sessions names one."""
    if incoming.headers.get(wire.SESSION_ID) or body.get("session_id"):
        raise InvalidRequest(
            "this kind of request belongs to no session; ask in a session with "
            '{"type": "send_text_prompt", "prompt_text": ...}'
        )


def _is_image(content_type: str, body: bytes) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    if kind in ("", "application/octet-stream"):
        return bool(body) and not body.lstrip().startswith(b"{")
    return kind.startswith("image/")


def _json_object(body: Any) -> dict[str, Any]:
    if body is None or body in (b"", ""):
        raise InvalidRequest("the request has no body; send JSON with Content-Type: application/json")
    if isinstance(body, bytes | str):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as exc:
            raise InvalidJson(f"the body is not valid JSON: {_short(exc)}") from exc
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _short(exc: Exception) -> str:
    """Return a parser's error without the text that caused it."""
    if isinstance(exc, json.JSONDecodeError):
        return f"{exc.msg} at line {exc.lineno} column {exc.colno}"
    return "it is not UTF-8" if isinstance(exc, UnicodeError) else "it cannot be parsed"
