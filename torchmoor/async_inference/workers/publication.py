"""Publication of a decided request: write its object, notify, finish it in the queue.

Every step may be repeated by another worker after a crash, with the same result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from torchmoor.async_inference.notifications.notification import Notification
from torchmoor.async_inference.notifications.notifier import NotificationTopics, Notifier
from torchmoor.async_inference.objects.locations import locate_staged
from torchmoor.async_inference.objects.object_store import ObjectError, ObjectMissing, ObjectStore
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import AsyncOutcome, AsyncRequest, AsyncState, Claim
from torchmoor.metrics.asynchronous import AsyncMetrics
from torchmoor.metrics.invocations import InvocationMetrics

logger = logging.getLogger(__name__)

MAX_LATE_S = 86_400.0  # after a request's time to live; a location that cannot be written for so long is abandoned
FAILURE_TYPE = "text/plain; charset=utf-8"


class PublishLater(Exception):
    """Raised when the result could not be written now. delay_s: time until the next try."""

    def __init__(self, reason: str, delay_s: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay_s = delay_s


@dataclass(slots=True)
class Publisher:
    """Publishes one endpoint's requests. wall: epoch seconds."""

    queue: Queue
    store: ObjectStore
    notifier: Notifier
    metrics: AsyncMetrics
    topics: NotificationTopics
    output_path: str
    max_delay_s: float
    wall: Callable[[], float]

    async def publish(self, claim: Claim, outcome: AsyncOutcome, variant: str | None) -> None:
        """Publish a decided request. Raises PublishLater, ClaimLost, QueueUnavailable."""
        request, metrics = claim.request, self.metrics.of(variant)
        try:
            await self._write(request, outcome, metrics)
        except ObjectError as error:
            metrics.async_upload_failures += 1
            self._check_retry(request, outcome, error)
        await self._remove_staged(claim, outcome)
        response = outcome.body if outcome.succeeded else outcome.reason.encode()
        notification = Notification.of(request, outcome, self.wall(), response)
        metrics.async_notification_failures += await self.notifier.notify(notification, self.topics)
        if await self.queue.finish(claim):
            self._count(request, outcome, metrics)

    async def _write(self, request: AsyncRequest, outcome: AsyncOutcome, metrics: InvocationMetrics) -> None:
        if not outcome.succeeded:
            await self.store.put(request.failure_location, outcome.reason.encode(), FAILURE_TYPE)
        elif outcome.staged is not None:
            await self.store.publish(outcome.staged, request.output_location)
        else:
            began = monotonic()
            await self.store.put(request.output_location, outcome.body or b"", outcome.content_type)
            metrics.async_upload_latency.observe(monotonic() - began)

    def _check_retry(self, request: AsyncRequest, outcome: AsyncOutcome, error: ObjectError) -> None:
        """Raise PublishLater unless another try is useless: stores recover, and permissions are corrected."""
        late_s = self.wall() - request.expires_at
        is_gone = isinstance(error, ObjectMissing) and outcome.staged is not None  # removed after its publication
        if is_gone or late_s > MAX_LATE_S:
            logger.error("result not published inference_id=%s error=%s", request.inference_id, error)
            return
        age_s = max(0.0, self.wall() - request.received_at)
        raise PublishLater(str(error), min(self.max_delay_s, max(1.0, age_s / 10))) from error

    async def _remove_staged(self, claim: Claim, outcome: AsyncOutcome) -> None:
        """Remove what lost attempts may have staged. A success at the first attempt leaves nothing to remove."""
        request = claim.request
        for attempt in range(1, claim.attempt + (0 if outcome.succeeded else 1)):
            staged = locate_staged(self.output_path, request.inference_id, attempt)
            if staged != outcome.staged:
                try:
                    await self.store.delete(staged)
                except ObjectError as error:
                    logger.warning("staged object not removed url=%s error=%s", staged, error)

    def _count(self, request: AsyncRequest, outcome: AsyncOutcome, metrics: InvocationMetrics) -> None:
        match outcome.state:
            case AsyncState.COMPLETED:
                metrics.async_processed += 1
            case AsyncState.EXPIRED:
                metrics.async_expired += 1
            case AsyncState.CANCELLED:
                metrics.async_cancelled += 1
            case _:
                metrics.async_failures += 1
        metrics.async_total_time.observe(max(0.0, self.wall() - request.received_at))
