"""What can go wrong between a client and an endpoint.

CallFailed
|-- EndpointError            the endpoint refused the call, or could not be reached
|   |-- EndpointUnreachable      nobody answers there
|   `-- CredentialsRefused       it asks for others
|-- AdminError               the same of the admin plane
|   |-- AdminUnreachable
|   `-- AdminRefused
|-- StreamError              an answer broke off; `received` is its text up to there
|   |-- ModelStreamError     the endpoint ended the stream: the model or its instance failed
|   |-- ErrorInStream        the model's server wrote an error where text was due
|   |-- StreamCut            the bytes ended before the answer did
|   `-- UnreadableStream     the bytes are no stream of a known form
|-- SessionMismatch          the messages are not the conversation that the session has had
`-- AsyncInferenceError      of an asynchronous request, which `output_location` names
    |-- AsyncInferenceFailed     the failure object came instead of a result
    |-- AsyncInferenceTimedOut   neither came in time
    `-- EndpointAsleep           the endpoint has no instance yet; the request is waiting there, and wakes it
"""

from __future__ import annotations

from torchmoor.errors import TorchmoorError


class CallFailed(TorchmoorError):
    """A call of an endpoint did not give an answer; the message says why."""


class EndpointError(CallFailed):
    """code: boto3's name of the error, such as ValidationError. status: the model's own, if it was the model."""

    def __init__(self, message: str, *, code: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class EndpointUnreachable(EndpointError):
    """There was no answer at all."""


class CredentialsRefused(EndpointError):
    """The endpoint wants credentials, or does not take these."""


class AdminError(CallFailed):
    """The admin plane does not do what it was asked; the message says why."""


class AdminUnreachable(AdminError):
    """There was no answer at all."""


class AdminRefused(AdminError):
    """It wants its token, or does not take requests that come this way."""


class StreamError(CallFailed):
    """The answer is not complete. `received` is filled in by whoever reads the stream."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.received = ""


class ModelStreamError(StreamError):
    """code: ModelStreamError or InternalStreamFailure. error_code: ModelInvocationTimeExceeded or StreamBroken."""

    def __init__(self, message: str, *, code: str, error_code: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.error_code = error_code


class ErrorInStream(StreamError):
    """kind: the server's own word, such as validation or overloaded. status: as HTTP would have it."""

    def __init__(self, message: str, *, kind: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


class StreamCut(StreamError):
    """The connection was lost, or the stream ended without saying that the answer is complete."""


class UnreadableStream(StreamError):
    """The bytes are no stream of Text Generation Inference, LMI or OpenAI's chat completions."""


class SessionMismatch(CallFailed):
    """A session was asked to go on with a conversation that it has not had."""


class AsyncInferenceError(CallFailed):
    """Where the answer was to be, and under which id."""

    def __init__(self, message: str, *, inference_id: str, output_location: str) -> None:
        super().__init__(message)
        self.inference_id = inference_id
        self.output_location = output_location


class AsyncInferenceFailed(AsyncInferenceError):
    """The model failed, or the request was given up; the message is that of the failure object."""


class AsyncInferenceTimedOut(AsyncInferenceError):
    """The request may still be answered; its result will be at `output_location`."""


class EndpointAsleep(AsyncInferenceError):
    """The caller did not want to wait for the endpoint's start."""
