"""Messages to SNS topics, through boto3 in threads. Credentials and AWS_ENDPOINT_URL_SNS are found as boto3 does."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from torchmoor.async_inference.objects.s3_client import code_of, open_session, status_of
from torchmoor.async_inference.objects.threads import Threads
from torchmoor.config.notices import NotificationSettings
from torchmoor.errors import NotDelivered
from torchmoor.wire.connection_errors import failure_reason

RETRYABLE_CODES = {"Throttling", "ThrottlingException", "ThrottledException", "RequestTimeTooSkewed", "ExpiredToken"}


def region_of(topic: str) -> str:
    """Return the region in a topic's ARN, or "" without a topic."""
    return topic.split(":")[3] if topic else ""


class Sns:
    """Publishes with one client per region, in threads of its own: one region's outage does not occupy another's.

    Makes no request before the first message.
    """

    def __init__(self, settings: NotificationSettings) -> None:
        self._settings = settings
        self._threads: dict[str, Threads] = {}
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}

    async def publish(self, topic: str, message: str) -> None:
        """Publish a message, with one try. Raises NotDelivered."""
        region = region_of(topic)
        if region not in self._threads:
            self._threads[region] = Threads(f"notifications-sns-{region}", self._settings.max_in_flight)
        await self._threads[region].run(self._publish, topic, message)

    def _publish(self, topic: str, message: str) -> None:
        try:
            self._client(region_of(topic)).publish(TopicArn=topic, Message=message)
        except ClientError as exc:
            code, status = code_of(exc), status_of(exc)
            is_permanent = status < 500 and status != 429 and code not in RETRYABLE_CODES
            raise NotDelivered(f"SNS refused the message ({code})", is_permanent=is_permanent) from exc
        except BotoCoreError as exc:
            raise NotDelivered(f"SNS cannot be reached ({failure_reason(exc)})") from exc

    def _client(self, region: str) -> Any:
        with self._lock:
            if region not in self._clients:
                self._clients[region] = open_session().client(
                    "sns",
                    region_name=region or None,
                    config=Config(
                        connect_timeout=self._settings.connect_timeout_s,
                        read_timeout=self._settings.timeout_s,
                        retries={"mode": "standard", "total_max_attempts": 1},  # the notifier retries
                        max_pool_connections=self._settings.max_in_flight,
                    ),
                )
            return self._clients[region]

    async def close(self) -> None:
        """Wait for the running tries."""
        await asyncio.gather(*(threads.close() for threads in self._threads.values()))
        for client in self._clients.values():
            client.close()
