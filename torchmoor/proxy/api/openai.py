"""OpenAI's chat completions, for each endpoint by its path and for all of them by the body's `model`.

POST /endpoints/{EndpointName}/openai/v1/chat/completions, POST /v1/chat/completions
GET  /endpoints/{EndpointName}/openai/v1/models[/{id}],    GET  /v1/models[/{id}]

A model's name is its endpoint's. The proxy reads the body only for that name, where there are several endpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
    UnknownOperation,
    WrongModel,
)
from torchmoor.proxy.api.affinity_keys import find_affinity, has_header
from torchmoor.proxy.api.dialect import ApiDialect, Explain
from torchmoor.proxy.api.invocation import TORCHSERVE_BUSY, Invocation
from torchmoor.proxy.api.openai_by_body import OpenAIByBody, find_model, read_model
from torchmoor.proxy.api.openai_models import find_many, list_models, read_target_model
from torchmoor.proxy.api.openai_resources import OPENING, is_resource, needs_body, read_named, read_path, resource_lines
from torchmoor.proxy.api.operation import Operation, find_target_model
from torchmoor.proxy.api.replies import LOOKING, json_reply, unknown_operation
from torchmoor.proxy.api.stream_continuer import CONTINUABLE
from torchmoor.proxy.api.streaming import EventPassEncoder
from torchmoor.proxy.api.validation import SESSION_ID, TARGET_MODEL, TARGET_VARIANT, check_members
from torchmoor.proxy.dispatch.assignment import ERROR_HEADER
from torchmoor.proxy.dispatch.choice import Choice
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.answer import Answer
from torchmoor.proxy.http.call import Call, Deadlines
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.proxy.instances.registry import Endpoint
from torchmoor.wire import headers
from torchmoor.wire.response_ids import Place
from torchmoor.wire.session_ids import SessionId

PREFIX = b"/v1/"
INFIX = b"/openai/v1/"

_COMPLETIONS = (b"chat/completions", b"completions")
_MODELS = b"models"
_TASKS = (b"embeddings", b"rerank")
_DROPPED_FIELDS = frozenset((b"ts_stream_next", CONTINUABLE, b"x-request-id", ERROR_HEADER))
_NEEDS_MODEL_LINE = f"{headers.NEEDS_MODEL}: true\r\n".encode()
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
        self._operations: dict[Endpoint, Operation] = {}
        self._resources: dict[Endpoint, Operation] = {}
        self._tasks: dict[Endpoint, Operation] = {}
        dispatchers.registry.watch(self._add, on_retired=self._drop)

    def _add(self, endpoint: Endpoint) -> None:
        self._operations[endpoint] = Operation(
            self._dispatchers, endpoint, OpenAIDialect(), self._deadlines, self._max_body_bytes
        )
        self._resources[endpoint] = Operation(
            self._dispatchers, endpoint, ResourceDialect(), self._deadlines, self._max_body_bytes
        )

        self._tasks[endpoint] = Operation(
            self._dispatchers, endpoint, TaskDialect(), self._deadlines, self._max_body_bytes
        )

    def _drop(self, endpoint: Endpoint) -> None:
        del self._operations[endpoint], self._resources[endpoint], self._tasks[endpoint]

    @staticmethod
    def serves(path: bytes) -> bool:
        return path.startswith(PREFIX) or (path.startswith(b"/endpoints/") and INFIX in path)

    def handle(self, request: Request, request_id: bytes) -> Call | Reply:
        """Make the call for a request, or list the models."""
        name, operation = _split(request.path)
        try:
            endpoints = (
                self._dispatchers.registry.endpoints() if name is None else [self._dispatchers.get_endpoint(name)]
            )
            if operation in _COMPLETIONS and request.method == b"POST":
                return self._choose(request, request_id, endpoints)
            if request.method in LOOKING and (operation == _MODELS or operation.startswith(_MODELS + b"/")):
                wanted = unquote(operation[len(_MODELS) + 1 :].decode("latin-1"))
                return list_models(endpoints, wanted)
            if operation in _TASKS and request.method == b"POST":
                return self._ask_model(request, request_id, endpoints, self._tasks)
            if endpoints and is_resource(operation):
                return self._open_resource(request, request_id, endpoints)
            raise unknown_operation(request)
        except ApiError as error:
            return openai_error(error, request_id)

    def _open_resource(self, request: Request, request_id: bytes, endpoints: Sequence[Endpoint]) -> Call:
        """Make the call of the instance that holds the session of a resource."""
        operation = _split(request.path)[1]
        if needs_body(request.method, operation):
            return self._read_body(
                request, request_id, lambda body, num_read: self._create(request, request_id, endpoints, body, num_read)
            )
        place = read_path(operation)
        for endpoint in endpoints:
            session = self._find_session(endpoint, request, place)
            if session is not None:
                return self._call(request, request_id, self._resources[endpoint], session)
        return self._call(request, request_id, self._resources[endpoints[0]], None)

    def _create(
        self, request: Request, request_id: bytes, endpoints: Sequence[Endpoint], body: bytes, num_read: int
    ) -> Call:
        """Make the call for a new resource, at the instance whose session it continues."""
        named = read_named(body)
        endpoint = endpoints[0]
        if len(endpoints) > 1:
            endpoint = self._find_endpoint(None if named.model is None else read_model(named.model), num_read)
        session = self._find_session(endpoint, request, named.place)
        call = self._call(request, request_id, self._resources[endpoint], session, body)
        is_new = session is None and named.is_stored
        call.assignment.may_branch = session is not None and named.is_stored
        call.assignment.opens_session = is_new and _split(request.path)[1] in OPENING
        return call

    def _find_session(self, endpoint: Endpoint, request: Request, place: Place | None) -> SessionId | None:
        """Return the session of a place; None if this endpoint and caller have no such session."""
        if place is None:
            return None
        try:
            return self._dispatchers.sessions.get(endpoint, request.principal, place.session_id.encode())
        except ApiError:  # the instance reports it
            return None

    def _choose(self, request: Request, request_id: bytes, endpoints: Sequence[Endpoint]) -> Call:
        """Make the call of the only endpoint, or of the one that the body will name."""
        if len(endpoints) == 1 and endpoints[0].settings.multi_model is not None:
            return self._ask_model(request, request_id, endpoints, self._operations)
        if len(endpoints) == 1 and not self._may_have_affinity(request, endpoints[0]):
            return self._call(request, request_id, self._operations[endpoints[0]], None)

        def complete(body: bytes, num_read: int) -> Call:
            endpoint = endpoints[0] if len(endpoints) == 1 else self._find_endpoint(find_model(body), num_read)
            return self._call(request, request_id, self._operations[endpoint], None, body)

        return self._read_body(request, request_id, complete)

    def _ask_model(
        self,
        request: Request,
        request_id: bytes,
        endpoints: Sequence[Endpoint],
        operations: Mapping[Endpoint, Operation],
    ) -> Call:
        """Make the call for one of many models: the header's or the body's."""
        endpoint = find_many(endpoints)
        if endpoint is None:
            raise UnknownOperation("Embeddings and rerank need an endpoint with many models, and there is none here.")
        if TARGET_MODEL in request.layout.places:
            return self._call(request, request_id, operations[endpoint], None)

        def ask(body: bytes, num_read: int) -> Call:
            model = read_target_model(body, endpoint)
            return self._call(request, request_id, operations[endpoint], None, model=model)

        return self._read_body(request, request_id, ask)

    def _may_have_affinity(self, request: Request, endpoint: Endpoint) -> bool:
        """Return whether a key in the body can matter for the instance, and there is room to keep the body."""
        limits, waiting = self._dispatchers.settings.limits, self._dispatchers.waiting_bytes
        length = limits.max_unrouted_body_bytes
        if not request.is_chunked:
            length = min(length, request.content_length or 0)
        return (
            len(endpoint.instances) > 1
            and SESSION_ID not in request.layout.places
            and endpoint.settings.multi_model is None
            and not has_header(request)
            and waiting.used_bytes + length <= waiting.max_bytes
        )

    def _read_body(self, request: Request, request_id: bytes, make: Callable[[bytes, int], Call]) -> Call:
        """Make the call that the body's beginning asks for."""
        self._check_length(request)

        def say(error: ApiError) -> Reply:
            reply = openai_error(error, request_id)
            self._dispatchers.observe_reply(request, request_id, reply)
            return reply

        return OpenAIByBody(
            self._dispatchers,
            request,
            max_body_bytes=self._max_body_bytes,
            deadlines=self._deadlines,
            make=make,
            say=say,
        )

    def _find_endpoint(self, model: str | None, num_read: int) -> Endpoint:
        """Return the endpoint that a body names. num_read: bytes of the body that were searched for the name."""
        if model is None:
            raise WrongModel(
                f"There are several endpoints: name one as `model`, within the first {num_read} "
                "bytes of the body, or use the base URL of one, /endpoints/NAME/openai/v1."
            )
        endpoints = self._dispatchers.registry.endpoints()
        for endpoint in endpoints:
            if endpoint.name == model:
                return endpoint
        raise UnknownModel(model, [endpoint.name for endpoint in endpoints])

    def _call(
        self,
        request: Request,
        request_id: bytes,
        operation: Operation,
        session: SessionId | None,
        body: bytes = b"",
        model: str | None = None,
    ) -> Invocation:
        """Make the call of an operation.

        session: that its resource has, if it has one. body: what was read of it. model: that the body names, of many.
        """
        endpoint = operation.endpoint
        try:
            check_members(request.layout)
            self._check_length(request)
            if TARGET_MODEL in request.layout.places and endpoint.settings.multi_model is None:
                raise UnexpectedTargetModel(endpoint.name)
            if session is None and not isinstance(operation.dialect, ResourceDialect):
                session = self._dispatchers.sessions.get(endpoint, request.principal, request.find(SESSION_ID))
            dispatcher = self._dispatchers.choose(endpoint, session, request.find(TARGET_VARIANT))
        except ApiError as error:
            self._dispatchers.count_without_invocation(endpoint, error.status)
            raise
        call = Invocation(
            operation,
            request,
            request_id=request_id,
            dispatcher=dispatcher,
            session=session,
            model=model or find_target_model(request, endpoint),
        )
        if model is not None:
            call.assignment.model_lines = b"%b: %b\r\n" % (TARGET_MODEL, model.encode())
        affinity = find_affinity(request, body, dispatcher.variant.settings.affinity, dispatcher.metrics)
        if affinity is not None:
            call.assignment.prefer(affinity)
        return call

    def _check_length(self, request: Request) -> None:
        if (request.content_length or 0) > self._max_body_bytes:
            raise _with_status(BodyTooLarge(self._max_body_bytes), _TOO_LARGE)


class OpenAIDialect(ApiDialect):
    """An answer passes as it is; every error becomes OpenAI's error object."""

    operation_name = "ChatCompletions"
    names_sessions_in_body = False

    def added_lines(self, request: Request) -> bytes:
        """Have the handler require `model`, as OpenAI does; other paths take the same bodies without it."""
        return _NEEDS_MODEL_LINE

    def error(self, error: ApiError, request_id: bytes, endpoint: Endpoint) -> Reply:
        """Render OpenAI's error object; a time-out is the proxy's here, and has its status."""
        return openai_error(_with_status(error, _TIMED_OUT) if isinstance(error, ModelError) else error, request_id)

    def answer(self, head: AnswerHead, request_id: bytes, choice: Choice) -> Answer | Explain:
        if head.status >= 300:
            return _explain
        lines = (head.line.client_line, head.lines(_DROPPED_FIELDS), b"x-request-id: ", request_id, choice.answer_lines)
        is_stream = (head.find(b"content-type") or b"").startswith(b"text/event-stream")
        return Answer(lines, EventPassEncoder(request_id) if is_stream else None)


class TaskDialect(OpenAIDialect):
    """Embeddings and rerank, by one of many models."""

    operation_name = "Tasks"


class ResourceDialect(OpenAIDialect):
    """A request for a resource names its session itself, so the session API's header does not pass on."""

    operation_name = "Responses"
    held_back = frozenset((SESSION_ID, b"accept"))
    sent_method = b"POST"

    def added_lines(self, request: Request) -> bytes:
        return resource_lines(request, _split(request.path)[1])


def _split(path: bytes) -> tuple[str | None, bytes]:
    """Return the endpoint that a path names, if it names one, and the operation."""
    if path.startswith(PREFIX):
        return None, path[len(PREFIX) :]
    prefix, _, operation = path.partition(INFIX)
    return prefix[len(b"/endpoints/") :].decode("latin-1"), operation


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
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
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
