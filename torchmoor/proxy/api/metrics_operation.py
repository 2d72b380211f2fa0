"""Prometheus' page on the data plane's port, where SageMaker reads it; the admin plane renders it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from torchmoor.errors import InternalFailure, ServiceUnavailable
from torchmoor.proxy.api.deferred_reply import DeferredReply, defer_operation
from torchmoor.proxy.api.replies import Handler
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.tasks import BackgroundTasks

logger = logging.getLogger(__name__)

PATH = b"/metrics"
TIMEOUT_S = 10.0

_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

TryStart = Callable[[Callable[[bytes | None], None]], bool]
"""Start to render the page: the callback gets it, or None on failure. False if too many are being rendered."""

MAX_CONCURRENT = 16  # each page asks every instance


class MetricsApi:
    """try_start: starts to render the page."""

    def __init__(self, dispatchers: Dispatchers, try_start: TryStart) -> None:
        self._dispatchers = dispatchers
        self._try_start = try_start

    def find_handler(self, method: bytes, path: bytes) -> Handler | None:
        return self._show if path == PATH and method == b"GET" else None

    def _show(self, request: Request, request_id: bytes) -> DeferredReply:
        return defer_operation(self._dispatchers, request, request_id, self._begin, timeout_s=TIMEOUT_S)

    def _begin(self, order: DeferredReply, body: bytes) -> None:
        def on_made(page: bytes | None) -> None:
            if page is None:
                order.fail(InternalFailure("The metrics page could not be rendered."))
            else:
                order.end(Reply(200, (_TEXT,), page))

        if not self._try_start(on_made):
            raise ServiceUnavailable("Too many requests for the metrics are in progress. Try again later.")


class MetricsPages:
    """Runs the admin plane's `make_page` in tasks until it is stopped."""

    def __init__(self, make_page: Callable[[], Awaitable[bytes]]) -> None:
        self._make_page = make_page
        self._tasks = BackgroundTasks(MAX_CONCURRENT)

    async def stop(self) -> None:
        """Cancel all pages; their callbacks are not called."""
        await self._tasks.cancel()

    def try_start(self, on_made: Callable[[bytes | None], None]) -> bool:
        """Make a page and pass it to the callback, or None if that fails. Returns False if too many are under way."""
        if self._tasks.is_full:
            return False

        async def make() -> None:
            page = None
            try:
                async with asyncio.timeout(TIMEOUT_S):  # not wait_for: Python 3.11's can lose a cancellation
                    page = await self._make_page()
            except Exception:
                logger.exception("fault in the metrics page")
            on_made(page)

        self._tasks.start(make())
        return True
