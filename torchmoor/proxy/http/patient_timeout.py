"""A time-out that does not count the time in which the process itself was held up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def patient_timeout(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError after this time, and not because the process itself was held up for as long.

    The loop runs timers that are due before it reads what has arrived. So the time has two halves: the second one
    begins when the loop has noticed the end of the first.
    """
    loop, half_s = asyncio.get_running_loop(), seconds / 2
    async with asyncio.timeout(None) as limit:
        halfway = loop.call_later(half_s, lambda: limit.reschedule(loop.time() + half_s))
        try:
            yield
        finally:
            halfway.cancel()
