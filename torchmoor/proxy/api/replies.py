"""Replies for errors: in the form of the runtime API, and in the form of containers."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus

from torchmoor.errors import (
    AccessDenied,
    ApiError,
    InternalFailure,
    ModelError,
    ServiceUnavailable,
    UnknownOperation,
    ValidationError,
)
from torchmoor.proxy.http.call import Call
from torchmoor.proxy.http.field_names import AWS_REQUEST_ID, CONTENT_TYPE, ERROR_CODE, REQUEST_ID
from torchmoor.proxy.http.message import Reply, Request

Handler = Callable[[Request, bytes], Call | Reply]
"""Serves a request, which has an id; chosen by method and path only."""

LOOKING = frozenset((b"GET", b"HEAD"))

JSON = (CONTENT_TYPE, b"application/json")


def json_reply(status: int, content: object, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Reply:
    """Render a body of JSON."""
    return Reply(status, (JSON, *headers), json.dumps(content).encode())


def error_reply(
    error: ApiError, content: object, headers: tuple[tuple[bytes, bytes], ...], *, status: int | None = None
) -> Reply:
    """Render an error in the form of any dialect, with the header lines that all errors have. status: if another."""
    if error.retry_after_s is not None:
        headers = (*headers, (b"retry-after", b"%d" % error.retry_after_s))
    return json_reply(status or error.status, content, headers)


def gateway_status(error: ApiError) -> int:
    """Return an error's status in a dialect without an error for time-outs: 504 for a time-out, as of a gateway."""
    return HTTPStatus.GATEWAY_TIMEOUT.value if isinstance(error, ModelError) else error.status


def runtime_error(error: ApiError, request_id: bytes) -> Reply:
    """Render an error that boto3 raises as the exception named by `error.kind`."""
    headers = ((b"x-amzn-errortype", error.kind.encode()), (AWS_REQUEST_ID, request_id))
    if isinstance(error, AccessDenied):  # so spelled by AWS's front end, which denies access
        return error_reply(error, {"message": error.message}, headers)
    body: dict[str, object] = {"Message": error.message}
    if isinstance(error, ModelError):
        body["OriginalStatusCode"] = error.original_status
        body["OriginalMessage"] = error.original_message
        body["LogStreamArn"] = error.log_stream_arn
    return error_reply(error, body, headers)


def container_error(error: ApiError, request_id: bytes) -> Reply:
    """Render an error in the handlers' form, for dialects in which handlers' errors pass unchanged."""
    body = {"error": {"code": error.kind, "message": error.message}}
    headers = ((ERROR_CODE, error.kind.encode()), (REQUEST_ID, request_id))
    return error_reply(error, body, headers, status=gateway_status(error))


def message_of(body: bytes) -> str:
    """Return the message in an instance's error body: the handler's or TorchServe's form, else the text itself."""
    text = body.decode("utf-8", "replace")
    try:
        content = json.loads(text)
        return str(content["error"]["message"] if "error" in content else content["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text or "The instance could not take the request."


def unknown_operation(request: Request) -> UnknownOperation:
    """Make the error for an unknown method and path."""
    return UnknownOperation(f"No operation {request.method.decode()} {request.path.decode('latin-1')[:256]}.")


def refusal(status: int, message: str, request_id: bytes) -> Reply:
    """Answer bytes that are not a valid request, with HTTP's status and the runtime API's body."""
    kind = ValidationError if status < 500 else ServiceUnavailable if status == 503 else InternalFailure
    return runtime_error(kind(message, status=status), request_id)
