"""Publication of a decided request: write its object, notify, finish it in the queue.

Every step may be repeated by another worker after a crash, with the same result. A result that can never be written
becomes a failure first; a failure whose object can never be written ends without one.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from time import monotonic

from torchmoor.async_inference.notifications.notification import Notification
from torchmoor.async_inference.objects.locations import locate_staged
from torchmoor.async_inference.objects.object_store import ObjectError, ObjectMetadata
from torchmoor.async_inference.request import AsyncOutcome, AsyncState, Claim
from torchmoor.async_inference.workers.context import WorkerContext
from torchmoor.async_inference.workers.instance_client import InstanceLost, InstanceUnreachable, InvocationTimedOut
from torchmoor.async_inference.workers.lease_renewal import ClaimLost
from torchmoor.wire import background, headers

logger = logging.getLogger(__name__)

# After a request's time to live; a location that cannot be written for so long is abandoned. Not a setting, because
# unfinished results must be kept for longer (STAGED_TTL_S).
MAX_LATE_S = 86_400.0
FAILURE_METADATA = ObjectMetadata("text/plain; charset=utf-8")
_COUNTERS = {
    AsyncState.COMPLETED: "async_processed",
    AsyncState.FAILED: "async_failures",
    AsyncState.EXPIRED: "async_expired",
    AsyncState.CANCELLED: "async_cancelled",
}

END_TIMEOUT_S = 30.0
_GONE = frozenset((404, 410))  # the response was deleted, or has expired


class PublishLater(Exception):
    """Raised when the object could not be written now."""


class Publication:
    """Publishes one decided request."""

    def __init__(self, context: WorkerContext, claim: Claim, outcome: AsyncOutcome, variant: str | None) -> None:
        self.context = context
        self._claim = claim
        self.request = claim.request
        self.outcome = outcome
        self._metrics = context.metrics.of(variant)

    async def run(self) -> None:
        """Publish. Raises PublishLater, ClaimLost."""
        context, request, metrics = self.context, self.request, self._metrics
        if not self.outcome.is_published:
            await self._publish()
        await self._remove_staged()
        if await context.until_answered(partial(context.queue.finish, self._claim), request, "not ended yet"):
            counter = _COUNTERS[self.outcome.state]
            setattr(metrics, counter, getattr(metrics, counter) + 1)
            metrics.async_total_time.observe(max(0.0, context.wall() - request.received_at))

    async def _publish(self) -> None:
        error = await self._try_write()
        if error is not None and self.outcome.succeeded:
            logger.warning("result replaced by a failure inference_id=%s error=%s", self.request.inference_id, error)
            reason = f"The result could not be stored: {error}"
            await self._replace(AsyncOutcome(state=AsyncState.FAILED, reason=reason, staged=self.outcome.staged))
            error = await self._try_write()
        if error is not None:
            logger.error("ends without a failure object inference_id=%s error=%s", self.request.inference_id, error)
        await self._notify()
        if self.outcome.succeeded and self.outcome.staged is not None:
            # A client may delete what it has read. Once the staged object is gone, too, only this shows the success.
            await self._replace(replace(self.outcome, is_published=True))

    async def _notify(self) -> None:
        context, outcome = self.context, self.outcome
        response = outcome.body if outcome.succeeded else outcome.reason.encode()
        notification = Notification(self.request, outcome, context.wall(), response)
        self._metrics.async_notification_failures += await context.notifier.notify(notification, context.endpoint)

    async def _try_write(self) -> ObjectError | None:
        """Write the object. Returns the error of an object that can never be written. Raises PublishLater."""
        try:
            await self._write()
        except ObjectError as error:
            self._metrics.async_upload_failures += 1
            if not error.is_permanent and not self.is_late:
                raise PublishLater(str(error)) from error
            return error
        return None

    @property
    def is_late(self) -> bool:
        """True if the outcome is no longer to be published."""
        return self.context.wall() > min(self.request.expires_at + MAX_LATE_S, self.context.ends_at)

    async def _replace(self, outcome: AsyncOutcome) -> None:
        """Record another outcome. Raises ClaimLost."""
        call = partial(self.context.queue.replace, self._claim, outcome)
        if not await self.context.until_answered(call, self.request, "outcome not replaced yet"):
            raise ClaimLost(f"the claim of {self.request.inference_id} is lost")
        self.outcome = outcome

    async def _write(self) -> None:
        store, request, outcome = self.context.store, self.request, self.outcome
        if not outcome.succeeded:
            await store.put(request.failure_location, outcome.reason.encode(), FAILURE_METADATA)
        elif outcome.staged is not None:
            await store.publish(outcome.staged, outcome.staged_tag, request.output_location)
        else:
            began = monotonic()
            await store.put(request.output_location, outcome.body or b"", ObjectMetadata(outcome.content_type))
            self._metrics.async_upload_latency.observe(monotonic() - began)

    async def _remove_staged(self) -> None:
        """Remove the staged name of the result, and what lost attempts may have staged."""
        store, staged = self.context.store, self.outcome.staged
        place = self.context.output_path, self.request.output_location, self.request.identity
        try:
            if self._claim.attempt > (1 if self.outcome.succeeded else 0):
                await store.delete_all(locate_staged(*place))
            if staged is not None:
                await store.delete(staged)
        except ObjectError as error:
            self.context.faults.add("staged object not removed", error, inference_id=self.request.inference_id)


class ResponsePublication(Publication):
    """Publishes the outcome of one response in the background: the instance has the answer, or gets the failure.

    There are no objects and no notifications.
    """

    async def _try_write(self) -> ObjectError | None:
        """Send the instance an outcome without an answer. Raises PublishLater."""
        if not self.outcome.succeeded:
            try:
                await self._end()
            except (InstanceUnreachable, InstanceLost, InvocationTimedOut) as error:
                raise PublishLater(str(error)) from error
        return None

    async def _end(self) -> None:
        request, outcome, context = self.request, self.outcome, self.context
        url = context.capacity.find_url(request.session_id, request.principal)
        if url is None:
            if self.is_late or context.capacity.is_lost(request.session_id, request.principal):
                return  # the session may outlive the request's time, but not without end
            raise PublishLater("No instance has the response now.")
        is_cancelled = outcome.state is AsyncState.CANCELLED
        ending = {
            background.STATUS: background.CANCELLED if is_cancelled else background.FAILED,
            background.MESSAGE: outcome.reason,
            background.CODE: outcome.error_code,
        }
        fields = {
            "Content-Type": "application/json",
            headers.RESOURCE: background.end_resource(request.response_id),
            headers.ENDPOINT: request.endpoint,
            headers.PRINCIPAL: request.principal,
            headers.SOURCE: request.source,
        }
        sent = {name: value for name, value in fields.items() if value}
        async with context.client.send(url, sent, json.dumps(ending).encode(), END_TIMEOUT_S) as answer:
            if answer.status >= 300 and answer.status not in _GONE and not self.is_late:
                raise PublishLater(f"The instance that has the response has answered {answer.status}.")

    async def _remove_staged(self) -> None:
        """Do nothing: the answer of such a request is never staged."""

    async def _notify(self) -> None:
        """Do nothing: a notification names objects."""
