"""Makes the metrics page for those who cannot await it: the data plane's requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from torchmoor.proxy.api.metrics_operation import TIMEOUT_S

logger = logging.getLogger(__name__)

MAX_MAKING = 16  # at a time; each asks every instance


class MetricsPages:
    """Until it is stopped. make_page: the page, as it is now."""

    def __init__(self, make_page: Callable[[], Awaitable[bytes]]) -> None:
        self._make_page = make_page
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Whoever waits gets no page."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def try_start(self, on_made: Callable[[bytes | None], None]) -> bool:
        """Make it, and give it to the callback; None if that fails. False if too many are being made."""
        if len(self._tasks) >= MAX_MAKING:
            return False

        async def make() -> None:
            page = None
            try:
                page = await asyncio.wait_for(self._make_page(), TIMEOUT_S)
            except Exception:
                logger.exception("fault in the metrics page")
            on_made(page)

        task = asyncio.get_running_loop().create_task(make())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True
