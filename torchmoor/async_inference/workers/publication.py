"""What follows once it is decided how a request ends: its object gets its name, who wants to know is told, it is over.

All of it may be done again by another worker after a crash, and comes to the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from torchmoor.async_inference.notifications.notifier import Notification, NotificationTopics, Notifier
from torchmoor.async_inference.objects.locations import locate_staged
from torchmoor.async_inference.objects.object_store import ObjectError, ObjectMissing, ObjectStore
from torchmoor.async_inference.queues.queue import Queue
from torchmoor.async_inference.request import AsyncOutcome, AsyncRequest, AsyncState, Claim
from torchmoor.metrics.asynchronous import AsyncMetrics
from torchmoor.metrics.invocations import InvocationMetrics

logger = logging.getLogger(__name__)

MAX_LATE_S = 86_400.0  # after a request's time to live; a place that cannot be written for so long is given up
FAILURE_TYPE = "text/plain; charset=utf-8"


class PublishLater(Exception):
    """The result could not be put in its place. delay_s: until it is worth another try."""

    def __init__(self, reason: str, delay_s: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay_s = delay_s


@dataclass(slots=True)
class Publisher:
    """One endpoint's. wall: epoch seconds."""

    queue: Queue
    store: ObjectStore
    notifier: Notifier
    metrics: AsyncMetrics
    topics: NotificationTopics
    output_path: str
    max_delay_s: float
    wall: Callable[[], float]

    async def publish(self, claim: Claim, outcome: AsyncOutcome, variant: str | None) -> None:
        """Raises PublishLater; ClaimLost and QueueUnavailable pass through."""
        request, metrics = claim.request, self.metrics.of(variant)
        try:
            await self._place(request, outcome, metrics)
        except ObjectError as error:
            metrics.async_upload_failures += 1
            self._judge(request, outcome, error)
        await self._clean(claim, outcome)
        response = outcome.body if outcome.succeeded else outcome.reason.encode()
        notice = Notification.of(request, outcome, self.wall(), response)
        metrics.async_notification_failures += await self.notifier.notify(notice, self.topics)
        if await self.queue.finish(claim):
            self._count(request, outcome, metrics)

    async def _place(self, request: AsyncRequest, outcome: AsyncOutcome, metrics: InvocationMetrics) -> None:
        if not outcome.succeeded:
            await self.store.put(request.failure_location, outcome.reason.encode(), FAILURE_TYPE)
        elif outcome.staged is not None:
            await self.store.publish(outcome.staged, request.output_location)
        else:
            began = monotonic()
            await self.store.put(request.output_location, outcome.body or b"", outcome.content_type)
            metrics.async_upload_latency.observe(monotonic() - began)

    def _judge(self, request: AsyncRequest, outcome: AsyncOutcome, error: ObjectError) -> None:
        """A store may be down for long, and rights are mended; only what has lost its meaning is given up."""
        late_s = self.wall() - request.expires_at
        is_gone = isinstance(error, ObjectMissing) and outcome.staged is not None  # taken away after it was published
        if is_gone or late_s > MAX_LATE_S:
            logger.error("result not published inference_id=%s error=%s", request.inference_id, error)
            return
        age_s = max(0.0, self.wall() - request.received_at)
        raise PublishLater(str(error), min(self.max_delay_s, max(1.0, age_s / 10))) from error

    async def _clean(self, claim: Claim, outcome: AsyncOutcome) -> None:
        """Remove what attempts that were lost may have left; of the first one that is all well there is nothing."""
        request = claim.request
        for attempt in range(1, claim.attempt + (0 if outcome.succeeded else 1)):
            staged = locate_staged(self.output_path, request.inference_id, attempt)
            if staged != outcome.staged:
                try:
                    await self.store.delete(staged)
                except ObjectError as error:
                    logger.warning("staged object left behind url=%s error=%s", staged, error)

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
