"""OpenAI's API, for each endpoint by its path and for all of them by the body's `model`.

POST /endpoints/{EndpointName}/openai/v1/chat/completions, POST /v1/chat/completions; completions, embeddings, rerank
GET  /endpoints/{EndpointName}/openai/v1/models[/{id}],    GET  /v1/models[/{id}]
POST /endpoints/{EndpointName}/openai/v1/tokenize, POST /v1/tokenize, POST /tokenize; detokenize
*    /endpoints/{EndpointName}/openai/v1/responses[/...],  *    /v1/responses[/...]; conversations, files; WebSocket

A model's name is its endpoint's; that of an adapter is ENDPOINT/ADAPTER. The proxy reads the body only for this name,
if there are several endpoints or adapters, and for fields that choose an instance (affinity keys, ids of resources).
The endpoint is looked up again when the body has arrived: it may have been changed or deleted meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import unquote

from torchmoor.errors import ApiError, BodyTooLarge, ServiceUnavailable, ValidationError, WrongModel
from torchmoor.proxy.access.gate import body_too_large
from torchmoor.proxy.api.affinity_keys import find_affinity, has_header
from torchmoor.proxy.api.begin_invocation import begin_invocation
from torchmoor.proxy.api.body_fields import describe_json_problem, find_model
from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.api.openai_dialects import (
    COMPLETIONS,
    DIALECTS,
    TASKS,
    TOKENS,
    OpenAIDialect,
    is_openai,
    openai_error,
    split_path,
)
from torchmoor.proxy.api.openai_models import find_many, list_models, read_adapter, read_target_model, unknown_model
from torchmoor.proxy.api.openai_resources import FILES, OPENING, RESPONSES, filename_line, read_named
from torchmoor.proxy.api.operation import Operation, placed_name, stream_deadlines
from torchmoor.proxy.api.replies import LOOKING, Handler, unknown_operation
from torchmoor.proxy.api.response_invocation import BackgroundQueue, ResponseInvocation
from torchmoor.proxy.api.response_socket import ResponseSockets
from torchmoor.proxy.api.runtime_members import TARGET_MODEL
from torchmoor.proxy.dispatch import unavailable
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.call import WHOLE_BODY, Call, Deadlines, NextStep, Outcome, Upgrade, Waiter
from torchmoor.proxy.http.field_names import SESSION_ID
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.instances.registry import Endpoint
from torchmoor.wire.response_ids import Place, read_resource_path
from torchmoor.wire.session_ids import SessionId

_MODELS = b"models"
_CHOOSING: dict[bytes, OpenAIDialect] = {**COMPLETIONS, **TOKENS}  # their body names an endpoint, not a resource


class OpenAIApi:
    """Reads the path of a request and makes its call."""

    def __init__(self, dispatchers: Dispatchers, queue: BackgroundQueue) -> None:
        self._dispatchers = dispatchers
        self._queue = queue
        settings = dispatchers.settings
        self._max_body_bytes = OpenAIDialect.max_body_bytes(settings.limits)
        self._max_read_bytes = settings.limits.max_unrouted_body_bytes
        self._deadlines = stream_deadlines(settings.timeouts)
        self.sockets = ResponseSockets(settings.websocket)
        self._operations = dispatchers.registry.map_served(
            lambda endpoint: {dialect: Operation(dispatchers, endpoint, dialect) for dialect in DIALECTS.values()}
        )

    def find_handler(self, method: bytes, path: bytes) -> Handler | None:
        return self.handle if is_openai(path) else None

    def handle(self, request: Request, request_id: bytes) -> Call | Reply:
        """Make the call for a request, or list the models."""
        subpath = split_path(request.path)[1]
        try:
            endpoints = self._endpoints(request)
            if subpath in _CHOOSING and request.method == b"POST":
                return self._choose(request, request_id, _CHOOSING[subpath])
            if request.method in LOOKING and (subpath == _MODELS or subpath.startswith(_MODELS + b"/")):
                wanted = unquote(subpath[len(_MODELS) + 1 :].decode("latin-1"))
                return list_models(endpoints, wanted, request_id)
            if subpath in TASKS and request.method == b"POST":
                return self._ask_model(request, request_id, TASKS[subpath])
            resource = subpath.partition(b"/")[0]
            if endpoints and resource in OPENING and request.method != b"HEAD":  # the instance would send a body
                return self._open_resource(request, request_id, DIALECTS[resource])
            raise unknown_operation(request)
        except ApiError as error:
            return openai_error(error, request_id)

    def upgrade(self, request: Request, handle: Callable[[Request], Call | Reply]) -> Upgrade:
        """Open a WebSocket connection to the Responses API. Raises ApiError."""
        self._endpoints(request)
        if split_path(request.path)[1] != RESPONSES:
            raise ValidationError("Upgrade is not supported.")
        return self.sockets.open(request, handle)

    def _endpoints(self, request: Request) -> Sequence[Endpoint]:
        """Return the endpoint that a request's path names, or all if it names none. Raises UnknownEndpoint."""
        return self._dispatchers.get_endpoints(request, split_path(request.path)[0])

    def _open_resource(self, request: Request, request_id: bytes, dialect: OpenAIDialect) -> Call:
        """Make the call of the instance that holds the session of a resource."""
        subpath, endpoints = split_path(request.path)[1], self._endpoints(request)
        if subpath == FILES and len(endpoints) > 1:
            raise WrongModel("There are several endpoints: use the base URL of one, /endpoints/NAME/openai/v1.")
        place = read_resource_path(subpath.decode("latin-1"))
        if request.method == b"POST" and place is None:  # the body names the session
            return self._read_body(request, request_id, lambda body: self._create(request, request_id, dialect, body))
        for endpoint in endpoints:
            session = self._find_session(endpoint, request, place)
            if session is not None:
                return self._call(request, request_id, endpoint, dialect, session)
        return self._call(request, request_id, endpoints[0], dialect, None)

    def _create(self, request: Request, request_id: bytes, dialect: OpenAIDialect, body: bytes) -> Call:
        """Make the call for a new resource, at the instance whose session it continues."""
        named, subpath = read_named(body), split_path(request.path)[1]
        endpoint = self._get_endpoint(request, body)
        session = self._find_session(endpoint, request, named.place)
        is_response = subpath == RESPONSES
        if endpoint.settings.has_many:
            model = self._find_target(endpoint, request, body)
        else:
            model = self._find_adapter(endpoint, request, body) if is_response else None
        make = partial(ResponseInvocation, self._queue) if is_response else Invocation
        call = self._call(request, request_id, endpoint, dialect, session, body, model, make=make)
        call.assignment.opens_session = session is None and named.is_stored and subpath in OPENING
        if subpath == FILES:
            call.assignment.body_lines = filename_line(body)
        return call

    def _find_session(self, endpoint: Endpoint, request: Request, place: Place | None) -> SessionId | None:
        """Return the session of a place; None if this endpoint and caller have no such session."""
        if place is None:
            return None
        try:
            return self._dispatchers.sessions.get(endpoint, request.principal, place.session_id.encode())
        except ApiError:  # the instance answers with the error
            return None

    def _find_target(self, endpoint: Endpoint, request: Request, body: bytes) -> str | None:
        """Return the model that only the body of a request to /responses names. Raises WrongModel."""
        resource = split_path(request.path)[1].partition(b"/")[0]
        has_model = resource == RESPONSES  # conversations and files are created without one
        if not has_model or TARGET_MODEL in request.layout.places or len(self._endpoints(request)) > 1:
            return None
        return read_target_model(body, endpoint)

    def _find_adapter(self, endpoint: Endpoint, request: Request, body: bytes) -> str | None:
        """Return the adapter that only the body names. body: its beginning. Raises WrongModel."""
        if not endpoint.settings.has_adapters or TARGET_MODEL in request.layout.places:
            return None
        adapter = read_adapter(body, endpoint)
        if adapter is None and len(body) == self._max_read_bytes:
            raise WrongModel(
                f"Name the adapter, or the endpoint, as `model` within the first {self._max_read_bytes} bytes of the "
                "body."
            )
        return adapter

    def _choose(self, request: Request, request_id: bytes, dialect: OpenAIDialect) -> Call:
        """Make the call of the only endpoint, or of the one that the body will name."""
        endpoints = self._endpoints(request)
        if len(endpoints) == 1 and endpoints[0].settings.has_many:
            return self._ask_model(request, request_id, dialect)
        must_read = len(endpoints) != 1 or endpoints[0].settings.has_adapters
        if not must_read and not self._may_have_affinity(request, endpoints[0]):
            return self._call(request, request_id, endpoints[0], dialect, None)

        def complete(body: bytes) -> Call:
            endpoint = self._get_endpoint(request, body)
            adapter = self._find_adapter(endpoint, request, body)
            return self._call(request, request_id, endpoint, dialect, None, body, adapter)

        return self._read_body(request, request_id, complete)

    def _ask_model(self, request: Request, request_id: bytes, dialect: OpenAIDialect) -> Call:
        """Make the call for one of many models: the header's or the body's."""
        endpoint = find_many(self._endpoints(request))
        if TARGET_MODEL in request.layout.places:
            return self._call(request, request_id, endpoint, dialect, None)

        def ask(body: bytes) -> Call:
            endpoint = find_many(self._endpoints(request))
            model = read_target_model(body, endpoint)
            return self._call(request, request_id, endpoint, dialect, None, model=model)

        return self._read_body(request, request_id, ask)

    def _may_have_affinity(self, request: Request, endpoint: Endpoint) -> bool:
        """Return whether a key in the body can decide the instance."""
        return (
            len(endpoint.instances) > 1
            and any(variant.settings.affinity.max_key_bytes for variant in endpoint.variants)
            and SESSION_ID not in request.layout.places
            and endpoint.settings.multi_model is None
            and not has_header(request)
        )

    def _read_body(self, request: Request, request_id: bytes, make: Callable[[bytes], Call]) -> Call:
        """Make the call of the endpoint, model or resource that the body's beginning names."""
        if (request.content_length or 0) > self._max_body_bytes:
            raise BodyTooLarge(self._max_body_bytes)

        def render_error(error: ApiError) -> Reply:
            reply = openai_error(error, request_id)
            self._dispatchers.observe_reply(request, request_id, reply)
            return reply

        return OpenAIByBody(
            request,
            max_body_bytes=self._max_body_bytes,
            max_read_bytes=self._max_read_bytes,
            deadlines=self._deadlines,
            make=make,
            render_error=render_error,
        )

    def _get_endpoint(self, request: Request, body: bytes) -> Endpoint:
        """Return the endpoint that the path or the body's beginning names; there may be only one. Raises ApiError."""
        endpoints = self._endpoints(request)
        if len(endpoints) == 1:
            return endpoints[0]
        model = find_model(body)
        if model is None:
            raise WrongModel(
                f"There are several endpoints: name one as `model`, within the first {self._max_read_bytes} "
                "bytes of the body, or use the base URL of one, /endpoints/NAME/openai/v1."
                f"{describe_json_problem(body)}"
            )
        for endpoint in endpoints:
            if endpoint.name == model:
                return endpoint
            if endpoint.settings.has_adapters and model.startswith(f"{endpoint.name}/"):
                return endpoint
        raise unknown_model(model, [endpoint.name for endpoint in endpoints])

    def _call(
        self,
        request: Request,
        request_id: bytes,
        endpoint: Endpoint,
        dialect: OpenAIDialect,
        session: SessionId | None,
        body: bytes = b"",
        model: str | None = None,
        make: Callable[..., Invocation] = Invocation,
    ) -> Invocation:
        """Make the call of an endpoint.

        session: of its resource, if it names one. body: the bytes that were read. model: the name in the body.
        """
        operation = self._operations[endpoint][dialect]
        placed = None if model is None else placed_name(model, endpoint)
        call = begin_invocation(operation, request, request_id, session=session, model=placed, make=make)
        if model is not None:
            call.assignment.body_lines = b"%b: %b\r\n" % (TARGET_MODEL, model.encode())
        dispatcher = call.assignment.dispatcher
        affinity = find_affinity(request, body, dispatcher.variant.settings.affinity, dispatcher.metrics)
        if affinity is not None:
            call.assignment.prefer(affinity)
        return call


class OpenAIByBody:
    """A Call that finds its endpoint in the body, and then hands the request to that endpoint's call."""

    def __init__(
        self,
        request: Request,
        *,
        max_body_bytes: int,
        max_read_bytes: int,
        deadlines: Deadlines,
        make: Callable[[bytes], Call],
        render_error: Callable[[ApiError], Reply],
    ) -> None:
        """make: makes the call for the first max_read_bytes of the body, or raises ApiError."""
        check = request.body_check
        self.deadlines = deadlines
        self.max_body_bytes = max_body_bytes
        self._max_read_bytes = max_read_bytes
        if check is not None:
            self.max_body_bytes = min(max_body_bytes, check.max_body_bytes)
        self._make = make
        self._render_error = render_error
        self._call: Call | None = None
        self._request = request

    num_read_bytes = WHOLE_BODY  # of the endpoint's call, which is not known yet

    @property
    def wait_ends_at(self) -> float:
        assert self._call is not None  # other requests do not wait for it
        return self._call.wait_ends_at

    def route(self, body: bytes, waiter: Waiter) -> NextStep:
        """Find the endpoint, and let its call place the request."""
        try:
            check, self._request.body_check = self._request.body_check, None
            if check is not None:  # verified here once, before the name is used
                check.verify(body)
            call = self._make(body[: self._max_read_bytes])
        except ApiError as error:
            return self._render_error(error)
        self._call = call
        return call.route(body, waiter)

    def on_wait_over(self) -> Reply:
        assert self._call is not None
        return self._call.on_wait_over()

    def on_body_too_large(self) -> Reply:
        """Answer as the endpoint's call does; before that is found, with the dialect's error."""
        if self._call is not None:
            return self._call.on_body_too_large()
        return self._render_error(body_too_large(self._request, self.max_body_bytes))

    def on_body_dropped(self) -> Reply:
        return self._render_error(ServiceUnavailable(unavailable.TOO_MANY_BODIES))

    def limit_body(self, waiter: Waiter) -> None:
        """Do nothing: the endpoint is not known yet."""

    def finish(self, outcome: Outcome) -> None:
        if self._call is not None:
            self._call.finish(outcome)
