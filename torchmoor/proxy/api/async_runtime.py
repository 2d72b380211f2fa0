"""InvokeEndpointAsync: POST /endpoints/{EndpointName}/async-invocations.

A request is answered 202 only once it is durably in the queue.
"""

from __future__ import annotations

import json
import uuid

from torchmoor.async_inference.objects.object_store import LocationRefused
from torchmoor.async_inference.request import AsyncRequest
from torchmoor.async_inference.service import AsyncInference
from torchmoor.errors import ApiError, ServiceUnavailable, ValidationError
from torchmoor.proxy.api.replies import runtime_error
from torchmoor.proxy.api.validation import (
    CUSTOM_ATTRIBUTES,
    FILENAME,
    INFERENCE_ID,
    INPUT_LOCATION,
    INVOCATION_ID,
    INVOCATION_TIMEOUT,
    NOT_THERE,
    OUTPUT_PATH_EXTENSION,
    REQUEST_TTL,
    SAGEMAKER_ACCEPT,
    SAGEMAKER_CONTENT_TYPE,
    check_members,
    not_there,
)
from torchmoor.proxy.dispatch.gateway import Gateway
from torchmoor.proxy.http.call import WAIT, WHOLE_BODY, Deadlines, Outcome, Placement, Waiter
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.instances.registry import Endpoint
from torchmoor.wire import headers

_OUTPUT_LOCATION = headers.OUTPUT_LOCATION.encode()
_FAILURE_LOCATION = headers.FAILURE_LOCATION.encode()

MAX_BODY_BYTES = 128_000
MAX_INVOCATION_ID_CHARS = 256
DEFAULT_TTL_S = 21_600
DEFAULT_TIMEOUT_S = 900
SUBMIT_TIMEOUT_S = 30.0  # the queue's own comes first


class AsyncOperation:
    """InvokeEndpointAsync of one endpoint."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint, service: AsyncInference) -> None:
        self.gateway = gateway
        self.endpoint = endpoint
        self._service = service

    def invoke(self, request: Request, request_id: bytes) -> Submission | Reply:
        """Make the submission of a request, or refuse it."""
        try:
            layout = request.layout
            check_members(layout)
            if not NOT_THERE.keys().isdisjoint(layout.places):
                raise not_there(self.endpoint.name, layout.places)
            if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
                raise body_too_long()
        except ApiError as error:
            return self.refuse(error, request_id)
        return Submission(self, request, request_id)

    def refuse(self, error: ApiError, request_id: bytes) -> Reply:
        """Render an error, and count it."""
        self._count(error.status)
        return runtime_error(error, request_id)

    def _count(self, status: int) -> None:
        metrics = self.gateway.first_dispatcher(self.endpoint).metrics
        metrics.invocations += 1
        metrics.count_status(status)

    def read(self, request: Request, body: bytes) -> AsyncRequest:
        """Read a request from its fields and body. Raises ValidationError."""
        input_location = _text(request, INPUT_LOCATION)
        if bool(input_location) == bool(body):
            given = "both" if body else "neither"
            raise ValidationError(f"InputLocation or a Body, one of the two, is what a request has; this has {given}.")
        inference_id = _text(request, INFERENCE_ID) or str(uuid.uuid4())
        invocation_id = _text(request, INVOCATION_ID)
        if len(invocation_id) > MAX_INVOCATION_ID_CHARS:  # a shortened id could be another request's
            raise ValidationError(f"{INVOCATION_ID.decode()} may have up to {MAX_INVOCATION_ID_CHARS} characters.")
        try:
            if input_location:
                self._service.store.check_input(input_location)
            locations = self._service.locate(
                self.endpoint.name,
                inference_id,
                filename=_text(request, FILENAME),
                extension=_text(request, OUTPUT_PATH_EXTENSION),
            )
        except LocationRefused as error:
            raise ValidationError(str(error)) from error
        return AsyncRequest(
            inference_id=inference_id,
            endpoint=self.endpoint.name,
            output_location=locations.output,
            failure_location=locations.failure,
            principal=request.principal,
            invocation_id=invocation_id,
            content_type=_text(request, SAGEMAKER_CONTENT_TYPE),
            accept=_text(request, SAGEMAKER_ACCEPT),
            custom_attributes=_text(request, CUSTOM_ATTRIBUTES),
            input_location=input_location or None,
            body=body or None,
            ttl_s=float(_text(request, REQUEST_TTL) or DEFAULT_TTL_S),
            timeout_s=float(_text(request, INVOCATION_TIMEOUT) or DEFAULT_TIMEOUT_S),
        )

    def start(self, submission: Submission, request: AsyncRequest) -> None:
        """Start to queue a request; the submission ends with the result. Raises ServiceUnavailable."""

        def on_done(stored: AsyncRequest | ApiError) -> None:
            if isinstance(stored, ApiError):
                submission.end(self.refuse(stored, submission.request_id))
            else:
                submission.end(self._accept(stored, submission.request_id))

        if not self._service.try_submit(request, on_done):
            raise ServiceUnavailable("Too many requests are being queued. Try again later.")

    def _accept(self, stored: AsyncRequest, request_id: bytes) -> Reply:
        self._count(202)
        return Reply(
            202,
            (
                (b"content-type", b"application/json"),
                (b"x-amzn-requestid", request_id),
                (_OUTPUT_LOCATION, stored.output_location.encode()),
                (_FAILURE_LOCATION, stored.failure_location.encode()),
            ),
            json.dumps({"InferenceId": stored.inference_id}).encode(),
        )


class Submission:
    """A Call (see torchmoor.proxy.http.call) that is answered once its request is in the queue.

    The request is queued even if the client leaves; a retry finds it.
    """

    __slots__ = (
        "request_id",
        "max_body_bytes",
        "body_need",
        "deadlines",
        "wait_ends_at",
        "_operation",
        "_request",
        "_waiter",
    )

    def __init__(self, operation: AsyncOperation, request: Request, request_id: bytes) -> None:
        self.request_id = request_id
        self.max_body_bytes = MAX_BODY_BYTES
        self.body_need = WHOLE_BODY
        self.deadlines = Deadlines(SUBMIT_TIMEOUT_S, SUBMIT_TIMEOUT_S)
        self.wait_ends_at = request.received_at + SUBMIT_TIMEOUT_S
        self._operation = operation
        self._request = request
        self._waiter: Waiter | None = None

    def route(self, body: bytes, waiter: Waiter) -> Placement:
        """Verify the body and queue the request."""
        try:
            if self._request.body_check is not None:
                self._request.body_check.verify(body)
            self._operation.start(self, self._operation.read(self._request, body))
        except ApiError as error:
            return self._operation.refuse(error, self.request_id)
        self._waiter = waiter
        return WAIT

    def end(self, reply: Reply) -> None:
        """End with the reply."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.resume(reply)

    def on_wait_over(self) -> Reply:
        """Answer if the queue's own time-out has not come first."""
        self._waiter = None
        return self._operation.refuse(ServiceUnavailable("The queue has not answered in time."), self.request_id)

    def on_body_too_large(self) -> Reply:
        """Answer a body above the limit for inline bodies."""
        return self._operation.refuse(body_too_long(), self.request_id)

    def finish(self, outcome: Outcome) -> None:
        """Forget the client; free the verification of the body."""
        self._waiter = None
        if self._request.body_check is not None:
            self._request.body_check.release()


def body_too_long() -> ValidationError:
    """Refuse an inline body that must be an object instead."""
    return ValidationError(
        f"An inline body may have up to {MAX_BODY_BYTES} bytes; put a longer one where InputLocation can say."
    )


def _text(request: Request, name: bytes) -> str:
    """Return a field's value, "" without one. The API's fields were checked to be ASCII."""
    return (request.find(name) or b"").decode("latin-1")
