"""Notices that a request has ended: SageMaker's message, to SNS topics and to webhooks.

A notice is sent again until it is taken or the tries are used up, and it may be sent twice after a crash: whoever
receives it knows it by its inferenceId.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from torchmoor.async_inference.notifications.sns import Sns, region_of
from torchmoor.async_inference.notifications.webhooks import WebhookSender
from torchmoor.async_inference.objects.outbound import Resolve, resolve
from torchmoor.async_inference.request import AsyncOutcome, AsyncRequest
from torchmoor.config.notifications import TOPIC, NotificationSettings, Webhook
from torchmoor.errors import ConfigError, NotDelivered

logger = logging.getLogger(__name__)

SUCCESS = "SUCCESS_NOTIFICATION_TOPIC"
ERROR = "ERROR_NOTIFICATION_TOPIC"
MAX_RESPONSE_BYTES = 128 * 1024  # that a message includes
MAX_REASON_CHARS = 4096  # of a message; all of it is in the failure object. SNS takes 256 KiB, response included


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationTopics:
    """Whom one endpoint notifies by SNS: NotificationConfig of CreateEndpointConfig."""

    success_topic: str = ""  # ARN; "": nobody
    error_topic: str = ""
    include_response_in: tuple[str, ...] = ()  # of SUCCESS and ERROR

    def __post_init__(self) -> None:
        for name, topic in (("SuccessTopic", self.success_topic), ("ErrorTopic", self.error_topic)):
            if topic and not TOPIC.fullmatch(topic):
                raise ConfigError(f"NotificationConfig.{name} must be arn:aws:sns:region:account:name, not {topic!r}")
        for name in self.include_response_in:
            if name not in (SUCCESS, ERROR):
                raise ConfigError(f"NotificationConfig.IncludeInferenceResponseIn must have {SUCCESS} or {ERROR}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """What is said of one request that has ended."""

    inference_id: str
    endpoint: str
    received_at: float  # seconds since the epoch
    ended_at: float
    succeeded: bool
    content_type: str = ""  # of the request
    accept: str = ""
    input_location: str | None = None  # None: the input came with the request
    response_content_type: str = ""
    output_location: str = ""  # of a success
    failure_location: str = ""  # of a failure
    reason: str = ""  # of a failure
    response: bytes | None = field(default=None, repr=False)  # the result's or the failure's bytes; None: too many

    @classmethod
    def of(cls, request: AsyncRequest, outcome: AsyncOutcome, ended_at: float, response: bytes | None) -> Notification:
        """What there is to say. response: the bytes of the object that was published, None if they are many."""
        return cls(
            inference_id=request.inference_id,
            endpoint=request.endpoint,
            received_at=request.received_at,
            ended_at=ended_at,
            succeeded=outcome.succeeded,
            content_type=request.content_type,
            accept=request.accept,
            input_location=request.input_location,
            response_content_type=outcome.content_type,
            output_location=request.output_location if outcome.succeeded else "",
            failure_location="" if outcome.succeeded else request.failure_location,
            reason=outcome.reason,
            response=response,
        )

    @property
    def message_id(self) -> str:
        """The same whenever this is sent again, and for no other request; an inference id need not fit in a header."""
        named = json.dumps([self.endpoint, self.inference_id, self.received_at])
        return f"msg_{hashlib.sha256(named.encode()).hexdigest()[:32]}"

    def message(self, region: str, *, includes_response: bool) -> dict[str, Any]:
        """As SageMaker words it. What is not known is left out.

        failureLocation stands twice: beside failureReason, and where consumers look who saw it in SageMaker's own.
        """
        asked = {
            "accept": self.accept,
            "contentType": self.content_type,
            "endpointName": self.endpoint,
            "inputLocation": self.input_location,
        }
        answered = {
            "contentType": self.response_content_type,
            "outputLocation": self.output_location,
            "failureLocation": self.failure_location,
        }
        message: dict[str, Any] = {
            "awsRegion": region,
            "eventTime": _timestamp(self.ended_at),
            "receivedTime": _timestamp(self.received_at),
            "invocationStatus": "Completed" if self.succeeded else "Failed",
            "requestParameters": _known(asked),
            "responseParameters": _known(answered),
            "inferenceId": self.inference_id,
            "eventVersion": "1.0",
            "eventSource": "aws:sagemaker",
            "eventName": "InferenceResult",
        }
        if not self.succeeded:
            message["failureReason"] = self.reason[:MAX_REASON_CHARS]
            message["failureLocation"] = self.failure_location
        if includes_response and self.response is not None and len(self.response) <= MAX_RESPONSE_BYTES:
            message["responseBody"] = {"content": base64.b64encode(self.response).decode(), "encoding": "BASE64"}
        return message


class Notifier:
    """Tells those who want to know that a request has ended."""

    def __init__(
        self,
        settings: NotificationSettings,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        resolver: Resolve = resolve,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._sns = Sns(settings)
        self._webhooks = WebhookSender(settings, resolver)
        self._in_flight = asyncio.Semaphore(settings.max_in_flight)

    async def notify(self, notice: Notification, topics: NotificationTopics) -> int:
        """Send to the endpoint's topic and to every webhook. Returns how many could not be told: 0 is well.

        Raises nothing but CancelledError: each failure is logged.
        """
        topic = topics.success_topic if notice.succeeded else topics.error_topic
        includes_response = (SUCCESS if notice.succeeded else ERROR) in topics.include_response_in
        region = region_of(topic) or self._settings.aws_region
        text = json.dumps(notice.message(region, includes_response=includes_response))
        sends: list[Callable[[], Awaitable[None]]] = []
        if topic:
            sends.append(lambda: self._sns.publish(topic, text))
        for webhook in self._settings.webhooks:
            sends.append(lambda webhook=webhook: self._send(webhook, notice, text))  # type: ignore[misc]
        told = await asyncio.gather(*(self._tell(send, notice) for send in sends))
        return told.count(False)

    async def _send(self, webhook: Webhook, notice: Notification, text: str) -> None:
        await self._webhooks.send(webhook, notice.message_id, int(self._clock()), text.encode())

    async def _tell(self, send: Callable[[], Awaitable[None]], notice: Notification) -> bool:
        """Try until it is taken. False: it will not be."""
        for attempt in range(1, self._settings.max_attempts + 1):
            try:
                async with self._in_flight:
                    await send()
                return True
            except NotDelivered as exc:
                is_last = exc.is_permanent or attempt == self._settings.max_attempts
                level = logging.ERROR if is_last else logging.WARNING
                logger.log(
                    level,
                    "notice not delivered inference_id=%s attempt=%d will_retry=%s error=%s",
                    notice.inference_id,
                    attempt,
                    not is_last,
                    exc,
                )
                if is_last:
                    return False
                await self._sleep(self._delay_s(attempt))
            except Exception:
                logger.exception("notice not delivered inference_id=%s", notice.inference_id)
                return False
        raise AssertionError("unreachable")

    def _delay_s(self, attempt: int) -> float:
        longest = min(self._settings.max_delay_s, self._settings.first_delay_s * 2.0 ** (attempt - 1))
        return longest * random.uniform(0.5, 1.0)

    async def close(self) -> None:
        """Wait for the tries that have begun; close connections."""
        await self._sns.close()
        await self._webhooks.close()


def _known(values: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def _timestamp(seconds: float) -> str:
    """2022-01-25T22:46:00.608Z"""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
