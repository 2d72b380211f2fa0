"""Whether an instance's worker answers, asked by the handler's status operation.

The operation is answered beside whatever work there is (docs/runtime-api.md), so no load starves it, and silence means
that the worker hangs. An instance that answers something else has no handler of ours, or none that knows the operation:
it is asked a few times at the most, and then judged by its probes alone.
"""

from __future__ import annotations

import logging

import aiohttp

from torchmoor.proxy.instances.instance import Instance
from torchmoor.wire import headers, operations

logger = logging.getLogger(__name__)

HEADERS = {headers.OPERATION: operations.STATUS, "Content-Type": "application/json"}
READ_BYTES = 4096  # of an answer
MAX_TRIES = 3  # of one that has never answered as a handler of ours does: its model has to work for each
MARK = b'"instance"'  # the first key of a status of ours


class WorkerStatus:
    """One instance's worker."""

    __slots__ = ("instance", "_timeout", "_knows", "_num_tries")

    def __init__(self, instance: Instance, timeout_s: float) -> None:
        self.instance = instance
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._knows = False  # it has answered the operation before
        self._num_tries = 0

    async def answers(self, client: aiohttp.ClientSession) -> bool:
        """False if the worker has answered before and now does not. Never raises for what an instance does."""
        if not self._knows:
            if self._num_tries >= MAX_TRIES:
                return True
            self._num_tries += 1
        instance = self.instance
        url = f"{instance.url()}/predictions/{instance.model}"
        try:
            async with client.post(url, data=b"{}", headers=HEADERS, timeout=self._timeout) as answer:
                is_told = answer.status == 200 and MARK in await _read_beginning(answer.content)
        except (aiohttp.ClientError, OSError, TimeoutError):
            is_told = False
        if is_told:
            self._knows = True
        elif self._knows:  # TorchServe's own refusal too: its queue fills up before a worker that takes nothing
            logger.info("worker gives no answer instance=%s", instance.name)
        return is_told or not self._knows


async def _read_beginning(content: aiohttp.StreamReader) -> bytes:
    """What a status of ours begins with, in however many pieces it comes; the rest may be long, and is not read."""
    received = b""
    async for piece in content.iter_any():
        received += piece
        if MARK in received or len(received) >= READ_BYTES:
            break
    return received
