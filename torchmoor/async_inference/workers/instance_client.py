"""HTTP client that streams a request's input to an instance and its answer back. Knows no queue and no store.

Every input is sent with a Content-Length, because TorchServe's limits depend on it and TorchServe buffers chunked
bodies. An invocation's time runs only while the proxy waits for the instance, not while it waits for an object store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from torchmoor.async_inference.objects.object_store import Download
from torchmoor.errors import SHORTAGE, TorchmoorError
from torchmoor.wire import headers
from torchmoor.wire.connection_errors import is_shortage
from torchmoor.wire.marked_text import MarkedText

logger = logging.getLogger(__name__)

MAX_FIELD_BYTES = 16_384
READ_BYTES = 1 << 18


class InstanceUnreachable(TorchmoorError):
    """Raised when no connection could be made: the instance did nothing."""


class InstanceUnanswered(InstanceUnreachable):
    """Raised when a connection timed out, or found no address or route. A lost packet or DNS can cause this."""


class ProxyShortage(TorchmoorError):
    """Raised when the proxy lacked a descriptor, a port or memory for a connection: not the instance's fault."""


class InstanceLost(TorchmoorError):
    """Raised when the connection ended before the answer: the instance may have done anything."""


class InvocationTimedOut(TorchmoorError):
    """Raised when the request's InvocationTimeoutSeconds are used up."""


class AnswerAborted(TorchmoorError):
    """Raised when the handler aborted an answer that had begun. The message is the handler's reason."""


class InvocationTimer:
    """Counts the time that an instance may still take."""

    __slots__ = ("_left_s", "_since", "_limit")

    def __init__(self, budget_s: float) -> None:
        self._left_s = budget_s
        self._since: float | None = None
        self._limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Count the time within this context. Raises InvocationTimedOut."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limit = limit
                self.resume()
                try:
                    yield
                finally:
                    self.pause()
                    self._limit = None
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise InvocationTimedOut("The invocation timed out.") from error

    def pause(self) -> None:
        """Stop counting; does nothing if the time does not run."""
        if self._since is not None and self._limit is not None:
            self._left_s -= asyncio.get_running_loop().time() - self._since
            self._since = None
            if not self._limit.expired():
                self._limit.reschedule(None)

    def resume(self) -> None:
        """Count again; does nothing outside `waiting`."""
        if self._since is None and self._limit is not None and not self._limit.expired():
            self._since = asyncio.get_running_loop().time()
            self._limit.reschedule(self._since + self._left_s)


class InstanceAnswer:
    """An answer whose head has arrived. Its body can be read once, as fast as the caller takes it."""

    def __init__(self, response: aiohttp.ClientResponse, timer: InvocationTimer) -> None:
        self.status = response.status
        self.error_code = response.headers.get(headers.ERROR, "")
        self.retry_after = response.headers.get("Retry-After", "")
        self.content_type = _plain(response.headers.get("Content-Type", ""))
        self.custom_attributes = _plain(response.headers.get(headers.CUSTOM_ATTRIBUTES, ""))
        self._response = response
        self._timer = timer

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body. Raises InstanceLost if it ends too early, InvocationTimedOut, AnswerAborted."""
        text = MarkedText() if self.content_type.lower().startswith("text/plain") else None
        while piece := await self._read():
            if text is not None:
                piece = text.take(piece)
            if piece:
                yield piece
        if text is not None:
            rest, error = text.end()
            if error is not None:
                raise AnswerAborted(error)
            if rest:
                yield rest

    async def read(self, limit: int) -> bytes:
        """Return the first bytes of the body, up to a limit."""
        received = bytearray()
        while len(received) < limit and (piece := await self._read()):
            received += piece
        return bytes(received[:limit])

    async def _read(self) -> bytes:
        try:
            async with self._timer.waiting():
                return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise InstanceLost(f"The instance ended its answer too early: {error}") from error


def _plain(value: str) -> str:
    """Return a header value, or "" if an object store or a queue would always refuse it."""
    return value if value.isascii() and value.isprintable() else ""


class InstanceClient:
    """Sends requests within its context, each on a new connection: the peer of a kept connection may be gone."""

    def __init__(self, *, connect_timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> InstanceClient:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            timeout=self._timeout,
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            max_field_size=MAX_FIELD_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),  # cookies must not pass from one request to the next
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._client is not None
        await self._client.close()

    @asynccontextmanager
    async def send(
        self, url: str, headers: Mapping[str, str], body: bytes | Download, timeout_s: float
    ) -> AsyncIterator[InstanceAnswer]:
        """Send a request and yield its answer; the connection closes with the context.

        Raises InstanceUnreachable, ProxyShortage, InstanceLost, InvocationTimedOut, and what reading the body
        raises.
        """
        assert self._client is not None
        timer = InvocationTimer(timeout_s)
        feed = None if isinstance(body, bytes) else _InputStream(body, timer)
        size = len(body) if isinstance(body, bytes) else body.size
        data = body if feed is None else feed.chunks()
        fields = {**headers, "Content-Length": str(size)}
        try:
            async with timer.waiting():
                response = await self._client.post(url, data=data, headers=fields, allow_redirects=False)
        except aiohttp.ClientConnectorError as error:
            if is_shortage(error):
                raise ProxyShortage(SHORTAGE) from error
            kind = InstanceUnreachable if isinstance(error.os_error, ConnectionRefusedError) else InstanceUnanswered
            raise kind(f"No connection to the instance: {error.strerror or error}") from error
        except TimeoutError as error:  # from aiohttp, while connecting
            raise InstanceUnanswered("No connection to the instance in time.") from error
        except (aiohttp.ClientError, OSError) as error:
            if feed is not None and feed.error is not None:
                raise feed.error from error
            raise InstanceLost(f"The connection to the instance ended without an answer: {error}") from error
        try:
            if feed is not None:
                feed.has_answer = True
            yield InstanceAnswer(response, timer)
        finally:
            response.close()


class _InputStream:
    """An input that is being sent. error: why it could not be read to its end."""

    def __init__(self, download: Download, timer: InvocationTimer) -> None:
        self.error: Exception | None = None
        self.has_answer = False
        self._download = download
        self._timer = timer

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the object's chunks; the invocation's time stops while the store is waited for."""
        source = aiter(self._download.chunks)
        while True:
            if not self.has_answer:
                self._timer.pause()
            try:
                chunk = await anext(source)
            except StopAsyncIteration:
                return
            except Exception as error:
                self.error = error
                raise
            finally:
                if not self.has_answer:
                    self._timer.resume()
            yield chunk
