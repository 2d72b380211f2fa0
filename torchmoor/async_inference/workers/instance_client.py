"""Sends one request's input to an instance and reads its answer, both as streams; knows nothing of queues and stores.

An input has a Content-Length: TorchServe's limits are by it, and it buffers what comes in chunks. The time that an
instance is given runs only while it is waited for; a slow object store does not use it up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType

import aiohttp

from torchmoor.async_inference.objects.object_store import Download
from torchmoor.errors import TorchmoorError
from torchmoor.wire import headers
from torchmoor.wire.marked_text import MarkedText

logger = logging.getLogger(__name__)

MAX_FIELD_BYTES = 16_384
READ_BYTES = 1 << 18


class InstanceUnreachable(TorchmoorError):
    """No connection came about: nothing has been done."""


class InstanceLost(TorchmoorError):
    """The connection ended before the answer did: anything may have been done."""


class InvocationTimedOut(TorchmoorError):
    """The instance has had all the time that the request gave it."""


class AnswerAborted(TorchmoorError):
    """The handler itself has ended an answer that had begun, and says why."""


class InvocationTimer:
    """The time that an instance still has."""

    __slots__ = ("_left_s", "_since", "_limit")

    def __init__(self, budget_s: float) -> None:
        self._left_s = budget_s
        self._since: float | None = None
        self._limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """It runs while this is held. Raises InvocationTimedOut."""
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
        """Somebody else is waited for; without effect if nothing runs."""
        if self._since is not None and self._limit is not None:
            self._left_s -= asyncio.get_running_loop().time() - self._since
            self._since = None
            if not self._limit.expired():
                self._limit.reschedule(None)

    def resume(self) -> None:
        """It is the instance again; without effect outside of `waiting`."""
        if self._since is None and self._limit is not None and not self._limit.expired():
            self._since = asyncio.get_running_loop().time()
            self._limit.reschedule(self._since + self._left_s)


class InstanceAnswer:
    """An answer whose head is there. Its body is read once, and only as fast as it is taken."""

    def __init__(self, response: aiohttp.ClientResponse, patience: InvocationTimer) -> None:
        self.status = response.status
        self.error_code = response.headers.get(headers.ERROR, "")
        self.retry_after = response.headers.get("Retry-After", "")
        self.content_type = _plain(response.headers.get("Content-Type", ""))
        self.custom_attributes = response.headers.get(headers.CUSTOM_ATTRIBUTES, "")
        self._response = response
        self._patience = patience

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body. Raises InstanceLost if it ends too early, InvocationTimedOut, AnswerAborted."""
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
        """The body's first bytes, up to a limit."""
        received = bytearray()
        while len(received) < limit and (piece := await self._read()):
            received += piece
        return bytes(received[:limit])

    async def _read(self) -> bytes:
        try:
            async with self._patience.waiting():
                return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise InstanceLost(f"The instance ended its answer too early: {error}") from error


def _plain(value: str) -> str:
    """A field's value, "" if it has what a store could not take as an object's: it would refuse it again and again."""
    return value if value.isascii() and value.isprintable() else ""


class InstanceClient:
    """For as long as the context lasts. Each request has a connection of its own: a kept one may lead to nobody."""

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
            cookie_jar=aiohttp.DummyCookieJar(),  # one request's must not go with the next
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.close()

    @asynccontextmanager
    async def send(
        self, url: str, headers: Mapping[str, str], body: bytes | Download, timeout_s: float
    ) -> AsyncIterator[InstanceAnswer]:
        """Send a request and hold its answer; the connection ends with the context.

        Raises InstanceUnreachable, InstanceLost, InvocationTimedOut, and what reading the body raises.
        """
        assert self._client is not None
        patience = InvocationTimer(timeout_s)
        feed = None if isinstance(body, bytes) else _InputStream(body, patience)
        size = len(body) if isinstance(body, bytes) else body.size
        data = body if feed is None else feed.chunks()
        fields = {**headers, "Content-Length": str(size)}
        try:
            async with patience.waiting():
                response = await self._client.post(url, data=data, headers=fields, allow_redirects=False)
        except aiohttp.ClientConnectorError as error:
            raise InstanceUnreachable(f"No connection to the instance: {error.strerror or error}") from error
        except TimeoutError as error:  # aiohttp's own, of the connection's making
            raise InstanceUnreachable("No connection to the instance in time.") from error
        except (aiohttp.ClientError, OSError) as error:
            if feed is not None and feed.error is not None:
                raise feed.error from error
            raise InstanceLost(f"The connection to the instance ended without an answer: {error}") from error
        try:
            if feed is not None:
                feed.has_answer = True
            yield InstanceAnswer(response, patience)
        finally:
            response.close()


class _InputStream:
    """An input on its way to an instance. error: why it could not be read to its end."""

    def __init__(self, download: Download, patience: InvocationTimer) -> None:
        self.error: Exception | None = None
        self.has_answer = False
        self._download = download
        self._patience = patience

    async def chunks(self) -> AsyncIterator[bytes]:
        """The object's; the instance's time stands still while the store is waited for."""
        source = aiter(self._download.chunks)
        while True:
            if not self.has_answer:
                self._patience.pause()
            try:
                chunk = await anext(source)
            except StopAsyncIteration:
                return
            except Exception as error:
                self.error = error
                raise
            finally:
                if not self.has_answer:
                    self._patience.resume()
            yield chunk
