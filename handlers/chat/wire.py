"""What a client says, in types. Parsing only: nothing here knows sessions, models or TorchServe.

The bodies are those of the AWS LLaVA sample and AWS's guide to stateful sessions; docs/runtime-api.md has them all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from handlers.chat.parameters import Parameters, names, parse_parameters
from handlers.errors import InvalidJson, InvalidRequest, SessionIdMismatch

NEW_SESSION = "NEW_SESSION"
MAX_INVOCATION_ID = 128
SESSION_HEADER = "x-amzn-sagemaker-session-id"
ImageReference = bytes | str


class StreamFormat(Enum):
    """The form of a streamed answer, by the Accept header."""

    TEXT = "text/plain"
    TGI = "text/event-stream"
    LMI = "application/jsonlines"


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as the adapter hands it over: header names in lower case, the body as TorchServe left it."""

    headers: Mapping[str, str]
    body: bytes | str | dict[str, Any] | list[Any] | None


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf: both empty when no proxy stands in front."""

    endpoint: str
    principal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    caller: Caller
    images: tuple[ImageReference, ...]
    ttl_s: int | None
    invocation_id: str  # the client's own, the same when it sends the request again; empty if it gave none


@dataclass(frozen=True, slots=True, kw_only=True)
class AddImages:
    caller: Caller
    session_id: str
    images: tuple[ImageReference, ...]
    invocation_id: str  # as above


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    caller: Caller
    session_id: str
    prompt_text: str
    images: tuple[ImageReference, ...]
    parameters: Parameters
    invocation_id: str  # as above
    stream: StreamFormat | None  # None: the whole answer as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    caller: Caller
    session_id: str


@dataclass(frozen=True, slots=True)
class Status:
    """What the worker holds: an operation for the proxy and for operators."""


Command = OpenSession | AddImages | Ask | CloseSession | Status

_TYPES = ("start_session", "add_images", "send_text_prompt", "close_session")
_FIELDS = {
    "start_session": {"path", "image", "images", "ttl_s"},
    "add_images": {"path", "image", "images"},
    "send_text_prompt": {"prompt_text", "path", "image", "images", "parameters", "stream"},
    "close_session": set(),
}
_REQUEST_TYPES = {NEW_SESSION: "start_session", "CLOSE": "close_session"}


def parse(incoming: Incoming) -> Command:
    """The command that a request means. Raises InvalidJson, InvalidRequest, SessionIdMismatch."""
    headers = incoming.headers
    operation = headers.get("x-torchmoor-operation")
    if operation == "status":
        return Status()
    if operation:
        raise InvalidRequest(f"there is no operation {names([operation])}")
    caller = Caller(headers.get("x-torchmoor-endpoint", ""), headers.get("x-torchmoor-principal", ""))
    invocation_id = headers.get("amz-sdk-invocation-id", "")[:MAX_INVOCATION_ID]
    header_id = headers.get(SESSION_HEADER)
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if isinstance(incoming.body, bytes) and _is_image(content_type, incoming.body):
        if header_id == NEW_SESSION:
            return OpenSession(caller=caller, images=(incoming.body,), ttl_s=None, invocation_id=invocation_id)
        session_id = _session_id(header_id, None)
        return AddImages(caller=caller, session_id=session_id, images=(incoming.body,), invocation_id=invocation_id)
    body = _json_object(incoming.body)
    kind = _kind(body)
    unknown = set(body) - _FIELDS[kind] - {"type", "requestType", "session_id"}
    if unknown:
        raise InvalidRequest(f"{kind} has no field {names(unknown)}")
    if kind == "start_session":
        return _parse_open(caller, body, header_id, invocation_id)
    session_id = _session_id(header_id, body.get("session_id"))
    if kind == "close_session":
        return CloseSession(caller=caller, session_id=session_id)
    images = _images(body)
    if kind == "add_images":
        if not images:
            raise InvalidRequest("add_images needs an image: give 'path', 'image' or 'images'")
        return AddImages(caller=caller, session_id=session_id, images=images, invocation_id=invocation_id)
    return _parse_ask(caller, body, session_id, images, invocation_id, headers.get("accept", ""))


def _is_image(content_type: str, body: bytes) -> bool:
    if content_type in ("", "application/octet-stream"):
        return bool(body) and not body.lstrip().startswith(b"{")
    return content_type.startswith("image/")


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
    return type(exc).__name__


def _kind(body: dict[str, Any]) -> str:
    request_type = body.get("requestType")
    if request_type is not None:
        if not isinstance(request_type, str) or request_type not in _REQUEST_TYPES:
            raise InvalidRequest(f"'requestType' must be one of {', '.join(_REQUEST_TYPES)}")
        return _REQUEST_TYPES[request_type]
    kind = body.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise InvalidRequest(f"'type' must be one of {', '.join(_TYPES)}")
    return kind


def _session_id(header: str | None, field: Any) -> str:
    if field is not None and not isinstance(field, str):
        raise InvalidRequest("'session_id' must be a string")
    if header == NEW_SESSION:
        raise InvalidRequest("the session header says NEW_SESSION, but the body does not open one")
    if header and field and header != field:
        raise SessionIdMismatch("the session id in the header and the one in the body are not the same")
    session_id = header or field
    if not session_id:
        raise InvalidRequest("there is no session id: give 'session_id' in the body or X-Amzn-SageMaker-Session-Id")
    return session_id


def _parse_open(caller: Caller, body: dict[str, Any], header_id: str | None, invocation_id: str) -> OpenSession:
    if header_id not in (None, "", NEW_SESSION) or body.get("session_id") not in (None, "", NEW_SESSION):
        raise InvalidRequest("a session is opened without an id, or with NEW_SESSION in the session header")
    images = _images(body)
    if not images and "requestType" not in body:
        raise InvalidRequest("start_session needs an image: give 'path' (http, https or data URL), 'image' or 'images'")
    ttl_s = body.get("ttl_s")
    if ttl_s is not None and (isinstance(ttl_s, bool) or not isinstance(ttl_s, int) or ttl_s < 1):
        raise InvalidRequest("'ttl_s' must be a whole number of seconds, 1 or more")
    return OpenSession(caller=caller, images=images, ttl_s=ttl_s, invocation_id=invocation_id)


def _parse_ask(
    caller: Caller,
    body: dict[str, Any],
    session_id: str,
    images: tuple[ImageReference, ...],
    invocation_id: str,
    accept: str,
) -> Ask:
    prompt = body.get("prompt_text")
    if not isinstance(prompt, str) or not prompt.strip():
        raise InvalidRequest("'prompt_text' must be a text that is not empty")
    if not _is_unicode(prompt):
        raise InvalidRequest("'prompt_text' must be valid Unicode: it has one half of a surrogate pair")
    is_stream = body.get("stream", False)
    if not isinstance(is_stream, bool):
        raise InvalidRequest("'stream' must be true or false")
    return Ask(
        caller=caller,
        session_id=session_id,
        prompt_text=prompt,
        images=images,
        parameters=parse_parameters(body.get("parameters")),
        invocation_id=invocation_id,
        stream=_stream_format(accept) if is_stream else None,
    )


def _is_unicode(text: str) -> bool:
    """False for the lone surrogates that JSON's escapes can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stream_format(accept: str) -> StreamFormat:
    wanted = [item.partition(";")[0].strip().lower() for item in accept.split(",")]
    return next((f for f in (StreamFormat.TGI, StreamFormat.LMI) if f.value in wanted), StreamFormat.TEXT)


def _images(body: dict[str, Any]) -> tuple[ImageReference, ...]:
    found: list[Any] = [body[name] for name in ("path", "image") if body.get(name) is not None]
    several = body.get("images")
    if several is not None:
        if not isinstance(several, list):
            raise InvalidRequest("'images' must be a list of http(s) addresses, data URLs or base64 texts")
        found += several
    if any(not isinstance(image, str) or not image.strip() for image in found):
        raise InvalidRequest("an image must be an http(s) address, a data URL or base64 text")
    return tuple(found)
