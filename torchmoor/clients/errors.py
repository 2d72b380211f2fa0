"""Errors between a client and an endpoint.

CallFailed
|-- EndpointError            the endpoint refused the call, or could not be reached
|   |-- EndpointUnreachable      no answer from its address
|   `-- CredentialsRefused       the endpoint needs other credentials
|-- AdminError               the admin plane refused the call, or failed
|   |-- AdminUnreachable
|   |   `-- AdminUntrusted       its TLS certificate is refused
|   `-- AdminRefused
|-- StreamError              an answer broke off; `received` is the text before that
|   |-- ModelStreamError     the endpoint ended the stream: the model or its instance failed
|   |-- ErrorInStream        the model's server sent an error instead of text
|   |-- StreamCut            the bytes ended before the answer did
|   `-- UnreadableStream     the bytes are not a stream of a known dialect
|-- SessionMismatch          the messages are not the conversation that the session has had
`-- AsyncInferenceError      an asynchronous request failed; its result would be at `output_location`
    |-- AsyncInferenceFailed     the failure object came instead of a result
    |-- AsyncInferenceTimedOut   neither came in time
    `-- EndpointAsleep           the endpoint has no instance yet; the request waits there and starts one
"""

from __future__ import annotations


class CallFailed(Exception):
    """Raised if a call of an endpoint returns no answer; the message has the reason."""


class EndpointError(CallFailed):
    """The endpoint refused a call.

    code: boto3's name of the error, such as ValidationError. status: the model's HTTP status, if the model failed.
    """

    def __init__(self, message: str, *, code: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class EndpointUnreachable(EndpointError):
    """The endpoint did not answer."""


class CredentialsRefused(EndpointError):
    """The endpoint needs credentials, or refused these."""


class AdminError(CallFailed):
    """Raised if the admin plane refuses or fails; the message has the reason."""


class AdminUnreachable(AdminError):
    """The admin plane did not answer."""


class AdminUntrusted(AdminUnreachable):
    """The admin plane's TLS certificate is refused."""


class AdminRefused(AdminError):
    """The admin plane needs its token, or refuses requests from this address."""


class StreamError(CallFailed):
    """The answer is not complete. The reader of the stream sets `received`."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.received = ""


class ModelStreamError(StreamError):
    """The endpoint ended the stream.

    code: ModelStreamError or InternalStreamFailure. error_code: ModelInvocationTimeExceeded or StreamBroken.
    """

    def __init__(self, message: str, *, code: str, error_code: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.error_code = error_code


class ErrorInStream(StreamError):
    """The server sent an error within the stream.

    kind: the server's name of the error, such as validation or overloaded. status: its HTTP status.
    """

    def __init__(self, message: str, *, kind: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


class StreamCut(StreamError):
    """The connection was lost, or the stream ended before the answer was complete."""


class UnreadableStream(StreamError):
    """The bytes are not a stream of Text Generation Inference, LMI or OpenAI's chat completions."""


class SessionMismatch(CallFailed):
    """The messages differ from the session's conversation."""


class AsyncInferenceError(CallFailed):
    """An asynchronous request has no result."""

    def __init__(self, message: str, *, inference_id: str, output_location: str) -> None:
        super().__init__(message)
        self.inference_id = inference_id
        self.output_location = output_location


class AsyncInferenceFailed(AsyncInferenceError):
    """The model failed, or the request was abandoned; the message is the failure object's."""


class AsyncInferenceTimedOut(AsyncInferenceError):
    """The request may still be answered; its result will be at `output_location`."""


class EndpointAsleep(AsyncInferenceError):
    """The endpoint has no instance, and the caller does not wait for its start."""
