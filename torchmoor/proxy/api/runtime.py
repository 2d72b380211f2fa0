"""The SageMaker runtime API and DescribeEndpoint: their paths and operations.

POST /endpoints/{EndpointName}/invocations
POST /endpoints/{EndpointName}/invocations-response-stream
POST /endpoints/{EndpointName}/async-invocations     (torchmoor.proxy.api.async_runtime)
GET  /endpoints/{EndpointName}                       (torchmoor.proxy.api.describe)
"""

from __future__ import annotations

from torchmoor.async_inference.service import AsyncInference
from torchmoor.config.limits import LimitSettings
from torchmoor.errors import (
    ApiError,
    BodyTooLarge,
    MissingTargetModel,
    ModelError,
    ModelNotReady,
    ServiceUnavailable,
    Throttled,
    UnexpectedTargetModel,
    ValidationError,
)
from torchmoor.proxy.api.async_runtime import AsyncOperation
from torchmoor.proxy.api.begin_invocation import begin_invocation
from torchmoor.proxy.api.describe import describe_endpoint
from torchmoor.proxy.api.dialect import NOT_FOR_CLIENTS, ApiDialect, Explain
from torchmoor.proxy.api.operation import Operation
from torchmoor.proxy.api.other_services import refuse_unknown
from torchmoor.proxy.api.replies import LOOKING, Handler, message_of, runtime_error, unknown_operation
from torchmoor.proxy.api.runtime_members import (
    ENDPOINT_NAME,
    NOT_THERE,
    SAGEMAKER_ACCEPT,
    SAGEMAKER_CONTENT_TYPE,
    TARGET_MODEL,
    not_there,
)
from torchmoor.proxy.api.stream_encoders import EventPartEncoder, PartEncoder, TextPartEncoder, TextPassEncoder
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http import eventstream
from torchmoor.proxy.http.answer import Answer
from torchmoor.proxy.http.call import Call
from torchmoor.proxy.http.field_names import (
    ACCEPT,
    AWS_REQUEST_ID,
    CONTENT_TYPE,
    ERROR_CODE,
    NEW_SESSION_ID,
    OPENAI_REQUEST_ID,
    SESSION_ID,
)
from torchmoor.proxy.http.message import AnswerHead, Reply, Request, status_line
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.wire import error_codes

PREFIX = b"/endpoints/"

_WHOLE = b"invocations"
_STREAMED = b"invocations-response-stream"
_ASYNC = b"async-invocations"
_OPERATIONS = (_WHOLE, _STREAMED, _ASYNC)
DEFAULT_REGION = "us-east-1"  # if access.region is empty
DROPPED_FIELDS = NOT_FOR_CLIENTS | {OPENAI_REQUEST_ID, AWS_REQUEST_ID, SESSION_ID, NEW_SESSION_ID, ERROR_CODE}
_REQUEST_ID_START = AWS_REQUEST_ID + b": "
_DROPPED_FROM_STREAM = DROPPED_FIELDS | {CONTENT_TYPE}
_OK = status_line(200)
_STREAM_TYPE_LINE = b"content-type: %b\r\n" % eventstream.CONTENT_TYPE


class RuntimeApi:
    """Finds the operation of the runtime API that a request is for."""

    def __init__(self, dispatchers: Dispatchers, service: AsyncInference | None) -> None:
        """service: None if no endpoint takes asynchronous requests."""
        self._dispatchers = dispatchers
        self._service = service
        region = dispatchers.settings.access.region or DEFAULT_REGION
        self._log_groups = (
            f"arn:aws:logs:{region}:{dispatchers.settings.account_id}:log-group:/aws/sagemaker/Endpoints/"
        )
        self._operations = dispatchers.registry.map_served(self._make_operations)

    def _make_operations(self, endpoint: Endpoint) -> dict[bytes, Operation | AsyncOperation]:
        dispatchers, service = self._dispatchers, self._service
        operations: dict[bytes, Operation | AsyncOperation] = {
            _WHOLE: Operation(dispatchers, endpoint, RuntimeDialect(self._log_groups)),
            _STREAMED: Operation(dispatchers, endpoint, StreamDialect(self._log_groups)),
        }
        if service is not None and endpoint.name in service.endpoints:
            operations[_ASYNC] = AsyncOperation(dispatchers, endpoint, service)
        return operations

    def get_invoke(self, endpoint: Endpoint) -> Operation:
        """Return the InvokeEndpoint of an endpoint that is served."""
        operation = self._operations[endpoint][_WHOLE]
        assert isinstance(operation, Operation)
        return operation

    def find_handler(self, method: bytes, path: bytes) -> Handler | None:
        if not path.startswith(PREFIX):
            return None
        if method in LOOKING and b"/" not in path[len(PREFIX) :]:
            return self._describe
        return self._invoke if method == b"POST" else self._refuse_method

    def _invoke(self, request: Request, request_id: bytes) -> Call | Reply:
        """Pass a request to its endpoint's operation; refuse it if there is none."""
        name, _, operation_name = request.path[len(PREFIX) :].partition(b"/")
        if operation_name not in _OPERATIONS:
            return refuse_unknown(request, request_id)
        try:
            endpoint = self._get_endpoint(request, name)
            operation = self._operations[endpoint].get(operation_name)
            if isinstance(operation, Operation):
                return begin_invocation(operation, request, request_id)
            if operation is None:
                raise ValidationError(
                    f"Endpoint {endpoint.name} is not an asynchronous endpoint: its EndpointConfig has no "
                    "AsyncInferenceConfig."
                )
            return operation.invoke(request, request_id)
        except ApiError as error:
            return runtime_error(_as_aws_says(error, request_id), request_id)

    def _describe(self, request: Request, request_id: bytes) -> Reply:
        try:
            return describe_endpoint(self._get_endpoint(request, request.path[len(PREFIX) :]))
        except ApiError as error:
            return runtime_error(error, request_id)

    def _get_endpoint(self, request: Request, name: bytes) -> Endpoint:
        """Return the endpoint that a path names. Raises ApiError."""
        ENDPOINT_NAME.check(name)
        [endpoint] = self._dispatchers.get_endpoints(request, name.decode("ascii"))
        return endpoint

    def _refuse_method(self, request: Request, request_id: bytes) -> Reply:
        """Refuse a request with another method than POST, and count it if its path is an endpoint's."""
        error = unknown_operation(request)
        name, _, operation_name = request.path[len(PREFIX) :].partition(b"/")
        endpoint = self._dispatchers.registry.find_endpoint(name.decode("latin-1"))
        if endpoint is not None and operation_name in (_WHOLE, _STREAMED):
            self._dispatchers.count_without_invocation(endpoint, error.status)
        return runtime_error(error, request_id)


def invoke_path(endpoint: Endpoint) -> bytes:
    """Return the path of an endpoint's InvokeEndpoint."""
    return b"%b%b/%b" % (PREFIX, endpoint.name.encode(), _WHOLE)


class RuntimeDialect(ApiDialect):
    """InvokeEndpoint: a success is forwarded unchanged, an error is rendered in the API's form."""

    operation_name = "InvokeEndpoint"
    names_variant = True
    has_stream_deadlines = False

    def __init__(self, log_groups: str) -> None:
        """log_groups: the ARN of the endpoints' log groups, without an endpoint's name."""
        self._log_groups = log_groups

    @staticmethod
    def max_body_bytes(limits: LimitSettings) -> int:
        return limits.max_body_bytes

    def check(self, request: Request, request_id: bytes, endpoint: Endpoint) -> None:
        places = request.layout.places
        if not NOT_THERE.keys().isdisjoint(places):
            raise not_there(endpoint.name, places)
        if TARGET_MODEL not in places:
            if endpoint.settings.has_many:
                raise MissingTargetModel(endpoint.name, request_id.decode())
        elif endpoint.settings.multi_model is None:
            raise UnexpectedTargetModel(endpoint.name)

    def error(self, error: ApiError, request_id: bytes, endpoint: Endpoint) -> Reply:
        if isinstance(error, ModelError):
            error.log_stream_arn = self._log_groups + endpoint.name
        return runtime_error(_as_aws_says(error, request_id), request_id)

    def answer(self, head: AnswerHead, request_id: bytes) -> Answer | Explain:
        """Render a success with the API's headers."""
        if head.status >= 300:
            return _explain
        is_text_stream = head.layout.length is None and _is_of_type(head, b"text/plain")
        lines = answer_lines(head.line.client_line, head, DROPPED_FIELDS, request_id)
        return Answer(lines, TextPassEncoder() if is_text_stream else None)


class StreamDialect(RuntimeDialect):
    """InvokeEndpointWithResponseStream: the answer's pieces become event-stream frames.

    The request's Accept is for the event stream; another header has the type that the model is asked for.
    """

    operation_name = "InvokeEndpointWithResponseStream"
    has_stream_deadlines = True
    held_back = frozenset((ACCEPT, SAGEMAKER_ACCEPT))

    def is_stream(self, head: AnswerHead) -> bool:
        return True

    def added_lines(self, request: Request) -> bytes:
        """Render the Accept for the model."""
        accept = request.find(SAGEMAKER_ACCEPT)
        return b"" if accept is None else b"accept: %b\r\n" % accept

    def answer(self, head: AnswerHead, request_id: bytes) -> Answer | Explain:
        """Render a success as an event stream, whether the instance streams or not."""
        if head.status >= 300:
            return _explain
        content_type = head.find(CONTENT_TYPE) or b"application/octet-stream"
        status = head.line.client_line if head.line.is_bodiless else _OK  # a client would wait for the body of a 200
        lines = (
            *answer_lines(status, head, _DROPPED_FROM_STREAM, request_id),
            b"%b%b: %b\r\n" % (_STREAM_TYPE_LINE, SAGEMAKER_CONTENT_TYPE, content_type),
        )
        return Answer(lines, _part_encoder(head))


def _as_aws_says(error: ApiError, request_id: bytes) -> ApiError:
    """Put AWS's sentence for a body over the limit before the error's message."""
    if not isinstance(error, BodyTooLarge):
        return error
    return ValidationError(f"Request {request_id.decode()} has oversize body. {error.message}")


def answer_lines(
    status_line: bytes, head: AnswerHead, dropped: frozenset[bytes], request_id: bytes
) -> tuple[bytes, ...]:
    """Render the answer's head in this API's form. dropped: names of fields that are not forwarded."""
    places = head.layout.places
    session_line = b""
    if NEW_SESSION_ID in places or SESSION_ID in places:
        session = head.find(NEW_SESSION_ID) or head.find(SESSION_ID) or b""
        # Some handlers repeat the id of an open session as SESSION_ID, without its expiry.
        if NEW_SESSION_ID in places or b";" in session:
            session_line = b"%b: %b\r\n" % (NEW_SESSION_ID, session)
    return (
        status_line,
        head.lines(dropped),
        session_line,
        _REQUEST_ID_START,
        request_id,
        b"\r\n",
    )


def _part_encoder(head: AnswerHead) -> PartEncoder:
    if _is_of_type(head, b"text/plain"):
        return TextPartEncoder()
    return EventPartEncoder() if _is_of_type(head, b"text/event-stream") else PartEncoder()


def _is_of_type(head: AnswerHead, content_type: bytes) -> bool:
    return (head.find(CONTENT_TYPE) or b"").lower().startswith(content_type)


def _explain(head: AnswerHead, body: bytes) -> ApiError:
    """Translate a refusal by the handler's code; by status only for TorchServe's own refusals."""
    status, code = head.status, (head.find(ERROR_CODE) or b"").decode("latin-1")
    retry_after_s = head.retry_after_s
    if code in error_codes.REQUEST_AT_FAULT:
        return ValidationError(message_of(body))
    if code in error_codes.CALLER_AT_LIMIT:
        return Throttled(message_of(body), retry_after_s=retry_after_s)
    if code == error_codes.MODEL_LOADING:
        return ModelNotReady(message_of(body), retry_after_s=retry_after_s)
    if code in error_codes.REFUSED_FOR_NOW or (not code and status in error_codes.TORCHSERVE_BUSY):
        return ServiceUnavailable(message_of(body), retry_after_s=retry_after_s)
    if not code and status == 413:
        return ValidationError("The request body is longer than the model's limit.")
    return ModelError(status, body.decode("utf-8", "replace"))
