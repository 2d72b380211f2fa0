"""The handlers' operations (docs/instance-protocol.md): requests to instances that are not invocations.

Each has its own connection, no lease, and a time-out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp

from torchmoor.proxy.instances.instance import Instance
from torchmoor.tasks import BackgroundTasks
from torchmoor.wire import headers
from torchmoor.wire.json_values import parse_json

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 8 << 20
MAX_TASKS = 256


class OperationAnswer(NamedTuple):
    """An instance's answer. code: the handler's error code; empty if another handler answers."""

    status: int
    code: str
    body: bytes

    def content(self) -> dict[str, Any]:
        """Return the JSON object in the body; an empty one if the body is not a JSON object."""
        content = parse_json(self.body)
        return content if isinstance(content, dict) else {}


NOT_KNOWN = OperationAnswer(404, "", b"")


async def read_at_most(max_bytes: int, answer: aiohttp.ClientResponse) -> bytes | None:
    """Return an answer's body; None if it is longer."""
    received = bytearray()
    async for piece in answer.content.iter_any():
        received += piece
        if len(received) > max_bytes:
            return None
    return bytes(received)


class HandlerOperations:
    """Sends operations while the context lasts.

    tasks: what the data plane does with operations, in the background; they are cancelled at the end of the context.
    """

    def __init__(self) -> None:
        self._client: aiohttp.ClientSession | None = None
        self.tasks = BackgroundTasks(MAX_TASKS)

    async def __aenter__(self) -> HandlerOperations:
        # Connections are not reused: they may lead to a process that is gone.
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0))
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._client is not None
        await self.tasks.cancel()
        await self._client.close()

    async def ask(
        self, instance: Instance, operation: str, body: Mapping[str, object], *, timeout_s: float
    ) -> OperationAnswer | None:
        """Send an operation and return its answer; None if there is none or it is too long.

        A handler that is not torchmoor's is not asked; the answer says that it does not know the operation.
        """
        if not instance.can_be_operated:
            return NOT_KNOWN
        assert self._client is not None
        url = f"{instance.url()}/predictions/{instance.model}"
        fields = {
            headers.OPERATION: operation,
            headers.TIMEOUT_MS: str(int(timeout_s * 1000)),
            "Content-Type": "application/json",
        }
        try:
            async with self._client.post(
                url, data=json.dumps(body).encode(), headers=fields, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as answer:
                received = await read_at_most(MAX_ANSWER_BYTES, answer)
                if received is None:
                    logger.warning("operation's answer too long instance=%s name=%s", instance.name, operation)
                    return None
                return OperationAnswer(answer.status, answer.headers.get(headers.ERROR, ""), received)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("operation failed instance=%s name=%s error=%s", instance.name, operation, error)
            return None
