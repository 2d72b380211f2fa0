"""The open inference protocol (V2), for the models of the first endpoint with many.

GET  /v2, /v2/health/live, /v2/health/ready
GET  /v2/models/{model}, /v2/models/{model}/ready
POST /v2/models/{model}/infer

After the model's name, /versions/{version} may name the version that its metadata has; others are refused.
A model's name is the same as in TargetModel, and may have slashes. A request about a model goes to an instance that
holds it, or else to one that loads it.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from torchmoor import __version__
from torchmoor.errors import ApiError, ValidationError
from torchmoor.proxy.api.begin_invocation import begin_invocation
from torchmoor.proxy.api.dialect import NOT_FOR_CLIENTS, ApiDialect, Explain
from torchmoor.proxy.api.invocation import Invocation
from torchmoor.proxy.api.operation import Operation, map_operations
from torchmoor.proxy.api.other_services import refuse_unknown
from torchmoor.proxy.api.passthrough import REQUEST_ID_LINE, explain
from torchmoor.proxy.api.replies import LOOKING, Handler, error_reply, gateway_status, json_reply, unknown_operation
from torchmoor.proxy.api.runtime_members import MEMBERS, TARGET_MODEL
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.answer import Answer
from torchmoor.proxy.http.field_names import ERROR_CODE, REQUEST_ID
from torchmoor.proxy.http.message import AnswerHead, Reply, Request
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.wire import headers, operations

_ROOT = b"/v2"
_LIVE, _READY = b"/v2/health/live", b"/v2/health/ready"
_MODEL = re.compile(r"/v2/models/(?P<name>.+?)(?:/versions/(?P<version>[^/]+))?(?:/(?P<verb>infer|ready))?")
_DROPPED_FIELDS = NOT_FOR_CLIENTS | {ERROR_CODE}
_QUESTIONS = {"": operations.METADATA, "ready": operations.READY}


class OpenInferenceApi:
    """Reads the path of a request and makes its call."""

    open_paths = (_LIVE, _READY)  # for load balancers, which have no credentials

    def __init__(self, dispatchers: Dispatchers) -> None:
        self._dispatchers = dispatchers
        self._registry = dispatchers.registry
        self._operations = map_operations(dispatchers, OpenInferenceDialect())

    def find_handler(self, method: bytes, path: bytes) -> Handler | None:
        return self._handle if path == _ROOT or path.startswith(_ROOT + b"/") else None

    def _handle(self, request: Request, request_id: bytes) -> Invocation | Reply:
        """Answer for the first endpoint with many models; without one, the request is unknown."""
        is_looking = request.method in LOOKING
        is_open = is_looking and request.path in self.open_paths
        try:
            endpoints = self._registry.endpoints() if is_open else self._dispatchers.get_endpoints(request)
            endpoint = next((each for each in endpoints if each.settings.has_many), None)
            if endpoint is None:
                return refuse_unknown(request, request_id)
            if is_looking and request.path == _ROOT:
                extensions = ["binary_tensor_data"]
                return json_reply(200, {"name": "torchmoor", "version": __version__, "extensions": extensions})
            if is_looking and request.path == _LIVE:
                return json_reply(200, {"live": True})
            if is_looking and request.path == _READY:
                is_ready = endpoint.can_serve()
                return json_reply(200 if is_ready else 503, {"ready": is_ready})
            return self._ask(request, request_id, self._operations[endpoint])
        except ApiError as error:
            return _error_reply(error, request_id)

    def _ask(self, request: Request, request_id: bytes, operation: Operation) -> Invocation:
        """Make the call for a request about a model. Raises ApiError."""
        found = _find_model(request)
        if found is None or request.method != (b"POST" if found["verb"] == "infer" else b"GET"):
            raise unknown_operation(request)
        return begin_invocation(operation, request, request_id, model=found["name"])


class OpenInferenceDialect(ApiDialect):
    """Answers are forwarded unchanged; every error becomes the protocol's error object."""

    operation_name = "ModelInfer"
    names_sessions_in_header = False
    names_sessions_in_body = False
    has_stream_deadlines = False
    held_back = frozenset((TARGET_MODEL,))

    def check(self, request: Request, request_id: bytes, endpoint: Endpoint) -> None:
        """Refuse a path with a version or a name that no model can have."""
        found = _find_model(request)
        assert found is not None
        if found["version"] and not re.fullmatch("[0-9]{1,20}", found["version"]):
            raise ValidationError("A model's version must be a number, as in the model's metadata.")
        problem = MEMBERS[TARGET_MODEL].find_problem(found["name"].encode("latin-1"))
        if problem is not None:
            raise ValidationError(problem)

    def added_lines(self, request: Request) -> bytes:
        """Render the path's model and version, and the question that the request asks about the model."""
        found = _find_model(request)
        assert found is not None
        question = _QUESTIONS.get(found["verb"] or "")
        asks = b"" if question is None else f"{headers.MODEL_QUESTION}: {question}\r\n".encode()
        version = found["version"]
        names = b"" if version is None else f"{headers.MODEL_VERSION}: {version}\r\n".encode()
        return b"%b: %b\r\n%b%b" % (TARGET_MODEL, found["name"].encode("latin-1"), names, asks)

    def error(self, error: ApiError, request_id: bytes, endpoint: Endpoint) -> Reply:
        return _error_reply(error, request_id)

    def answer(self, head: AnswerHead, request_id: bytes) -> Answer | Explain:
        if head.status >= 300:
            return explain
        lines = head.lines(_DROPPED_FIELDS)
        return Answer((head.line.client_line, lines, REQUEST_ID_LINE, request_id, b"\r\n"))


def _find_model(request: Request) -> re.Match[str] | None:
    return _MODEL.fullmatch(unquote(request.path.decode("latin-1"), "latin-1"))


def _error_reply(error: ApiError, request_id: bytes) -> Reply:
    """Render {"error": message}. A time-out has HTTP's own status."""
    return error_reply(error, {"error": error.message}, ((REQUEST_ID, request_id),), status=gateway_status(error))
