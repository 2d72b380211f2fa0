"""OpenAI's chat completions, for each endpoint by its path and for all of them by the body's `model`.

POST /endpoints/{EndpointName}/openai/v1/chat/completions, POST /v1/chat/completions
GET  /endpoints/{EndpointName}/openai/v1/models[/{id}],    GET  /v1/models[/{id}]

A model's name is its endpoint's. The proxy reads the body only for that name, where there are several endpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from torchmoor.errors import (
    AccessDenied,
    ApiError,
    BodyTooLarge,
    MissingCredentials,
    ModelError,
    ServiceUnavailable,
    UnexpectedTargetModel,
    UnknownEndpoint,
    UnknownModel,
    WrongModel,
)
from torchmoor.proxy.api.dialect import ApiDialect, Explain
from torchmoor.proxy.api.invocation import TORCHSERVE_BUSY, Invocation
from torchmoor.proxy.api.openai_by_model import OpenAIByModel
from torchmoor.proxy.api.operation import Operation, find_target_model
from torchmoor.proxy.api.replies import LOOKING, json_reply, unknown_operation
from torchmoor.proxy.api.streaming import EventPassEncoder
from torchmoor.proxy.api.validation import TARGET_MODEL, TARGET_VARIANT, check_members
from torchmoor.proxy.dispatch.assignment import ERROR_HEADER
from torchmoor.proxy.dispatch.choice import Choice
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.answer import Answer
from torchmoor.proxy.http.call import Call, Deadlines
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.proxy.instances.registry import Endpoint

PREFIX = b"/v1/"
INFIX = b"/openai/v1/"

_CHAT = b"chat/completions"
_MODELS = b"models"
_DROPPED_FIELDS = frozenset((b"ts_stream_next", b"x-request-id", ERROR_HEADER))
_TOO_LARGE = 413
_TIMED_OUT = 504
# To these clients, a handler without memory is one kind of "try again later".
_STATUS_SHOWN_AS = {507: 503}


class OpenAIApi:
    """Reads the path of a request and makes its call."""

    def __init__(self, dispatchers: Dispatchers) -> None:
        self._dispatchers = dispatchers
        settings = dispatchers.settings
        timeouts = settings.timeouts
        self._max_body_bytes = settings.limits.max_passthrough_body_bytes
        self._deadlines = Deadlines(
            timeouts.model_timeout_s, timeouts.stream_total_timeout_s, timeouts.stream_idle_timeout_s
        )
        self._operations = {
            endpoint.name: Operation(dispatchers, endpoint, OpenAIDialect(), self._deadlines, self._max_body_bytes)
            for endpoint in dispatchers.registry.endpoints()
        }

    @staticmethod
    def serves(path: bytes) -> bool:
        return path.startswith(PREFIX) or (path.startswith(b"/endpoints/") and INFIX in path)

    def handle(self, request: Request, request_id: bytes) -> Call | Reply:
        """Make the call for a request, or list the models."""
        if request.path.startswith(PREFIX):
            name, operation = None, request.path[len(PREFIX) :]
        else:
            prefix, _, operation = request.path.partition(INFIX)
            name = prefix[len(b"/endpoints/") :].decode("latin-1")
        try:
            endpoints = (
                self._dispatchers.registry.endpoints() if name is None else [self._dispatchers.get_endpoint(name)]
            )
            if operation == _CHAT and request.method == b"POST":
                return self._choose(request, request_id, endpoints)
            if request.method in LOOKING and (operation == _MODELS or operation.startswith(_MODELS + b"/")):
                wanted = unquote(operation[len(_MODELS) + 1 :].decode("latin-1"))
                return _models([endpoint.name for endpoint in endpoints], wanted)
            raise unknown_operation(request)
        except ApiError as error:
            return openai_error(error, request_id)

    def _choose(self, request: Request, request_id: bytes, endpoints: Sequence[Endpoint]) -> Call:
        """Make the call of the only endpoint, or of the one that the body will name."""
        if len(endpoints) == 1:
            return self._complete(request, request_id, endpoints[0])
        self._check_length(request)

        def complete(model: str) -> Call:
            for endpoint in endpoints:
                if endpoint.name == model:
                    return self._complete(request, request_id, endpoint)
            raise UnknownModel(model, [endpoint.name for endpoint in endpoints])

        def say(error: ApiError) -> Reply:
            reply = openai_error(error, request_id)
            self._dispatchers.observe_reply(request, request_id, reply)
            return reply

        return OpenAIByModel(
            self._dispatchers,
            request,
            max_body_bytes=self._max_body_bytes,
            deadlines=self._deadlines,
            make=complete,
            say=say,
        )

    def _complete(self, request: Request, request_id: bytes, endpoint: Endpoint) -> Call:
        try:
            check_members(request.layout)
            self._check_length(request)
            if TARGET_MODEL in request.layout.places and endpoint.settings.multi_model is None:
                raise UnexpectedTargetModel(endpoint.name)
            dispatcher = self._dispatchers.choose(endpoint, None, request.find(TARGET_VARIANT))
        except ApiError as error:
            self._dispatchers.count_without_invocation(endpoint, error.status)
            raise
        return Invocation(
            self._operations[endpoint.name],
            request,
            request_id=request_id,
            dispatcher=dispatcher,
            session=None,
            model=find_target_model(request, endpoint),
        )

    def _check_length(self, request: Request) -> None:
        if (request.content_length or 0) > self._max_body_bytes:
            raise _with_status(BodyTooLarge(self._max_body_bytes), _TOO_LARGE)


class OpenAIDialect(ApiDialect):
    """An answer passes as it is; every error becomes OpenAI's error object."""

    operation_name = "ChatCompletions"
    names_sessions_in_body = False

    def error(self, error: ApiError, request_id: bytes, endpoint: Endpoint) -> Reply:
        """Render OpenAI's error object; a time-out is the proxy's here, and has its status."""
        return openai_error(_with_status(error, _TIMED_OUT) if isinstance(error, ModelError) else error, request_id)

    def answer(self, head: AnswerHead, request_id: bytes, choice: Choice) -> Answer | Explain:
        if head.status >= 300:
            return _explain
        lines = (head.line.client_line, head.lines(_DROPPED_FIELDS), b"x-request-id: ", request_id, choice.answer_lines)
        is_stream = (head.find(b"content-type") or b"").startswith(b"text/event-stream")
        return Answer(lines, EventPassEncoder(request_id) if is_stream else None)


def _explain(head: AnswerHead, body: bytes) -> ApiError:
    code = (head.find(ERROR_HEADER) or b"").decode("latin-1")
    return _HandlerRefusal(head, code, body) if code else _torchserve_error(head.status, body)


class _HandlerRefusal(ApiError):
    """An error object of the handler's, which passes on as it is. code, param: as the object has them."""

    def __init__(self, head: AnswerHead, kind: str, body: bytes) -> None:
        self.status = _STATUS_SHOWN_AS.get(head.status, head.status)
        self.kind = self.code = kind
        self.param: Any = None
        message = "The instance refused the request."
        try:
            told = json.loads(body)["error"]
            message, self.code, self.param = str(told["message"]), str(told["code"]), told.get("param")
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        super().__init__(message)
        retry_after = head.find(b"retry-after") or b""
        if retry_after.isdigit():
            self.retry_after_s = int(retry_after)


def _torchserve_error(status: int, body: bytes) -> ApiError:
    if status in TORCHSERVE_BUSY:
        return ServiceUnavailable("The instance could not take the request. Try again later.")
    if status == _TOO_LARGE:
        return _with_status(ApiError("The request body is longer than the model's limit."), _TOO_LARGE)
    text = body.decode("utf-8", "replace")[:1000]
    return _with_status(ApiError(f"The instance answered with status {status}: {text}"), 502)


def _models(names: list[str], wanted: str) -> Reply:
    """List the models, or describe one. Raises UnknownModel."""
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "torchmoor"} for name in names]
    if not wanted:
        return json_reply(200, {"object": "list", "data": models})
    for model in models:
        if model["id"] == wanted:
            return json_reply(200, model)
    raise UnknownModel(wanted, names)


def _with_status(error: ApiError, status: int) -> ApiError:
    error.status = status
    return error


def openai_error(error: ApiError, request_id: bytes) -> Reply:
    """Render an error of the proxy itself."""
    code: str | None = error.kind
    param: Any = None
    fields: tuple[tuple[bytes, bytes], ...] = ()
    if isinstance(error, AccessDenied):
        error, code = _with_status(error, 401), None if isinstance(error, MissingCredentials) else "invalid_api_key"
        fields = ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, UnknownEndpoint):
        error, code = _with_status(error, UnknownModel.status), UnknownModel.kind
    if isinstance(error, UnknownEndpoint | WrongModel):
        param = "model"
    if isinstance(error, _HandlerRefusal):
        code, param = error.code, error.param
    if error.retry_after_s is not None:
        fields = ((b"retry-after", b"%d" % error.retry_after_s),)
    return _reply(error.status, _object(error.message, error.status, code, param), request_id, fields)


def _object(message: str, status: int, code: str | None, param: Any = None) -> dict[str, Any]:
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": param, "code": code}


def _reply(
    status: int, error: dict[str, Any], request_id: bytes, fields: tuple[tuple[bytes, bytes], ...] = ()
) -> Reply:
    return json_reply(status, {"error": error}, ((b"x-request-id", request_id), *fields))
