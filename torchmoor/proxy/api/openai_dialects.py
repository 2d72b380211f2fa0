"""The paths of OpenAI's API, and its dialects: one for each path below /v1/, with the form of its answers and errors.

Ids in paths are hidden from logs by dispatch/record.py.
"""

from __future__ import annotations

import json
from typing import Any

from torchmoor.errors import (
    AccessDenied,
    ApiError,
    MissingCredentials,
    ServiceUnavailable,
    UnexpectedTargetModel,
    UnknownEndpoint,
    UnknownModel,
    WrongModel,
)
from torchmoor.proxy.api.dialect import NOT_FOR_CLIENTS, ApiDialect, Explain
from torchmoor.proxy.api.openai_resources import OPENING, resource_lines
from torchmoor.proxy.api.replies import error_reply, gateway_status
from torchmoor.proxy.api.runtime_members import TARGET_MODEL
from torchmoor.proxy.api.stream_encoders import EventPassEncoder
from torchmoor.proxy.dispatch import unavailable
from torchmoor.proxy.http.answer import Answer
from torchmoor.proxy.http.field_names import ACCEPT, BACKGROUND, CONTENT_TYPE, ERROR_CODE, OPENAI_REQUEST_ID, SESSION_ID
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.wire import error_codes, headers

_PREFIX = b"/v1/"
_OF_ENDPOINT, _INFIX = b"/endpoints/", b"/openai/v1/"
_UNPREFIXED = frozenset((b"/tokenize", b"/detokenize"))  # vLLM's paths; OpenAI has no such operations
_DROPPED_FIELDS = NOT_FOR_CLIENTS | {OPENAI_REQUEST_ID, ERROR_CODE, BACKGROUND}
_NEEDS_MODEL_LINE = f"{headers.NEEDS_MODEL}: true\r\n".encode()
# To OpenAI's clients, an instance without memory is one more error to retry.
_STATUS_SHOWN_AS = {507: 503}
# The handler's codes of inputs that it cannot use, and OpenAI's: to its clients, these are bad requests (400).
_BAD_INPUTS = {
    error_codes.CONTEXT_TOO_LONG: "context_length_exceeded",
    error_codes.NOT_AN_IMAGE: "invalid_image_format",
    error_codes.IMAGE_TOO_LARGE: "image_too_large",
    error_codes.IMAGE_URL_FORBIDDEN: "invalid_image_url",
    error_codes.IMAGE_UNREACHABLE: "failed_to_download_image",
    error_codes.UNSUPPORTED_MEDIA: "UnsupportedMedia",  # OpenAI has no code for audio and video
}
# OpenAI's code of a response that cannot be continued: a bad request, too, although the handler's status is 404.
_PREVIOUS_UNKNOWN = "previous_response_not_found"


def is_openai(path: bytes) -> bool:
    """Return whether a path is one of OpenAI's API, of an endpoint or of all."""
    return path.startswith(_PREFIX) or path in _UNPREFIXED or (path.startswith(_OF_ENDPOINT) and _INFIX in path)


def split_path(path: bytes) -> tuple[str | None, bytes]:
    """Return the endpoint that a path names, if it names one, and the rest, below /v1/."""
    if path in _UNPREFIXED:
        return None, path[1:]
    if path.startswith(_PREFIX):
        return None, path[len(_PREFIX) :]
    prefix, _, subpath = path.partition(_INFIX)
    return prefix[len(_OF_ENDPOINT) :].decode("latin-1"), subpath


class OpenAIDialect(ApiDialect):
    """Answers are forwarded unchanged; every error becomes OpenAI's error object."""

    names_sessions_in_body = False

    def __init__(self, operation_name: str) -> None:
        self.operation_name = operation_name

    def check(self, request: Request, request_id: bytes, endpoint: Endpoint) -> None:
        if TARGET_MODEL in request.layout.places and endpoint.settings.multi_model is None:
            raise UnexpectedTargetModel(endpoint.name)

    def added_lines(self, request: Request) -> bytes:
        """Make the handler require `model`, as OpenAI does; on other paths, the same bodies need none."""
        return _NEEDS_MODEL_LINE

    def error(self, error: ApiError, request_id: bytes, endpoint: Endpoint) -> Reply:
        return openai_error(error, request_id)

    def answer(self, head: AnswerHead, request_id: bytes) -> Answer | Explain:
        if head.status >= 300:
            return _explain
        lines = (head.line.client_line, head.lines(_DROPPED_FIELDS), b"x-request-id: ", request_id, b"\r\n")
        return Answer(lines, EventPassEncoder(request_id) if self.is_stream(head) else None)

    def is_stream(self, head: AnswerHead) -> bool:
        return (head.find(CONTENT_TYPE) or b"").startswith(b"text/event-stream")


class ResourceDialect(OpenAIDialect):
    """The resource of a request determines its session, so the session header is not forwarded."""

    names_sessions_in_header = False
    held_back = frozenset((SESSION_ID, ACCEPT))
    sent_method = b"POST"

    def added_lines(self, request: Request) -> bytes:
        return resource_lines(request, split_path(request.path)[1])


COMPLETIONS = {
    b"chat/completions": OpenAIDialect("ChatCompletions"),
    b"completions": OpenAIDialect("Completions"),
}
TASKS = {b"embeddings": OpenAIDialect("Embeddings"), b"rerank": OpenAIDialect("Rerank")}
TOKENS = {b"tokenize": ResourceDialect("Tokenize"), b"detokenize": ResourceDialect("Detokenize")}
RESOURCES = dict(zip(OPENING, map(ResourceDialect, ("Responses", "Conversations", "Files")), strict=True))
DIALECTS: dict[bytes, OpenAIDialect] = {**COMPLETIONS, **TASKS, **TOKENS, **RESOURCES}
"""The dialect of each path below /v1/; for resources, of the path's first part."""


def _explain(head: AnswerHead, body: bytes) -> ApiError:
    code = (head.find(ERROR_CODE) or b"").decode("latin-1")
    return _HandlerRefusal(head, code, body) if code else _torchserve_error(head.status, body)


class _HandlerRefusal(ApiError):
    """The handler's error object, forwarded, with OpenAI's code if there is one. code, param: the object's fields."""

    def __init__(self, head: AnswerHead, kind: str, body: bytes) -> None:
        self.kind = self.code = kind
        self.param: Any = None
        message = "The instance refused the request."
        try:
            given = json.loads(body)["error"]
            message, self.code, self.param = str(given["message"]), str(given["code"]), given.get("param")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        status = _STATUS_SHOWN_AS.get(head.status, head.status)
        if kind in _BAD_INPUTS:
            status, self.code = 400, _BAD_INPUTS[kind]
        elif self.code == _PREVIOUS_UNKNOWN:
            status = 400
        super().__init__(message, status=status, retry_after_s=head.retry_after_s)


def _torchserve_error(status: int, body: bytes) -> ApiError:
    if status in error_codes.TORCHSERVE_BUSY:
        return ServiceUnavailable(unavailable.TORCHSERVE_BUSY)
    if status == 413:
        return ApiError("The request body is longer than the model's limit.", status=413)
    text = body.decode("utf-8", "replace")[:1000]
    return ApiError(f"The instance answered with status {status}: {text}", status=502)


def openai_error(error: ApiError, request_id: bytes) -> Reply:
    """Render OpenAI's error object. A time-out has HTTP's own status."""
    status = gateway_status(error)
    code: str | None = error.kind
    param: Any = None
    fields: tuple[tuple[bytes, bytes], ...] = ()
    if isinstance(error, AccessDenied):
        status, code = 401, None if isinstance(error, MissingCredentials) else "invalid_api_key"
        fields = ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, UnknownEndpoint):
        status, code = UnknownModel.status, UnknownModel.kind
    if isinstance(error, UnknownEndpoint | WrongModel):
        param = "model"
    if isinstance(error, _HandlerRefusal):
        code, param = error.code, error.param
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    content = {"error": {"message": error.message, "type": kind, "param": param, "code": code}}
    return error_reply(error, content, ((OPENAI_REQUEST_ID, request_id), *fields), status=status)
