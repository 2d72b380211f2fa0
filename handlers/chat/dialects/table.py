"""The table of dialects, and the choice of a request's dialect by its body."""

import re
from functools import partial
from typing import Any

from handlers.chat.commands import Command
from handlers.chat.dialects.chat_completions import parse_chat_completion
from handlers.chat.dialects.completions import parse_completion
from handlers.chat.dialects.operations import parse_operation
from handlers.chat.dialects.resource_requests import parse_resource
from handlers.chat.dialects.session import parse_image, parse_session
from handlers.chat.dialects.tgi_lmi import parse_inputs
from handlers.chat.dialects.turns import join_session
from handlers.errors import EulaNotAccepted, InvalidRequest
from handlers.requests.incoming import JSON_TYPES, Incoming, missing_body, refuse_other_media
from handlers.requests.json_values import begins_as_json, load_json
from handlers.settings.request import RequestSettings
from torchmoor.wire import headers as wire

# Parsers by the field that identifies a dialect's body. Such a body does not name a session, but the session header
# makes the request a turn. Any other body belongs to the session API. A parser gets the request, its body and the
# settings.
DIALECTS = {"messages": parse_chat_completion, "inputs": parse_inputs, "prompt": parse_completion}


def parse(incoming: Incoming, settings: RequestSettings) -> Command:
    """Read a request.

    Raises InvalidJson, InvalidRequest, EulaNotAccepted, UnsupportedMedia, ContextTooLong, SessionIdMismatch,
    SessionLimitReached.
    """
    read_body = partial(_json_object, incoming, settings.max_json_values)
    operation = incoming.headers.get(wire.OPERATION)
    if operation:
        return parse_operation(operation, read_body)
    resource = incoming.headers.get(wire.RESOURCE)
    if settings.requires_eula and (resource is None or resource.startswith("POST ")):
        _check_license(incoming)
    if resource:
        return parse_resource(resource, incoming, read_body, settings)
    if wire.TGI_ROUTE in incoming.headers:
        return join_session(incoming, parse_inputs(incoming, read_body(), settings))
    refuse_other_media(incoming.media_type)
    if incoming.body and _is_image(incoming.media_type, incoming.body):
        return parse_image(incoming, bytes(incoming.body))
    body = read_body()
    for field, parse_body in DIALECTS.items():
        if field in body:
            return join_session(incoming, parse_body(incoming, body, settings))
    return parse_session(incoming, body)


def _check_license(incoming: Incoming) -> None:
    """Raise EulaNotAccepted unless the CustomAttributes have accept_eula=true, alone or among others."""
    attributes = re.split("[;,]", incoming.custom_attributes)
    if not any(attribute.replace(" ", "").lower() == "accept_eula=true" for attribute in attributes):
        raise EulaNotAccepted(
            "this model has an end-user license agreement: send CustomAttributes='accept_eula=true' to accept it"
        )


def _is_image(media_type: str, body: bytes | bytearray) -> bool:
    if media_type in ("", "application/octet-stream"):
        return not begins_as_json(body)
    return media_type.startswith("image/")


def _json_object(incoming: Incoming, max_values: int) -> dict[str, Any]:
    if not incoming.body:
        raise missing_body(incoming)
    body = load_json(incoming.body, max_values, hint=_type_hint(incoming))
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _type_hint(incoming: Incoming) -> str:
    """Return what to send instead of the request's Content-Type, unless that is JSON or not given."""
    kind = incoming.media_type
    if kind in JSON_TYPES or kind.endswith("+json"):
        return ""
    return f"; its Content-Type is {kind[:40]!r}: send JSON as application/json, or an image as image/png"
