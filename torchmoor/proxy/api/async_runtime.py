"""InvokeEndpointAsync: POST /endpoints/{EndpointName}/async-invocations.

A request is answered 202 only once it is durably in the queue.
"""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

from torchmoor.async_inference.objects.object_store import LocationRefused
from torchmoor.async_inference.request import AsyncRequest
from torchmoor.async_inference.service import AsyncInference
from torchmoor.errors import ApiError, CallerLimited, ServiceUnavailable, ValidationError
from torchmoor.proxy.api.deferred_reply import DeferredReply
from torchmoor.proxy.api.replies import json_reply, runtime_error
from torchmoor.proxy.api.runtime_members import (
    FILENAME,
    INPUT_LOCATION,
    MEMBERS,
    NOT_THERE,
    OUTPUT_PATH_EXTENSION,
    STORED,
    NumberMember,
    check_members,
    not_there,
)
from torchmoor.proxy.dispatch import unavailable
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.field_names import (
    AWS_REQUEST_ID,
    FAILURE_LOCATION,
    INFERENCE_ID,
    INVOCATION_ID,
    OUTPUT_LOCATION,
)
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.wire.headers import MAX_INLINE_BYTES

MAX_INVOCATION_ID_CHARS = 256
SUBMIT_TIMEOUT_S = 30.0  # after the queue's own time-out


class QueueReply(DeferredReply):
    """Is ready when the queue has the request."""

    late = "The queue has not answered in time."


class AsyncOperation:
    """InvokeEndpointAsync of one endpoint."""

    def __init__(self, dispatchers: Dispatchers, endpoint: Endpoint, service: AsyncInference) -> None:
        self.dispatchers = dispatchers
        self.endpoint = endpoint
        self._service = service

    def invoke(self, request: Request, request_id: bytes) -> DeferredReply | Reply:
        """Make the call of a request, or refuse it."""
        try:
            layout = request.layout
            check_members(layout)
            if not NOT_THERE.keys().isdisjoint(layout.places):
                raise not_there(self.endpoint.name, layout.places)
            if request.content_length is not None and request.content_length > MAX_INLINE_BYTES:
                raise body_too_long()
        except ApiError as error:
            return self._refuse(error, request_id)
        return QueueReply(
            self.dispatchers,
            request,
            request_id,
            partial(self._submit, request, request_id),
            self._refuse,
            too_large=body_too_long(),
            max_body_bytes=MAX_INLINE_BYTES,
            timeout_s=SUBMIT_TIMEOUT_S,
        )

    def _refuse(self, error: ApiError, request_id: bytes) -> Reply:
        """Render an error, and count it."""
        self.dispatchers.count_without_invocation(self.endpoint, error.status)
        return runtime_error(error, request_id)

    def _read(self, request: Request, body: bytes) -> AsyncRequest:
        """Read a request from its fields and body. Raises ValidationError."""
        input_location = _read_location(request)
        if bool(input_location) == bool(body):
            given = "both" if body else "neither"
            raise ValidationError(f"A request must have either InputLocation or a Body; this one has {given}.")
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
            input_location=input_location or None,
            body=body or None,
            **_read_stored(request),
        )

    def _submit(self, request: Request, request_id: bytes, reply: DeferredReply, body: bytes) -> None:
        """Start to queue a request; a retry finds it. Raises ValidationError, CallerLimited, ServiceUnavailable.

        Until it is queued, it is a request of its caller in flight, even if the client leaves.
        """
        asked, callers = self._read(request, body), self.dispatchers.callers
        lease = None if callers is None else callers.lease_request(request.principal, reply.source)

        def on_done(stored: AsyncRequest | ApiError) -> None:
            if lease is not None:
                lease.release()
            if isinstance(stored, ApiError):
                if callers is not None and isinstance(stored, CallerLimited):
                    callers.num_refused[stored.setting] += 1
                reply.fail(stored)
            else:
                reply.end(self._accept(stored, request_id))

        share = None if callers is None or lease is None else callers.async_share(lease.caller)
        if not self._service.try_submit(asked, on_done, share):
            if lease is not None:
                lease.release()
            raise ServiceUnavailable(unavailable.TOO_MANY_SUBMITTED)

    def _accept(self, stored: AsyncRequest, request_id: bytes) -> Reply:
        self.dispatchers.count_without_invocation(self.endpoint, 202)
        headers = (
            (AWS_REQUEST_ID, request_id),
            (OUTPUT_LOCATION, stored.output_location.encode()),
            (FAILURE_LOCATION, stored.failure_location.encode()),
        )
        return json_reply(202, {"InferenceId": stored.inference_id}, headers)


def body_too_long() -> ValidationError:
    """Refuse an inline body that must be an object instead."""
    return ValidationError(
        f"An inline body may have up to {MAX_INLINE_BYTES} bytes; upload a longer one and send its InputLocation."
    )


def _text(request: Request, name: bytes) -> str:
    """Return a field's value, "" without one. All of the API's fields except InputLocation are ASCII."""
    return (request.find(name) or b"").decode("latin-1")


def _read_stored(request: Request) -> dict[str, Any]:
    """Return the fields of an AsyncRequest that keep members as they were sent, without members that were not sent."""
    found: dict[str, Any] = {}
    for field, name in STORED.items():
        if text := _text(request, name):
            found[field] = float(text) if isinstance(MEMBERS[name], NumberMember) else text
    return found


def _read_location(request: Request) -> str:
    """Return the InputLocation, "" without one. A key in S3 has any characters, which boto3 sends as UTF-8."""
    try:
        return (request.find(INPUT_LOCATION) or b"").decode()
    except UnicodeDecodeError as error:
        raise ValidationError("InputLocation must be UTF-8.") from error
