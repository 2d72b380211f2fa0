"""Requests to commands: tells the dialects apart by the body, and lets each read its own."""

import json
import time
from collections.abc import Callable
from typing import Any

from handlers.chat.checks import names
from handlers.chat.commands import Command, Status
from handlers.chat.dialects.inputs import parse_inputs
from handlers.chat.dialects.openai import parse_chat_completion
from handlers.chat.dialects.session import parse_image, parse_session
from handlers.chat.sessions.operation import parse_sessions_operation
from handlers.errors import InvalidJson, InvalidRequest
from handlers.requests import Incoming, refuse_other_media
from handlers.settings import RequestSettings
from torchmoor.wire import headers as wire
from torchmoor.wire import operations


def parse(
    incoming: Incoming, settings: RequestSettings | None = None, wall: Callable[[], float] = time.time
) -> Command:
    """The command that a request means. Raises InvalidJson, InvalidRequest, UnsupportedMedia, ContextTooLong,
    SessionIdMismatch.

    `messages` make a body OpenAI's, `inputs` TGI's or LMI's; all others belong to the session API.
    wall: seconds since 1970, which OpenAI's answers tell.
    """
    settings = settings or RequestSettings()
    operation = incoming.headers.get(wire.OPERATION)
    if operation == operations.STATUS:
        return Status()
    if operation == operations.SESSIONS:
        return parse_sessions_operation(_json_object(incoming.body))
    if operation:
        raise InvalidRequest(f"there is no operation {names([operation])}")
    refuse_other_media(incoming.headers.get("content-type", ""))
    if isinstance(incoming.body, bytes) and _is_image(incoming.headers.get("content-type", ""), incoming.body):
        return parse_image(incoming, incoming.body)
    body = _json_object(incoming.body)
    if "messages" in body:
        return parse_chat_completion(incoming, body, settings, int(wall()))
    if "inputs" in body:
        return parse_inputs(incoming, body, settings)
    return parse_session(incoming, body)


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
    """A parser's complaint without the text that it complains about."""
    if isinstance(exc, json.JSONDecodeError):
        return f"{exc.msg} at line {exc.lineno} column {exc.colno}"
    return "it is not UTF-8" if isinstance(exc, UnicodeError) else "it cannot be parsed"
