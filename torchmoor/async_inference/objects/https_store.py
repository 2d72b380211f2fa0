"""Inputs from https URLs, such as presigned ones, on the hosts that the configuration lists.

Messages show only a URL's host, because the rest of a presigned URL is a credential.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import aiohttp

from torchmoor.async_inference.objects.object_store import (
    Download,
    InputStore,
    LocationRefused,
    ObjectDenied,
    ObjectMetadata,
    ObjectMissing,
    ObjectTooLarge,
    ObjectUnavailable,
)
from torchmoor.async_inference.objects.outbound import Outbound, Resolve, is_retryable
from torchmoor.config.group import MIB
from torchmoor.config.objects import ObjectSettings
from torchmoor.wire.connection_errors import failure_reason


class HttpsStore(InputStore):
    """Reads https:// URLs of the configured hosts."""

    def __init__(self, settings: ObjectSettings, resolver: Resolve | None = None) -> None:
        self._settings = settings
        self._outbound = Outbound(
            private_networks=settings.private_networks,
            connect_timeout_s=settings.connect_timeout_s,
            read_timeout_s=settings.read_timeout_s,
            max_connections=settings.max_in_flight,
            resolver=resolver,
        )

    def check_input(self, url: str) -> None:
        parts = self._outbound.check(url)
        if parts.scheme != "https" or not self._is_listed((parts.hostname or "").rstrip(".")):
            raise LocationRefused(
                "https inputs are read only from the hosts that an operator names (objects.https_hosts)"
            )

    def _is_listed(self, host: str) -> bool:
        return any(
            host.endswith(listed[1:]) if listed.startswith("*.") else host == listed.strip("[]")
            for listed in self._settings.https_hosts
        )

    async def open(self, url: str) -> Download:
        self.check_input(url)
        host = urlsplit(url).hostname
        try:
            response = await self._outbound.request("GET", url, headers={"Accept-Encoding": "identity"})
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise ObjectUnavailable(f"{host} cannot be reached ({failure_reason(exc)})") from exc
        try:
            size = self._check_answer(response, host)
        except BaseException:
            response.close()
            raise
        metadata = ObjectMetadata(response.headers.get("Content-Type", ""))
        return Download(size, metadata, self._read(response, size, host), response.close)

    def _check_answer(self, response: aiohttp.ClientResponse, host: str | None) -> int:
        """Return the body's size. Raises ObjectError."""
        status = response.status
        if status in (404, 410):
            raise ObjectMissing(f"{host} has no such object")
        if is_retryable(status):
            raise ObjectUnavailable(f"{host} answered with status {status}")
        if status != 200:
            raise ObjectDenied(f"{host} answered with status {status}; has the presigned URL expired?")
        if response.content_length is None or response.headers.get("Content-Encoding", "identity") != "identity":
            raise LocationRefused(f"{host} must send the object with a Content-Length and without a Content-Encoding")
        if response.content_length > self._settings.max_input_bytes:
            raise ObjectTooLarge(
                f"the input has {response.content_length} bytes, more than {self._settings.max_input_bytes}"
            )
        return response.content_length

    async def _read(self, response: aiohttp.ClientResponse, size: int, host: str | None) -> AsyncIterator[bytes]:
        num_left = size
        while num_left:
            try:
                data = await response.content.read(min(MIB, num_left))
            except (aiohttp.ClientError, TimeoutError) as exc:
                raise ObjectUnavailable(f"{host} broke off ({failure_reason(exc)})") from exc
            if not data:
                raise ObjectUnavailable(f"{host} ended before the object's last byte")
            num_left -= len(data)
            yield data

    async def close(self) -> None:
        await self._outbound.close()
