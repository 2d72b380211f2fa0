"""The routes of Text Generation Inference (TGI), for the first endpoint.

POST /generate, /generate_stream, /
GET  /info, /health

The bodies are those of /invocations, and are not changed. A header names the first two routes to the instance. The path
/ also belongs to AWS's control plane (control_operation.py).
"""

from __future__ import annotations

import re

from torchmoor import __version__
from torchmoor.errors import ApiError
from torchmoor.proxy.api.container import ContainerApi
from torchmoor.proxy.api.dialect import Explain
from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.api.operation import map_operations
from torchmoor.proxy.api.other_services import find_service, refuse_unknown
from torchmoor.proxy.api.passthrough import PassThroughDialect, explain
from torchmoor.proxy.api.replies import LOOKING, Handler, error_reply, gateway_status, json_reply
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.answer import Answer
from torchmoor.proxy.http.field_names import CONTENT_TYPE, ERROR_CODE, REQUEST_ID
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.wire import headers

HEALTH = b"/health"
ROOT = b"/"
_INFO = b"/info"
_UNHEALTHY = {"error": "unhealthy", "error_type": "healthcheck"}
_ROUTES = {"Generate": headers.GENERATE, "GenerateStream": headers.GENERATE_STREAM}
_OVERLOADED = frozenset((429, 503, 507))
_JSON = re.compile(rb"application/json[ \t]*(?:;|$)", re.IGNORECASE)
_SERVICES = ("", "sagemaker")  # for which requests to / may be signed


class TgiApi:
    """Finds the handler of a route."""

    def __init__(self, dispatchers: Dispatchers, container: ContainerApi) -> None:
        self._container = container
        dialects = {ROOT: RootDialect(), **{b"/" + r.encode(): RouteDialect(name, r) for name, r in _ROUTES.items()}}
        self._generating = {path: map_operations(dispatchers, dialect) for path, dialect in dialects.items()}

    def find_handler(self, method: bytes, path: bytes) -> Handler | None:
        if method == b"POST" and path != ROOT and path in self._generating:
            return self._generate
        if method in LOOKING and path == HEALTH:
            return self._health
        return self._describe if method in LOOKING and path == _INFO else None

    def answer_root(self, request: Request, request_id: bytes) -> Invocation | Reply:
        """Answer a POST to / that names no operation of AWS's control plane.

        JSON is answered as at /invocations, unless it is signed for another service. AWS's protocols have other types
        of content on this path.
        """
        if _JSON.match(request.find(CONTENT_TYPE) or b"") is None or find_service(request) not in _SERVICES:
            return refuse_unknown(request, request_id)
        return self._generate(request, request_id)

    def _generate(self, request: Request, request_id: bytes) -> Invocation | Reply:
        operations = self._generating[request.path]
        return self._container.begin(request, request_id, operations, _error_reply)

    def _health(self, request: Request, request_id: bytes) -> Reply:
        """Answer as to a ping, but with TGI's error object while nothing is ready."""
        reply = self._container.ping(request, request_id)
        return reply if reply.status == 200 else json_reply(reply.status, _UNHEALTHY)

    def _describe(self, request: Request, request_id: bytes) -> Reply:
        """Answer with the facts about the endpoint that the proxy knows; TGI's other fields are left out."""
        try:
            endpoint = self._container.get_endpoint(request)
        except ApiError as error:
            return _error_reply(error, request_id)
        return json_reply(200, {"model_id": endpoint.name, "router": "torchmoor", "version": __version__})


class RootDialect(PassThroughDialect):
    """Answers are forwarded unchanged; every error becomes TGI's error object."""

    def error(self, error: ApiError, request_id: bytes, endpoint: Endpoint) -> Reply:
        return _error_reply(error, request_id)

    def answer(self, head: AnswerHead, request_id: bytes) -> Answer | Explain:
        return _explain if head.status >= 300 else super().answer(head, request_id)


class RouteDialect(RootDialect):
    """The same, for a route that the instance must know."""

    names_sessions_in_body = False

    def __init__(self, operation_name: str, route: str) -> None:
        self.operation_name = operation_name
        self._line = f"{headers.TGI_ROUTE}: {route}\r\n".encode()

    def added_lines(self, request: Request) -> bytes:
        return self._line


def _explain(head: AnswerHead, body: bytes) -> ApiError:
    error = explain(head, body)
    error.kind = (head.find(ERROR_CODE) or error.kind.encode()).decode("latin-1")
    return error


def _error_reply(error: ApiError, request_id: bytes) -> Reply:
    """Render an error with the type by which TGI's clients choose their exceptions. A time-out has HTTP's status."""
    status = gateway_status(error)
    kind = "overloaded" if status in _OVERLOADED else "validation" if status < 500 else "generation"
    fields = ((ERROR_CODE, error.kind.encode()), (REQUEST_ID, request_id))
    return error_reply(error, {"error": error.message, "error_type": kind}, fields, status=status)
