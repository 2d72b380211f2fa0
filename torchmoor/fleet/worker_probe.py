"""Probe of an instance's worker, by the handler's status operation.

The worker answers the operation under any load (docs/instance-protocol.md), so silence means that it hangs. A handler
that does not know the operation is asked a few times; then only the other probes count.
"""

from __future__ import annotations

import logging

import aiohttp

from torchmoor.proxy.instances.instance import Instance
from torchmoor.wire import headers, operations
from torchmoor.wire.connection_errors import shows_nothing

logger = logging.getLogger(__name__)

HEADERS = {headers.OPERATION: operations.STATUS, "Content-Type": "application/json"}
READ_BYTES = 4096  # of an answer
MAX_TRIES = 3  # of a handler that has never answered; each try costs it an invocation
MARK = b'"instance"'  # the first key of our handlers' status


class WorkerProbe:
    """Probes one instance's worker."""

    __slots__ = ("instance", "_timeout", "_knows", "_is_silent", "_num_tries")

    def __init__(self, instance: Instance, timeout_s: float) -> None:
        self.instance = instance
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._knows = False  # the handler has answered the operation before
        self._is_silent = False
        self._num_tries = 0

    async def answers(self, client: aiohttp.ClientSession) -> bool:
        """Return False if the worker has answered before and does not now. Never raises for an instance's failure.

        Raises OSError if the probe is not sent, for lack of a descriptor, of a port, or of an answer by DNS.
        """
        if not self.instance.can_be_operated:
            return True
        if not self._knows:
            if self._num_tries >= MAX_TRIES:
                return True
            self._num_tries += 1
        instance = self.instance
        url = f"{instance.url()}/predictions/{instance.model}"
        try:
            async with client.post(url, data=b"{}", headers=HEADERS, timeout=self._timeout) as answer:
                is_answered = answer.status == 200 and MARK in await _read_beginning(answer.content)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if isinstance(error, OSError) and shows_nothing(error):
                raise
            is_answered = False
        if is_answered:
            self._knows, self._is_silent = True, False
        elif self._knows:  # also if TorchServe refuses: its queue fills up when the worker hangs
            level = logging.INFO if self._is_silent else logging.WARNING
            logger.log(level, "worker does not answer instance=%s", instance.name)
            self._is_silent = True
        return is_answered or not self._knows


async def _read_beginning(content: aiohttp.StreamReader) -> bytes:
    """Read the beginning of a status, until MARK; the rest may be long."""
    received = b""
    async for piece in content.iter_any():
        received += piece
        if MARK in received or len(received) >= READ_BYTES:
            break
    return received
