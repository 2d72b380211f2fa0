"""The SageMaker runtime API: InvokeEndpoint and InvokeEndpointWithResponseStream.

POST /endpoints/{EndpointName}/invocations
POST /endpoints/{EndpointName}/invocations-response-stream
"""

from __future__ import annotations

import json
from time import monotonic

from torchmoor.api.gateway import Gateway
from torchmoor.api.invocation import (
    ERROR_HEADER,
    REFUSED_FOR_NOW,
    TORCHSERVE_BUSY,
    Invocation,
    Operation,
    body_too_large,
    find_field,
)
from torchmoor.api.replies import runtime_error
from torchmoor.api.streaming import PartEncoder, TextPartEncoder
from torchmoor.api.validation import (
    ENDPOINT_NAME,
    SAGEMAKER_ACCEPT,
    SESSION_ID,
    TARGET_MODEL,
    TARGET_VARIANT,
    read_members,
)
from torchmoor.errors import ApiError, ModelError, ServiceUnavailable, UnknownOperation, ValidationError
from torchmoor.http import eventstream
from torchmoor.http.call import Answer, Deadlines
from torchmoor.http.fields import Field, Headers
from torchmoor.http.message import Reply, Request, status_line

PREFIX = b"/endpoints/"

_WHOLE = b"invocations"
_STREAMED = b"invocations-response-stream"
_OPERATIONS = (_WHOLE, _STREAMED, b"async-invocations")
_SESSION_CODES = ("SessionUnknown", "SessionExpired", "SessionClosed", "SessionLost", "SessionIdMismatch")
_NEW_SESSION_ID = b"x-amzn-sagemaker-new-session-id"
_UNTOLD = frozenset((b"ts_stream_next", b"x-request-id", SESSION_ID, _NEW_SESSION_ID, ERROR_HEADER))


class RuntimeApi:
    """Reads a request of the runtime API and makes its invocation."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        timeouts = gateway.settings.timeouts
        self._max_body_bytes = gateway.settings.limits.max_body_bytes
        whole = Deadlines(timeouts.model_timeout_s, timeouts.model_timeout_s)
        streamed = Deadlines(timeouts.model_timeout_s, timeouts.stream_total_timeout_s, timeouts.stream_idle_timeout_s)
        self._operations: dict[bytes, Operation] = {}
        self._streams: set[Operation] = set()
        for endpoint in gateway.registry.endpoints():
            path = b"%b%b/" % (PREFIX, endpoint.name.encode())
            stream = Operation(gateway, endpoint, streamed, self._max_body_bytes)
            self._operations[path + _WHOLE] = Operation(gateway, endpoint, whole, self._max_body_bytes)
            self._operations[path + _STREAMED] = stream
            self._streams.add(stream)

    def serves(self, path: bytes) -> bool:
        """True if a path is an operation of an endpoint."""
        return path in self._operations

    def handle(self, request: Request, request_id: bytes) -> Invocation | Reply:
        """The invocation for a request below /endpoints/, or why there is none."""
        operation = self._operations.get(request.path)
        try:
            if operation is None or request.method != b"POST":
                raise self._why_no_route(request)
            return self._invoke(request, request_id, operation)
        except ApiError as error:
            if operation is not None:
                metrics = self._gateway.first_dispatcher(operation.endpoint).metrics
                metrics.invocations += 1
                metrics.count_status(error.status)
            return runtime_error(error, request_id)

    def _invoke(self, request: Request, request_id: bytes, operation: Operation) -> Invocation:
        is_stream = operation in self._streams
        heard = read_members(_with_accept(request.headers) if is_stream else request.headers)
        members = heard.members
        if request.content_length is not None and request.content_length > self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)
        endpoint = operation.endpoint
        if TARGET_MODEL in members:
            raise ValidationError(f"Endpoint {endpoint.name} has one model; TargetModel is not supported.")
        session = self._gateway.get_session(endpoint, request.principal, members.get(SESSION_ID))
        dispatcher = self._gateway.dispatcher_for(endpoint, session, members.get(TARGET_VARIANT))
        kind = StreamInvocation if is_stream else RuntimeInvocation
        return kind(operation, request, heard, request_id=request_id, dispatcher=dispatcher, session=session)

    def _why_no_route(self, request: Request) -> ApiError:
        """What is wrong with a path or method that has no route."""
        name, _, operation = request.path[len(PREFIX) :].partition(b"/")
        if request.method != b"POST" or operation not in _OPERATIONS:
            return UnknownOperation(f"No operation {request.method.decode()} {request.path.decode('latin-1')[:256]}.")
        try:
            ENDPOINT_NAME.check(name)
            self._gateway.get_endpoint(name.decode("ascii"))
        except ApiError as error:
            return error
        return ValidationError(f"{operation.decode()} is not supported in this version.")


def _with_accept(headers: Headers) -> Headers:
    """The stream operation's Accept travels under another name, because Accept names the event stream."""
    if find_field(headers, SAGEMAKER_ACCEPT) is None:
        return [field for field in headers if field.name != b"accept"]
    return [
        Field(b"accept", field.value, note=field.note) if field.name == SAGEMAKER_ACCEPT else field
        for field in headers
        if field.name != b"accept"
    ]


class RuntimeInvocation(Invocation):
    """InvokeEndpoint: the answer passes through, an error is told in the API's terms."""

    operation_name = "InvokeEndpoint"
    new_session = b""  # that the answer opens
    _refused_status = 0
    _refused_code = ""
    _retry_after = b""

    def error(self, error: ApiError) -> Reply:
        """The API's error form."""
        if isinstance(error, ModelError):
            account = self.gateway.settings.account_id
            error.log_stream_arn = f"arn:aws:logs:local:{account}:log-group:/torchmoor/endpoints/{self.endpoint.name}"
        return runtime_error(error, self.request_id)

    def answer(self, status: int, reason: bytes, headers: Headers) -> Answer | None:
        """A success with the API's headers; None for the rest."""
        if status >= 300:
            self._refused_status = status
            self._refused_code = (find_field(headers, ERROR_HEADER) or b"").decode("latin-1")
            self._retry_after = find_field(headers, b"retry-after") or b""
            return None
        return Answer(self._head(status, reason, headers))

    def _head(self, status: int, reason: bytes, headers: Headers) -> bytes:
        assert self.choice is not None
        session: bytes | None = None
        lines = [status_line(status, reason)]
        for field in headers:
            name = field.name
            if name not in _UNTOLD:
                lines.append(field.line)
            elif name == _NEW_SESSION_ID or (name == SESSION_ID and session is None):
                session = field.value
        if session is not None:
            self.new_session = session
            lines.append(b"x-amzn-sagemaker-new-session-id: %b\r\n" % session)
        lines.append(b"x-amzn-requestid: %b\r\n" % self.request_id)
        lines.append(self.choice.variant_line)
        lines.append(self.choice.answer_lines)
        return b"".join(lines)

    def on_refusal(self, body: bytes) -> Reply:
        """The error that an instance's refusal is for the client: by the handler's code, never by status alone."""
        status, code = self._refused_status, self._refused_code
        text = body.decode("utf-8", "replace")
        error: ApiError
        if code in _SESSION_CODES:
            error = ValidationError(_message(text))
        elif code.encode() in REFUSED_FOR_NOW or (not code and status in TORCHSERVE_BUSY):
            retry_after_s = int(self._retry_after) if self._retry_after.isdigit() else 1
            error = ServiceUnavailable(_message(text), retry_after_s=retry_after_s)
        elif not code and status == 413:
            error = ValidationError("The request body is longer than the model's limit.")
        else:
            whose = "client" if status < 500 else "server"
            error = ModelError(
                f'Received {whose} error ({status}) from primary with message "{text}"',
                original_status=status,
                original_message=text,
            )
        return self.fail(error)


class StreamInvocation(RuntimeInvocation):
    """InvokeEndpointWithResponseStream: the answer's pieces become event-stream frames."""

    operation_name = "InvokeEndpointWithResponseStream"

    def answer(self, status: int, reason: bytes, headers: Headers) -> Answer | None:
        """A success as an event stream, whether the instance streams or not; None for the rest."""
        if status >= 300:
            return super().answer(status, reason, headers)
        content_type = find_field(headers, b"content-type") or b"application/octet-stream"
        fields = [field for field in headers if field.name != b"content-type"]
        fields.append(Field(b"content-type", eventstream.CONTENT_TYPE))
        fields.append(Field(b"x-amzn-sagemaker-content-type", content_type))
        is_text = content_type.lower().startswith(b"text/plain")
        return Answer(self._head(200, b"OK", fields), TextPartEncoder() if is_text else PartEncoder())

    def on_first_piece(self) -> None:
        """The time to the first chunk is this operation's own metric."""
        now = self.first_piece_at = monotonic()
        total, model = now - self.request.received_at, now - self.sent_at
        self.metrics.first_chunk_latency.observe(total)
        self.metrics.first_chunk_model_latency.observe(model)
        self.metrics.first_chunk_overhead_latency.observe(total - model)


def _message(text: str) -> str:
    """The message in an instance's error body: the handler's or TorchServe's form, else the text itself."""
    try:
        body = json.loads(text)
        return str(body["error"]["message"] if "error" in body else body["message"])
    except (ValueError, KeyError, TypeError):
        return text or "The instance could not take the request."
