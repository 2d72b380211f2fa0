"""Prometheus' page on the data plane's port, where SageMaker reads it; the admin plane renders it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from torchmoor.errors import InternalFailure
from torchmoor.proxy.api.deferred_reply import DeferredReply, defer_operation, in_task
from torchmoor.proxy.api.replies import Handler
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.http.message import Reply, Request
from torchmoor.tasks import BackgroundTasks

logger = logging.getLogger(__name__)

PATH = b"/metrics"
TIMEOUT_S = 10.0

_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

MakePage = Callable[[], Awaitable[bytes]]
"""Renders the page."""

MAX_CONCURRENT = 16  # each page asks every instance
TOO_MANY = "Too many requests for the metrics are in progress. Try again later."


class MetricsApi:
    """Answers with the page until it is stopped."""

    def __init__(self, dispatchers: Dispatchers, make_page: MakePage) -> None:
        self._dispatchers = dispatchers
        self._make_page = make_page
        self._running = BackgroundTasks(MAX_CONCURRENT)

    async def stop(self) -> None:
        """Cancel all pages."""
        await self._running.cancel()

    def find_handler(self, method: bytes, path: bytes) -> Handler | None:
        return self._show if path == PATH and method == b"GET" else None

    def _show(self, request: Request, request_id: bytes) -> DeferredReply:
        begin = in_task(self._running, self._answer, TOO_MANY)
        return defer_operation(self._dispatchers, request, request_id, begin, timeout_s=TIMEOUT_S)

    async def _answer(self, body: bytes) -> Reply:
        try:
            async with asyncio.timeout(TIMEOUT_S):  # not wait_for: Python 3.11's can lose a cancellation
                return Reply(200, (_TEXT,), await self._make_page())
        except Exception as error:
            logger.exception("fault in the metrics page")
            raise InternalFailure("The metrics page could not be rendered.") from error
