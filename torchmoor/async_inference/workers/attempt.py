"""One attempt at a request: send its input to an instance, and stage the answer.

Which failures are final, and which are retried:

    input missing, denied, too large or too slow                  final
    object store down or slow, for the input or the answer        retried after growing waits, not counted
    body longer than what the instance can hold                   final
    instance has no room for the body now                         retried, not counted
    handler temporarily full                                      retried after its Retry-After, not counted
    any other 3xx, 4xx, or 5xx with an error code                 final, as on SageMaker
    TorchServe has no worker, or its worker died (500, 503, 507)  retried
    instance unreachable, or the proxy short of descriptors       retried, not counted
    connection lost                                               retried
    InvocationTimeoutSeconds exceeded                             final
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable
from time import monotonic
from typing import TypeVar

from torchmoor.async_inference.objects.locations import locate_staged
from torchmoor.async_inference.objects.object_store import Download, ObjectError, ObjectMetadata, ObjectTooSlow
from torchmoor.async_inference.request import CANCELLED, AsyncOutcome, AsyncRequest, AsyncState, Claim
from torchmoor.async_inference.workers.capacity import CapacityLease
from torchmoor.async_inference.workers.context import WorkerContext
from torchmoor.async_inference.workers.instance_client import (
    AnswerAborted,
    InstanceAnswer,
    InstanceLost,
    InstanceUnanswered,
    InstanceUnreachable,
    InvocationTimedOut,
    ProxyShortage,
)
from torchmoor.config.body_heap import body_weight
from torchmoor.errors import BodyTooLargeForInstance, ModelError, invocation_timed_out
from torchmoor.wire import error_codes, headers

logger = logging.getLogger(__name__)

REFUSED_UNCOUNTED = error_codes.REFUSED_FOR_NOW | {error_codes.MODEL_LOADING}
WITHOUT_WORKER = error_codes.TORCHSERVE_BUSY | error_codes.WORKER_DIED
MAX_ERROR_BYTES = 65_536

T = TypeVar("T")


class RetryableFailure(Exception):
    """Raised when an attempt fails and the request will be tried again.

    delay_s: shortest wait until the next attempt; None: by the settings' back-off. counts: whether max_attempts counts
    this attempt; False if the request cannot be the cause.
    """

    def __init__(self, reason: str, *, delay_s: float | None = None, counts: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay_s = delay_s
        self.counts = counts


class Attempt:
    """Runs one attempt. staged: URL of the staged answer, once it exists."""

    def __init__(self, context: WorkerContext, claim: Claim, lease: CapacityLease) -> None:
        self.staged: str | None = None
        self._context = context
        self._request = claim.request
        self._lease = lease
        self._metrics = context.metrics.of(lease.variant)
        self._request_id = str(uuid.uuid4())
        self._input_bytes = 0
        self._input_left_s = context.settings.input_timeout_s
        self._has_ended = False  # the instance no longer works on the request

    async def run(self) -> AsyncOutcome:
        """Return the request's outcome. Raises RetryableFailure."""
        request = self._request
        if request.body is not None:
            return await self._invoke(request.body, request.content_type)
        assert request.input_location is not None
        began = monotonic()
        try:
            download = await self._from_store(self._context.store.open(request.input_location))
        except ObjectError as error:
            return self._on_input_error(error)
        async with download:
            download.chunks = self._read(download.chunks)
            self._metrics.async_download_latency.observe(monotonic() - began)
            return await self._invoke(download, request.content_type or download.metadata.content_type)

    async def _read(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        while chunk := await self._from_store(anext(chunks, b"")):
            yield chunk

    async def _from_store(self, answer: Awaitable[T]) -> T:
        """Return an answer of the input's store. Raises ObjectTooSlow when all waits together exceed the limit."""
        began = asyncio.get_running_loop().time()
        limit = asyncio.timeout(self._input_left_s)
        try:
            async with limit:
                return await answer
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ObjectTooSlow(f"it did not arrive within {self._context.settings.input_timeout_s:g} s") from error
        finally:
            self._input_left_s -= asyncio.get_running_loop().time() - began

    def _on_input_error(self, error: ObjectError) -> AsyncOutcome:
        self._metrics.async_download_failures += 1
        return self._fail_at_store(error, "The input could not be read", "input not read yet")

    def _fail_at_store(self, error: ObjectError, message: str, logged: str) -> AsyncOutcome:
        """Return the failure, if the error is permanent. Raises RetryableFailure."""
        if error.is_permanent:
            return _failure(f"{message}: {error}")
        self._context.faults.add(logged, error, inference_id=self._request.inference_id)
        raise RetryableFailure(
            f"{message}: {error}", delay_s=self._context.delay_since_s(self._request), counts=False
        ) from error

    async def _invoke(self, body: bytes | Download, content_type: str) -> AsyncOutcome:
        lease, client = self._lease, self._context.client
        weight = body_weight(content_type.encode())
        self._input_bytes = len(body) if isinstance(body, bytes) else body.size
        too_large = BodyTooLargeForInstance(lease.max_body_bytes, weight)
        if self._input_bytes > too_large.limit:
            return _failure(too_large.message)
        if not lease.try_hold_body(self._input_bytes * weight):
            raise RetryableFailure("The instance has no room for the request's body.", counts=False)
        try:
            async with client.send(lease.url, self._headers(content_type), body, self._request.timeout_s) as answer:
                return await self._take(answer)
        except ObjectError as error:
            return self._on_input_error(error)
        except InstanceUnreachable as error:
            self._has_ended = True
            if isinstance(error, InstanceUnanswered):
                lease.on_failed(is_dead=True)
            else:
                lease.on_unreachable()
            raise RetryableFailure(str(error), counts=False) from error
        except ProxyShortage as error:
            self._has_ended = True
            raise RetryableFailure(str(error), counts=False) from error
        except InstanceLost as error:
            lease.on_failed(is_dead=True)
            raise RetryableFailure(str(error)) from error
        except InvocationTimedOut:
            lease.on_failed(is_dead=False)
            return _failure(invocation_timed_out().message)
        except AnswerAborted as error:
            self._has_ended = True
            return _failure(f"The model broke its answer off: {error}")
        finally:
            if not self._has_ended:  # also if the request was cancelled
                lease.abandon(self._request_id)

    def _headers(self, content_type: str) -> dict[str, str]:
        fields = {"Content-Type": content_type, headers.REQUEST_ID: self._request_id, **self._request.sent_fields}
        return {name: value for name, value in fields.items() if value}

    async def _take(self, answer: InstanceAnswer) -> AsyncOutcome:
        if answer.status >= 300:
            return await self._on_error(answer)
        self._lease.on_answered()
        chunks = answer.chunks()
        held = bytearray()
        async for piece in chunks:
            held += piece
            if len(held) > self._context.settings.max_inline_bytes:
                return await self._stage(answer, _chain(bytes(held), chunks))
        return self._complete(answer, body=bytes(held))

    def _complete(self, answer: InstanceAnswer, *, body: bytes | None = None, staged_tag: str = "") -> AsyncOutcome:
        """Release the instance, which has answered."""
        self._has_ended = True
        self._lease.release()
        return AsyncOutcome(
            state=AsyncState.COMPLETED,
            content_type=answer.content_type,
            custom_attributes=answer.custom_attributes,
            staged=self.staged,
            staged_tag=staged_tag,
            body=body,
        )

    async def _stage(self, answer: InstanceAnswer, chunks: AsyncIterator[bytes]) -> AsyncOutcome:
        """Upload a large answer to a staging name beside its result."""
        request = self._request
        staged = locate_staged(self._context.output_path, request.output_location, request.identity, self._request_id)
        began = monotonic()
        try:
            tag = await self._context.store.upload(staged, chunks, ObjectMetadata(answer.content_type))
        except ObjectError as error:
            self._metrics.async_upload_failures += 1
            return self._fail_at_store(error, "The answer could not be stored", "answer not stored yet")
        self.staged = staged
        self._metrics.async_upload_latency.observe(monotonic() - began)
        return self._complete(answer, staged_tag=tag)

    async def _on_error(self, answer: InstanceAnswer) -> AsyncOutcome:
        status, code = answer.status, answer.error_code
        text = (await answer.read(MAX_ERROR_BYTES)).decode("utf-8", "replace")
        self._has_ended = True
        if not code and status == 413 and not text:  # of TorchServe itself
            text = (
                f"The input's {self._input_bytes} bytes are more than the instance's limit: TorchServe's "
                "max_request_size, which torchmoor up sets with --max-body-mib and the file with launcher.max_body_mib."
            )
        if code in REFUSED_UNCOUNTED:
            delay_s = self._bounded(float(answer.retry_after)) if answer.retry_after.isdecimal() else None
            raise RetryableFailure(f"The instance has no room: {text}", delay_s=delay_s, counts=False)
        if not code and status in WITHOUT_WORKER:
            self._lease.on_failed(is_dead=True)
            raise RetryableFailure(ModelError(status, text).message)
        self._lease.on_answered()
        if code == error_codes.RESPONSE_CANCELLED:
            return CANCELLED
        response_id = self._request.response_id
        if response_id:  # the id suffices to use the response, so operators see its name
            return _failure(_message_in(text).replace(response_id, self._request.inference_id), code)
        return _failure(ModelError(status, text).message)

    def _bounded(self, delay_s: float) -> float:
        """Bound a delay by the back-off settings: neither a busy loop, nor past the request's time to live."""
        settings = self._context.settings
        return min(settings.max_backoff_s, max(settings.min_backoff_s, delay_s))


async def _chain(begin: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield begin
    async for piece in rest:
        yield piece


def _failure(reason: str, error_code: str = "") -> AsyncOutcome:
    """Return a failure. The model's JSON may have half a surrogate pair, which no queue and no object can have."""
    reason = reason.encode("utf-8", "replace").decode()
    return AsyncOutcome(state=AsyncState.FAILED, reason=reason, error_code=error_code)


def fail_exhausted(request: AsyncRequest, attempts: int, last: RetryableFailure) -> AsyncOutcome:
    """Return the outcome of a request that has used up its attempts. last: the failure of the last attempt."""
    # The reason is not logged: it may quote the model's answer.
    logger.warning("attempts exhausted inference_id=%s attempts=%d", request.inference_id, attempts)
    return _failure(f"Gave up after {attempts} attempts. The last one: {last.reason}")  # prose: allow


def _message_in(text: str) -> str:
    """Return the message of an error of OpenAI's form; the whole text if it has another form."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return text
    return str(message)
