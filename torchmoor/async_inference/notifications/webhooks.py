"""Messages to webhooks, signed as the Standard Webhooks specification defines; libraries verify the signature.

    webhook-id: Notification.message_id       webhook-timestamp: seconds since the epoch, of this try
    webhook-signature: v1,base64(HMAC-SHA256(secret, "{id}.{timestamp}.{body}"))

Source: https://www.standardwebhooks.com
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import time
from urllib.parse import urlsplit

import aiohttp

from torchmoor import __version__
from torchmoor.async_inference.objects.object_store import LocationRefused
from torchmoor.async_inference.objects.outbound import Outbound, Resolve, is_retryable
from torchmoor.config.notices import NotificationSettings, Webhook
from torchmoor.errors import NotDelivered
from torchmoor.wire.connection_errors import failure_reason


def sign(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of the signature header."""
    digest = hmac.digest(key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256)
    return f"v1,{base64.b64encode(digest).decode()}"


class WebhookSender:
    """Sends each message with one try; the caller decides whether to retry."""

    def __init__(self, settings: NotificationSettings, resolver: Resolve | None) -> None:
        self._timeout_s = settings.timeout_s
        self._outbound = Outbound(
            private_networks=settings.private_networks,
            connect_timeout_s=settings.connect_timeout_s,
            read_timeout_s=settings.timeout_s,
            max_connections=settings.max_in_flight * max(1, len(settings.webhooks)),
            resolver=resolver,
        )

    async def send(self, webhook: Webhook, *, message_id: str, body: bytes) -> None:
        """Send a message. Any 2xx answer is a success, and its body is not read. Raises NotDelivered."""
        host, timestamp = urlsplit(webhook.url).hostname, int(time.time())
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"torchmoor/{__version__}",
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(webhook.key, message_id, timestamp, body),
        }
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._outbound.request("POST", webhook.url, headers=headers, body=body)
        except LocationRefused as exc:
            raise NotDelivered(f"the webhook at {host} may not be called: {exc}", is_permanent=True) from exc
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise NotDelivered(f"the webhook at {host} cannot be reached ({failure_reason(exc)})") from exc
        response.close()
        if not 200 <= response.status < 300:
            is_permanent = not is_retryable(response.status)
            raise NotDelivered(f"the webhook at {host} answered {response.status}", is_permanent=is_permanent)

    async def close(self) -> None:
        """Close every connection."""
        await self._outbound.close()
