"""Errors of the proxy, and of AWS's APIs that it serves.

TorchmoorError
|-- ConfigError          a setting is wrong; raised before anything listens
|   `-- VariableInvalid      a variable of the environment is wrong
|-- LaunchError          an instance cannot be started; the message says what to do
|-- DiscoveryError       DNS has not answered
|-- UnknownInstance      no instance of that name
|-- NotDelivered         a notification of an asynchronous request's end was not delivered
|-- ObjectError          of asynchronous inference; its tree is in async_inference/objects/object_store.py
`-- ApiError             an answer with a status and the name that AWS gives the error
    |-- UnknownOperation     404
    |   `-- UnknownControlOperation     400
    |-- ValidationError      400
    |   |-- BodyTooLarge     413; from the runtime API 400, as a ValidationError
    |   |   `-- BodyTooLargeForInstance
    |   |-- UnknownEndpoint
    |   |-- UnknownVariant
    |   |-- MissingTargetModel
    |   |-- UnexpectedTargetModel
    |   |-- InferenceIdInUse
    |   |-- ResultLocationInUse
    |   `-- WrongModel       OpenAI's `model` names no endpoint
    |       `-- UnknownModel     404
    |-- SourceRefused        403
    |-- AccessDenied         403; 401 to OpenAI's clients
    |   |-- MissingCredentials
    |   |-- UnrecognizedClient
    |   |-- IncompleteSignature
    |   `-- InvalidSignature
    |-- ModelError           424, with the model's status and message
    |-- ModelNotReady        429, with Retry-After
    |-- Throttled            429, with Retry-After
    |   `-- CallerLimited
    |-- InternalFailure      500
    |-- ServiceUnavailable   503, with Retry-After
    |   |-- QueueFull            of asynchronous requests
    |   |-- DiskFull             for their results or their queue
    |   `-- QueueUnavailable
    |-- of the control plane, all 400
    |   |-- RequestInvalid
    |   |-- LimitExceeded
    |   |-- ScalableTargetMissing
    |   `-- LogMissing
    `-- of the container's operations on models
        |-- ModelNotLoaded       404
        |-- ModelBusy            409
        `-- TooManyModels        507
"""

from __future__ import annotations

from collections.abc import Iterable

# Seconds of Retry-After.
BUSY_RETRY_S = 1  # one for a busy instance
START_RETRY_S = 5  # more for an instance that restarts, or a model that is being loaded
QUEUE_RETRY_S = 30

SHORTAGE = "The proxy has no free file descriptor, local port or memory for another connection."


class TorchmoorError(Exception):
    """Any error of this package."""


class ConfigError(TorchmoorError):
    """A setting is missing, unknown or out of range; the message names it."""


class VariableInvalid(ConfigError):
    """A variable of the environment has a wrong name or value; commands exit as for a wrong option."""


class LaunchError(TorchmoorError):
    """TorchServe cannot be started on this host; the message says what to do."""


class DiscoveryError(TorchmoorError):
    """DNS did not answer, or its answer cannot be read."""


class UnknownInstance(TorchmoorError):
    """No instance of that name is registered."""


class NotDelivered(TorchmoorError):
    """A notification was not delivered. is_permanent: a retry would be refused too."""

    def __init__(self, message: str, *, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


class ApiError(TorchmoorError):
    """An error answer: a status, the name that boto3 turns into an exception, and a message."""

    status = 500
    kind = "InternalFailure"
    retry_after_s: int | None = None

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: int | None = None) -> None:
        """status, retry_after_s: in place of the class's."""
        super().__init__(message)
        self.message = message
        if status is not None:
            self.status = status
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class UnknownOperation(ApiError):
    """Nothing is served under this path and method."""

    status = 404
    kind = "UnknownOperationException"


class UnknownControlOperation(UnknownOperation):
    """The control plane does not serve the operation, or AWS does not have it."""

    status = 400


class ValidationError(ApiError):
    """The request is wrong; a retry does not help."""

    status = 400
    kind = "ValidationError"


class BodyTooLarge(ValidationError):
    """The request's body is longer than the limit of its API, in bytes."""

    status = 413

    def __init__(self, limit: int, end: str = ".") -> None:
        super().__init__(f"The request body is longer than the limit of {limit} bytes{end}")
        self.limit = limit


class BodyTooLargeForInstance(BodyTooLarge):
    """The request's body is longer than what an instance can hold.

    num_bytes: what it can hold. weight: what each byte of the body counts as, which is above 1 for a form.
    """

    def __init__(self, num_bytes: int, weight: int) -> None:
        end = " of a form. Send JSON as application/json." if weight > 1 else "."
        super().__init__(num_bytes // weight, end)


class UnknownEndpoint(ValidationError):
    """No endpoint of that name is configured."""

    def __init__(self, name: str, account_id: str = "000000000000") -> None:
        super().__init__(f"Endpoint {name} of account {account_id} not found.")


class UnknownVariant(ValidationError):
    """The endpoint has no variant of that name. known: the names of its variants, of which AWS allows ten."""

    def __init__(self, name: str, endpoint: str, known: Iterable[str]) -> None:
        super().__init__(
            f"Variant {name} not found for endpoint {endpoint}. Variants of the endpoint: {', '.join(sorted(known))}."
        )


class MissingTargetModel(ValidationError):
    """A request to an endpoint with many models names no model."""

    def __init__(self, endpoint: str, request_id: str) -> None:
        super().__init__(
            f"Request {request_id} is missing a target model header: endpoint {endpoint} has many models, and the "
            "parameter TargetModel (X-Amzn-SageMaker-Target-Model) says which one is meant."
        )


class UnexpectedTargetModel(ValidationError):
    """A request names a model at an endpoint with one model. The message is SageMaker's."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(f"Endpoint {endpoint} is not a multi-model endpoint and does not support target model header.")


class InferenceIdInUse(ValidationError):
    """Another asynchronous request has this inference id, and thus the same object names."""

    def __init__(self, inference_id: str) -> None:
        super().__init__(f"InferenceId {inference_id} is in use by another request; choose one that is unique.")


class ResultLocationInUse(ValidationError):
    """The result of an asynchronous request would replace or block another object."""

    def __init__(self) -> None:
        super().__init__(
            "The result's or the failure's location is an existing object, belongs to another request, or is a folder "
            "of such a location; choose another Filename, S3OutputPathExtension or InferenceId."
        )


class WrongModel(ValidationError):
    """An OpenAI request's `model` is missing, or cannot be the name of an endpoint."""


class UnknownModel(WrongModel):
    """Nothing that is served has the name in `model`."""

    status = 404
    kind = "model_not_found"  # OpenAI's name, which some clients check


class AccessDenied(ApiError):
    """The caller may not use the data plane. The subclasses have AWS' names of the reasons."""

    status = 403
    kind = "AccessDeniedException"


class SourceRefused(ApiError):
    """A web page of another site may have sent the request, or its Host is not a name of the server."""

    status = 403
    kind = "AccessDeniedException"


class MissingCredentials(AccessDenied):
    """The request has neither a signature nor a token."""

    kind = "MissingAuthenticationTokenException"

    def __init__(self) -> None:
        super().__init__(
            "Missing Authentication Token: sign the request (AWS Signature Version 4), or send a bearer token."
        )


class UnrecognizedClient(AccessDenied):
    """The key or token is not configured. The message does not say which one, nor which part is wrong."""

    kind = "UnrecognizedClientException"

    def __init__(self) -> None:
        super().__init__("The security token included in the request is invalid.")


class IncompleteSignature(AccessDenied):
    """The signature is not in the form of Signature Version 4."""

    kind = "IncompleteSignatureException"


class InvalidSignature(AccessDenied):
    """The signature is expired, of another service, or not made with the key's secret."""

    kind = "InvalidSignatureException"


class ModelError(ApiError):
    """The model answered with an error, or not in time."""

    status = 424
    kind = "ModelError"

    def __init__(self, original_status: int, original_message: str) -> None:
        """original_status: the model's; 0 if it did not answer."""
        whose = "client" if 0 < original_status < 500 else "server"
        super().__init__(f'Received {whose} error ({original_status}) from primary with message "{original_message}"')
        self.original_status = original_status
        self.original_message = original_message
        self.log_stream_arn = ""


class ModelNotReady(ApiError):
    """The target model is still loading."""

    status = 429
    kind = "ModelNotReadyException"
    retry_after_s = START_RETRY_S


class Throttled(ApiError):
    """The caller has reached a limit for one caller."""

    status = 429
    kind = "ThrottlingException"  # AWS's name; boto3 tries again in each of its retry modes
    retry_after_s = BUSY_RETRY_S


class CallerLimited(Throttled):
    """The caller has reached a limit that the proxy counts. setting: of the group `callers`."""

    def __init__(
        self, used: str, setting: str, limit: int, *, retry_after_s: int = BUSY_RETRY_S, remedy: str = ""
    ) -> None:
        """used: the caller's current use, such as "512 requests in flight". remedy: how to reduce it."""
        advice = f"{remedy}, or try" if remedy else "Try"
        super().__init__(
            f"The caller has {used}, and callers.{setting} is {limit}. {advice} again in {retry_after_s} s.",
            retry_after_s=retry_after_s,
        )
        self.setting = setting


class InternalFailure(ApiError):
    """The proxy itself failed; the message has only the request id, no details."""


class ServiceUnavailable(ApiError):
    """No instance can take the request now."""

    status = 503
    kind = "ServiceUnavailable"
    retry_after_s = BUSY_RETRY_S


class QueueFull(ServiceUnavailable):
    """The endpoint's queue of asynchronous requests is full, by number or by bytes."""

    def __init__(self, endpoint: str, limit: str) -> None:
        super().__init__(
            f"Endpoint {endpoint} has as many asynchronous requests pending as its queue may hold "
            f"(async_queue.{limit}). Try again later.",
            retry_after_s=QUEUE_RETRY_S,
        )


class DiskFull(ServiceUnavailable):
    """The disk, or the part of it that a setting allows, has no room for more asynchronous requests."""

    def __init__(self, setting: str) -> None:
        super().__init__(
            f"There is no room for more asynchronous requests and their results ({setting}). Try again later.",
            retry_after_s=QUEUE_RETRY_S,
        )


class QueueUnavailable(ServiceUnavailable):
    """The queue of asynchronous requests cannot be reached, read or written now; the message says why."""


class RequestInvalid(ApiError):
    """A request to the control plane is wrong, or names a resource that is missing or cannot be changed now."""

    status = 400
    kind = "ValidationException"


class LimitExceeded(ApiError):
    """The control plane has reached a limit of its resources or instances on this host."""

    status = 400
    kind = "ResourceLimitExceeded"


class ScalableTargetMissing(ApiError):
    """Application Auto Scaling has no such target or policy."""

    status = 400
    kind = "ObjectNotFoundException"


class LogMissing(ApiError):
    """CloudWatch Logs has no such group or stream."""

    status = 400
    kind = "ResourceNotFoundException"


class ModelNotLoaded(ApiError):
    """The container has not loaded a model of that name."""

    status = 404
    kind = "ModelNotFoundException"


class ModelBusy(ApiError):
    """Another request loads or unloads the model."""

    status = 409
    kind = "ModelAlreadyLoadedException"


class TooManyModels(ApiError):
    """The container has loaded as many models as it may; the platform unloads some and tries again."""

    status = 507
    kind = "InsufficientResources"


def invocation_timed_out() -> ModelError:
    """Make the error for a model that did not answer in time, in the words of the service."""
    return ModelError(
        0,
        "Your invocation timed out while waiting for a response from container primary. "
        "Review the latency metrics for each container in Amazon CloudWatch, resolve the issue, and try again.",
    )
