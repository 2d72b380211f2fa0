"""Metrics pages for the data plane, which receives them by a callback."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from torchmoor.proxy.api.metrics_operation import TIMEOUT_S
from torchmoor.tasks import BackgroundTasks

logger = logging.getLogger(__name__)

MAX_CONCURRENT = 16  # each page asks every instance


class MetricsPages:
    """Runs `make_page` in tasks until it is stopped."""

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
