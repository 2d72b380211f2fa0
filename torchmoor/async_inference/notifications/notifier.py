"""Notifier that delivers a request's notification to its endpoint's SNS topic and to every webhook.

Delivery is retried until it succeeds or the tries are used up. After that the receiver counts as down until a delivery
to it succeeds, and no notification waits for another's turn, so that it does not delay other requests. A crash can
cause a second delivery, which receivers recognize by its inferenceId.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import urlsplit

from torchmoor.async_inference.backoff import Backoff
from torchmoor.async_inference.notifications.notification import Notification
from torchmoor.async_inference.notifications.sns import Sns, region_of
from torchmoor.async_inference.notifications.webhooks import WebhookSender
from torchmoor.async_inference.objects.outbound import Resolve
from torchmoor.config.async_inference import AsyncEndpointSettings
from torchmoor.config.notices import NotificationSettings
from torchmoor.errors import NotDelivered

logger = logging.getLogger(__name__)

SUCCESS = "SUCCESS_NOTIFICATION_TOPIC"
ERROR = "ERROR_NOTIFICATION_TOPIC"
Send = Callable[[], Awaitable[None]]


class Notifier:
    """Sends notifications, a bounded number at a time to each receiver.

    While a receiver is down, a notification that would have to wait fails at once, and one that has waited since before
    is tried once.
    """

    def __init__(
        self,
        settings: NotificationSettings,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        resolver: Resolve | None = None,
    ) -> None:
        self._settings = settings
        self._sleep = sleep
        self._backoff = Backoff(settings.first_delay_s, settings.max_delay_s)
        self._sns = Sns(settings)
        self._webhooks = WebhookSender(settings, resolver)
        self._turns: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(settings.max_in_flight))
        self._down: set[str] = set()

    async def notify(self, notification: Notification, endpoint: AsyncEndpointSettings) -> int:
        """Deliver to the endpoint's topic and to every webhook. Returns the number of failed deliveries; logs each."""
        topic = endpoint.success_topic if notification.outcome.succeeded else endpoint.error_topic
        includes_response = (SUCCESS if notification.outcome.succeeded else ERROR) in endpoint.include_response_in
        region = region_of(topic) or self._settings.aws_region
        text = json.dumps(notification.message(region, includes_response=includes_response))
        sends: list[tuple[str, Send]] = [(topic, partial(self._sns.publish, topic, text))] if topic else []
        send = partial(self._webhooks.send, message_id=notification.message_id, body=text.encode())
        sends += [(each.url, partial(send, each)) for each in self._settings.webhooks]
        delivered = await asyncio.gather(*(self._deliver(*each, notification) for each in sends))
        return delivered.count(False)

    async def _deliver(self, receiver: str, send: Send, notification: Notification) -> bool:
        """Deliver when there is a turn. Returns False if that fails.

        A turn includes the waits between tries, so that the first notifications, not those that wait behind them, find
        out whether the receiver is down. receiver: a topic, or a webhook's URL.
        """
        turns = self._turns[receiver]
        has_to_wait = turns.locked()
        if has_to_wait and receiver in self._down:
            shown = urlsplit(receiver).hostname or receiver
            error = NotDelivered(f"{shown} is down, and as many deliveries as are allowed wait for it")
            _log_failure(notification, 0, error, is_last=True)
            return False
        async with turns:
            is_late = has_to_wait and receiver in self._down
            return await self._try(receiver, send, notification, 1 if is_late else self._settings.max_attempts)

    async def _try(self, receiver: str, send: Send, notification: Notification, max_attempts: int) -> bool:
        """Try until the notification is delivered. Returns False after a permanent failure or the last try."""
        for attempt in range(1, max_attempts + 1):
            try:
                await send()
                self._down.discard(receiver)
                return True
            except NotDelivered as exc:
                is_last = exc.is_permanent or attempt == max_attempts
                _log_failure(notification, attempt, exc, is_last=is_last)
                if is_last:
                    if not exc.is_permanent:
                        self._down.add(receiver)
                    return False
                await self._sleep(self._backoff.delay_s(attempt))
            except Exception:
                logger.exception("notification not delivered inference_id=%s", notification.request.inference_id)
                return False
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Wait for the running tries, then close the connections."""
        await self._sns.close()
        await self._webhooks.close()


def _log_failure(notification: Notification, attempt: int, error: NotDelivered, *, is_last: bool) -> None:
    """Log a failed delivery. attempt: from 1; 0: there was no try."""
    logger.log(
        logging.ERROR if is_last else logging.WARNING,
        "notification not delivered inference_id=%s attempt=%d will_retry=%s error=%s",
        notification.request.inference_id,
        attempt,
        not is_last,
        error,
    )
