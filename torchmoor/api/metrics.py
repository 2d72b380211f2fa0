"""Prometheus' page on the data plane's port, where SageMaker looks for it; the admin plane makes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from torchmoor.api.gateway import Gateway
from torchmoor.api.order import Order
from torchmoor.errors import InternalFailure
from torchmoor.http.message import Reply, Request

logger = logging.getLogger(__name__)

PATH = b"/metrics"
TIMEOUT_S = 10.0
MAX_WAITING = 16  # of those who ask at a time; each round asks every instance

_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_BUSY = Reply(503, ((b"retry-after", b"1"),))


class MetricsApi:
    """make_page: the page, as it is now."""

    def __init__(self, gateway: Gateway, make_page: Callable[[], Awaitable[bytes]]) -> None:
        self._gateway = gateway
        self._make_page = make_page
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Whoever waits gets no page."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def handle(self, request: Request, request_id: bytes) -> Order | Reply:
        """Answer when the page is made."""
        if len(self._tasks) >= MAX_WAITING:
            return _BUSY
        return Order(request, request_id, self._begin, timeout_s=TIMEOUT_S, tell=self._gateway.tell)

    def _begin(self, order: Order, body: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, order: Order) -> None:
        try:
            order.end(Reply(200, (_TEXT,), await asyncio.wait_for(self._make_page(), TIMEOUT_S)))
        except Exception:
            logger.exception("fault in the metrics page")
            order.fail(InternalFailure("The metrics cannot be told."))
