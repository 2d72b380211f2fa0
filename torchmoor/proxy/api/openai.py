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
from torchmoor.proxy.api.openai_resources import (
    CONVERSATIONS,
    FILES,
    OPENING,
    RESPONSES,
    filename_line,
    read_named,
)
from torchmoor.proxy.api.operation import Operation, placed_name, stream_deadlines
from torchmoor.proxy.api.replies import LOOKING, Handler, unknown_operation
from torchmoor.proxy.api.response_invocation import BackgroundQueue, ResponseInvocation
from torchmoor.proxy.api.response_socket import ResponseSockets
from torchmoor.proxy.api.runtime_members import TARGET_MODEL
from torchmoor.proxy.dispatch import unavailable
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.call import WHOLE_BODY, Call, NextStep, Outcome, Upgrade, Waiter
from torchmoor.proxy.http.field_names import SESSION_ID
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.wire.response_ids import Place, read_resource_path
from torchmoor.wire.session_ids import SessionId

_MODELS = b"models"
_CHOOSING: dict[bytes, OpenAIDialect] = {**COMPLETIONS, **TOKENS}  # their body names an endpoint, not a resource


class OpenAIApi:
    """Finds the call of a request, and opens WebSocket connections. Its attributes are for OpenAIRequest."""

    def __init__(self, dispatchers: Dispatchers, queue: BackgroundQueue) -> None:
        self.dispatchers = dispatchers
        self.queue = queue
        settings = dispatchers.settings
        self.max_body_bytes = OpenAIDialect.max_body_bytes(settings.limits)
        self.max_read_bytes = settings.limits.max_unrouted_body_bytes
        self.deadlines = stream_deadlines(settings.timeouts)
        self.sockets = ResponseSockets(settings.websocket)
        self.operations = dispatchers.registry.map_served(
            lambda endpoint: {dialect: Operation(dispatchers, endpoint, dialect) for dialect in DIALECTS.values()}
        )

    def find_handler(self, method: bytes, path: bytes) -> Handler | None:
        return self.handle if is_openai(path) else None

    def handle(self, request: Request, request_id: bytes) -> Call | Reply:
        """Make the call for a request, or list the models."""
        try:
            return OpenAIRequest(self, request, request_id).answer()
        except ApiError as error:
            return openai_error(error, request_id)

    def upgrade(self, request: Request, handle: Callable[[Request], Call | Reply]) -> Upgrade:
        """Open a WebSocket connection to the Responses API. Raises ApiError."""
        name, subpath = split_path(request.path)
        self.dispatchers.get_endpoints(request, name)
        if subpath != RESPONSES:
            raise ValidationError("Upgrade is not supported.")
        return self.sockets.open(request, handle)


class OpenAIRequest:
    """One request: makes its call, at once or when its body has arrived."""

    def __init__(self, api: OpenAIApi, request: Request, request_id: bytes) -> None:
        self.api = api
        self.request = request
        self.request_id = request_id
        self._name, self._subpath = split_path(request.path)
        self._names_model = TARGET_MODEL in request.layout.places

    def answer(self) -> Call | Reply:
        """Make the call, or list the models. Raises ApiError."""
        subpath, method, endpoints = self._subpath, self.request.method, self._endpoints()
        if subpath in _CHOOSING and method == b"POST":
            return self._choose(_CHOOSING[subpath])
        if method in LOOKING and (subpath == _MODELS or subpath.startswith(_MODELS + b"/")):
            wanted = unquote(subpath[len(_MODELS) + 1 :].decode("latin-1"))
            return list_models(endpoints, wanted, self.request_id)
        if subpath in TASKS and method == b"POST":
            return self._ask_model(TASKS[subpath])
        resource = subpath.partition(b"/")[0]
        if endpoints and resource in OPENING and method != b"HEAD":  # the instance would send a body
            return self._open_resource(DIALECTS[resource])
        raise unknown_operation(self.request)

    def _endpoints(self) -> Sequence[Endpoint]:
        """Return the endpoint that the path names, or all if it names none. Raises UnknownEndpoint."""
        return self.api.dispatchers.get_endpoints(self.request, self._name)

    # Resources

    def _open_resource(self, dialect: OpenAIDialect) -> Call:
        """Make the call of the instance that holds the session of a resource."""
        endpoints = self._endpoints()
        if self._subpath in (CONVERSATIONS, FILES) and len(endpoints) > 1:  # no field of theirs names a model
            raise WrongModel("There are several endpoints: use the base URL of one, /endpoints/NAME/openai/v1.")
        place = read_resource_path(self._subpath.decode("latin-1"))
        if self.request.method == b"POST" and place is None:  # the body names the session
            return self._read_body(partial(self._create, dialect))
        for endpoint in endpoints:
            session = self._find_session(endpoint, place)
            if session is not None:
                return self._call(endpoint, dialect, session)
        return self._call(endpoints[0], dialect)

    def _create(self, dialect: OpenAIDialect, body: bytes) -> Call:
        """Make the call for a new resource, at the instance whose session it continues."""
        named = read_named(body)
        endpoint = self._get_endpoint(body)
        session = self._find_session(endpoint, named.place)
        is_response = self._subpath == RESPONSES
        if endpoint.settings.has_many:
            model = self._find_target(endpoint, body)
        else:
            model = self._find_adapter(endpoint, body) if is_response else None
        make = partial(ResponseInvocation, self.api.queue) if is_response else Invocation
        call = self._call(endpoint, dialect, session, body, model, make=make)
        call.assignment.opens_session = session is None and named.is_stored and self._subpath in OPENING
        if self._subpath == FILES:
            call.assignment.body_lines = filename_line(body)
        return call

    def _find_session(self, endpoint: Endpoint, place: Place | None) -> SessionId | None:
        """Return the session of a place; None if this endpoint and caller have no such session."""
        if place is None:
            return None
        try:
            return self.api.dispatchers.sessions.get(endpoint, self.request.principal, place.session_id.encode())
        except ApiError:  # the instance answers with the error
            return None

    # Models

    def _find_target(self, endpoint: Endpoint, body: bytes) -> str | None:
        """Return the model that only the body of a request to /responses names. Raises WrongModel."""
        has_model = self._subpath.partition(b"/")[0] == RESPONSES  # conversations and files are created without one
        if not has_model or self._names_model or len(self._endpoints()) > 1:
            return None
        return read_target_model(body, endpoint)

    def _find_adapter(self, endpoint: Endpoint, body: bytes) -> str | None:
        """Return the adapter that only the body names. body: its beginning. Raises WrongModel."""
        if not endpoint.settings.has_adapters or self._names_model:
            return None
        adapter, max_read_bytes = read_adapter(body, endpoint), self.api.max_read_bytes
        if adapter is None and len(body) == max_read_bytes:
            raise WrongModel(
                f"Name the adapter, or the endpoint, as `model` within the first {max_read_bytes} bytes of the body."
            )
        return adapter

    def _choose(self, dialect: OpenAIDialect) -> Call:
        """Make the call of the only endpoint, or of the one that the body will name."""
        endpoints = self._endpoints()
        if len(endpoints) == 1 and endpoints[0].settings.has_many:
            return self._ask_model(dialect)
        must_read = len(endpoints) != 1 or endpoints[0].settings.has_adapters
        if not must_read and not self._may_have_affinity(endpoints[0]):
            return self._call(endpoints[0], dialect)

        def complete(body: bytes) -> Call:
            endpoint = self._get_endpoint(body)
            return self._call(endpoint, dialect, None, body, self._find_adapter(endpoint, body))

        return self._read_body(complete)

    def _ask_model(self, dialect: OpenAIDialect) -> Call:
        """Make the call for one of many models: the header's or the body's."""
        endpoint = find_many(self._endpoints())
        if self._names_model:
            return self._call(endpoint, dialect)

        def ask(body: bytes) -> Call:
            endpoint = find_many(self._endpoints())
            return self._call(endpoint, dialect, model=read_target_model(body, endpoint))

        return self._read_body(ask)

    def _may_have_affinity(self, endpoint: Endpoint) -> bool:
        """Return whether a key in the body can decide the instance."""
        return (
            len(endpoint.instances) > 1
            and any(variant.settings.affinity.max_key_bytes for variant in endpoint.variants)
            and SESSION_ID not in self.request.layout.places
            and endpoint.settings.multi_model is None
            and not has_header(self.request)
        )

    def _get_endpoint(self, body: bytes) -> Endpoint:
        """Return the endpoint that the path or the body's beginning names; there may be only one. Raises ApiError."""
        endpoints = self._endpoints()
        if len(endpoints) == 1:
            return endpoints[0]
        model = find_model(body)
        if model is None:
            raise WrongModel(
                f"There are several endpoints: name one as `model`, within the first {self.api.max_read_bytes} "
                "bytes of the body, or use the base URL of one, /endpoints/NAME/openai/v1."
                f"{describe_json_problem(body)}"
            )
        for endpoint in endpoints:
            if endpoint.name == model:
                return endpoint
            if endpoint.settings.has_adapters and model.startswith(f"{endpoint.name}/"):
                return endpoint
        raise unknown_model(model, [endpoint.name for endpoint in endpoints])

    # Calls

    def _read_body(self, make: Callable[[bytes], Call]) -> Call:
        """Make the call of the endpoint, model or resource that the body's beginning names."""
        if (self.request.content_length or 0) > self.api.max_body_bytes:
            raise BodyTooLarge(self.api.max_body_bytes)
        return OpenAIByBody(self, make)

    def _call(
        self,
        endpoint: Endpoint,
        dialect: OpenAIDialect,
        session: SessionId | None = None,
        body: bytes = b"",
        model: str | None = None,
        make: Callable[..., Invocation] = Invocation,
    ) -> Invocation:
        """Make the call of an endpoint.

        session: of its resource, if it names one. body: the bytes that were read. model: the name in the body.
        """
        request, operation = self.request, self.api.operations[endpoint][dialect]
        placed = None if model is None else placed_name(model, endpoint)
        call = begin_invocation(operation, request, self.request_id, session=session, model=placed, make=make)
        if model is not None:
            call.assignment.body_lines = b"%b: %b\r\n" % (TARGET_MODEL, model.encode())
        dispatcher = call.assignment.dispatcher
        affinity = find_affinity(request, body, dispatcher.variant.settings.affinity, dispatcher.metrics)
        if affinity is not None:
            call.assignment.prefer(affinity)
        return call


class OpenAIByBody:
    """A Call that finds its endpoint in the body, and then hands the request to that endpoint's call."""

    num_read_bytes = WHOLE_BODY  # of the endpoint's call, which is not known yet

    def __init__(self, asked: OpenAIRequest, make: Callable[[bytes], Call]) -> None:
        """make: makes the call for the first max_read_bytes of the body, or raises ApiError."""
        api, check = asked.api, asked.request.body_check
        self.deadlines = api.deadlines
        self.max_body_bytes = api.max_body_bytes if check is None else min(api.max_body_bytes, check.max_body_bytes)
        self._asked = asked
        self._make = make
        self._call: Call | None = None

    @property
    def wait_ends_at(self) -> float:
        assert self._call is not None  # other requests do not wait for it
        return self._call.wait_ends_at

    def route(self, body: bytes, waiter: Waiter) -> NextStep:
        """Find the endpoint, and let its call place the request."""
        request = self._asked.request
        try:
            check, request.body_check = request.body_check, None
            if check is not None:  # verified here once, before the name is used
                check.verify(body)
            call = self._make(body[: self._asked.api.max_read_bytes])
        except ApiError as error:
            return self._refuse(error)
        self._call = call
        return call.route(body, waiter)

    def on_wait_over(self) -> Reply:
        assert self._call is not None
        return self._call.on_wait_over()

    def on_body_too_large(self) -> Reply:
        """Answer as the endpoint's call does; before that is found, with the dialect's error."""
        if self._call is not None:
            return self._call.on_body_too_large()
        return self._refuse(body_too_large(self._asked.request, self.max_body_bytes))

    def on_body_dropped(self) -> Reply:
        return self._refuse(ServiceUnavailable(unavailable.TOO_MANY_BODIES))

    def limit_body(self, waiter: Waiter) -> None:
        """Do nothing: the endpoint is not known yet."""

    def finish(self, outcome: Outcome) -> None:
        if self._call is not None:
            self._call.finish(outcome)

    def _refuse(self, error: ApiError) -> Reply:
        request, request_id = self._asked.request, self._asked.request_id
        reply = openai_error(error, request_id)
        self._asked.api.dispatchers.observe_reply(request, request_id, reply)
        return reply
