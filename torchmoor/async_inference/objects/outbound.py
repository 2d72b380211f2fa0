"""HTTP client for URLs that clients or operators name; it connects only to allowed addresses.

Every address that a name resolves to must be on the public internet or in a network that the configuration allows;
plain http is allowed in those networks only. Redirects are not followed, because their targets are not checked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from torchmoor.async_inference.objects.object_store import LocationRefused
from torchmoor.wire.public_addresses import destination, is_public, resolve

Resolve = Callable[[str, int], Awaitable[list[str]]]

READ_BUFFER_BYTES = 1 << 18
MAX_LOOKUPS = 32  # of names at a time


class NameLookups:
    """Looks names up, at most `max_threads` at a time.

    Its threads are daemons, because nothing can interrupt the system's resolver: the process can end meanwhile.
    """

    def __init__(self, max_threads: int) -> None:
        self._free = asyncio.Semaphore(max_threads)

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host name. Raises OSError. Cancelling the caller does not stop the look-up."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        found: Future[list[str]] = Future()
        found.set_running_or_notify_cancel()  # the caller cannot cancel it

        def run() -> None:
            try:
                addresses = resolve(host, port)
            except Exception as exc:
                found.set_exception(exc)
            else:
                found.set_result(addresses)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._free.release)

        try:
            threading.Thread(target=run, name="lookup", daemon=True).start()
        except RuntimeError as exc:
            self._free.release()
            raise OSError("no thread can be started to look a name up") from exc
        return await asyncio.wrap_future(found)


def is_retryable(status: int) -> bool:
    """Return whether the same request may succeed later."""
    return status >= 500 or status in (408, 425, 429)


class Outbound:
    """Sends requests to allowed addresses. private_networks: CIDRs allowed besides the public internet."""

    def __init__(
        self,
        *,
        private_networks: tuple[str, ...],
        connect_timeout_s: float,
        read_timeout_s: float,
        max_connections: int,
        resolver: Resolve | None = None,
    ) -> None:
        """resolver: None for NameLookups: a name server that does not answer occupies only its threads."""
        self.connect_timeout_s = connect_timeout_s
        self._networks = [ipaddress.ip_network(network) for network in private_networks]
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s)
        self._max_connections = max_connections
        self._resolver = resolver or NameLookups(min(max_connections, MAX_LOOKUPS)).resolve
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    def check(self, url: str) -> SplitResult:
        """Raise LocationRefused unless this is a valid https or http URL. A host name's addresses are checked later."""
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
            (host or "").encode("idna")  # as the resolver does
        except ValueError:
            host = None
        if not host or parts.scheme not in ("https", "http") or not url.isprintable():
            raise LocationRefused("the location is not a valid https URL")
        if parts.username is not None or parts.password is not None:
            raise LocationRefused("the location must not have a user name or a password in it")
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return parts  # a name, checked when it is resolved
        self.check_addresses(parts.scheme, host, [str(address)])
        return parts

    def check_addresses(self, scheme: str, host: str, addresses: list[str]) -> None:
        """Raise LocationRefused unless every address of a host is allowed."""
        for address in addresses:
            ip = destination(address)
            is_allowed = any(ip in network for network in self._networks)
            if not is_allowed and not (scheme == "https" and is_public(ip)):
                raise LocationRefused(
                    f"the location leads to a private or local network, or is not https ({host}); "
                    "an operator can allow that with private_networks"
                )

    async def request(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> aiohttp.ClientResponse:
        """Return the response head; the caller closes it. Raises LocationRefused, aiohttp.ClientError, TimeoutError."""
        parts = self.check(url)
        try:
            session = await self._session(parts.scheme)
            return await session.request(
                method,
                URL(url, encoded=True),  # a presigned URL must not be re-encoded
                headers=headers,
                data=body,
                allow_redirects=False,
            )
        except aiohttp.ClientConnectorError as exc:
            if isinstance(exc.os_error, _Refused):
                raise LocationRefused(str(exc.os_error)) from exc
            raise

    async def _session(self, scheme: str) -> aiohttp.ClientSession:
        # aiohttp's own context dates from its import. Reading the certificates takes a while, so a thread does it.
        needs_context = scheme == "https" and scheme not in self._sessions
        context = await asyncio.to_thread(ssl.create_default_context) if needs_context else None
        if scheme not in self._sessions:
            self._sessions[scheme] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    resolver=_CheckingResolver(self, scheme, self._resolver),
                    use_dns_cache=False,
                    ssl=context or True,
                    limit=self._max_connections,
                ),
                timeout=self._timeout,
                trust_env=False,  # a proxy from the environment would resolve the name again
                auto_decompress=False,
                read_bufsize=READ_BUFFER_BYTES,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._sessions[scheme]

    async def close(self) -> None:
        """Close every connection. Does not wait for look-ups."""
        for session in self._sessions.values():
            await session.close()


class _Refused(OSError):
    """Carries LocationRefused through aiohttp, which accepts only OSError from a resolver."""


class _CheckingResolver(AbstractResolver):
    """Resolves a name to allowed addresses; aiohttp connects to no others."""

    def __init__(self, outbound: Outbound, scheme: str, resolver: Resolve) -> None:
        self._outbound = outbound
        self._scheme = scheme
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        async with asyncio.timeout(self._outbound.connect_timeout_s):  # aiohttp's own time-out begins after this
            addresses = await self._resolver(host, port)
        try:
            self._outbound.check_addresses(self._scheme, host, addresses)
        except LocationRefused as exc:
            raise _Refused(str(exc)) from exc
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Do nothing: the resolver holds no connection."""
