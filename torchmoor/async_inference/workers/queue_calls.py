"""Calls of the queue that a worker repeats until the queue answers, because its request can only then go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

from torchmoor.async_inference.request import AsyncRequest
from torchmoor.async_inference.workers.context import WorkerContext
from torchmoor.errors import QueueUnavailable


async def until_answered(
    call: Callable[[], Awaitable[bool]], context: WorkerContext, request: AsyncRequest, fault: str
) -> bool:
    """Return the call's answer. fault: how the log names a call that the queue did not answer."""
    for failures in count(1):
        try:
            return await call()
        except QueueUnavailable as error:
            context.faults.add(fault, error, inference_id=request.inference_id)
            await asyncio.sleep(context.backoff.delay_s(failures))
    raise AssertionError("unreachable")
