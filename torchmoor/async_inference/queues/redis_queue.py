"""Queue in Redis or Valkey, shared by proxies on any hosts. redis_scripts.py defines its keys.

Its durability is the server's, which needs `appendonly yes`, `appendfsync always` and `maxmemory-policy noeviction`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import redis.asyncio as redis
from redis import ReadOnlyError, RedisError
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from torchmoor.async_inference.queues import redis_scripts
from torchmoor.async_inference.queues.queue import CLOCK_TOLERANCE_S, Queue
from torchmoor.async_inference.request import (
    CANCELLED,
    EXPIRED,
    AsyncOutcome,
    AsyncRecord,
    AsyncRequest,
    AsyncState,
    Backlog,
    CallerShare,
    Claim,
)
from torchmoor.config.async_queue import AsyncQueueSettings
from torchmoor.errors import ApiError, InferenceIdInUse, QueueFull, QueueUnavailable, ResultLocationInUse
from torchmoor.fault_log import FaultLog
from torchmoor.wire.store_urls import RedisAddress

logger = logging.getLogger(__name__)

PREFIX = "torchmoor:{async}:"
MAX_AT_ONCE = 500  # requests that one script wakes or drops: a script blocks the whole server


class RedisQueue(Queue):
    """client: returns bytes. clock: epoch seconds; None: the server's clock, the same for all proxies."""

    def __init__(
        self, client: redis.Redis, settings: AsyncQueueSettings, clock: Callable[[], float] | None = None
    ) -> None:
        self._client: Any = client
        self._settings = settings
        self._clock = clock
        self._faults = FaultLog(logger)

    async def submit(
        self, request: AsyncRequest, *, refusal: ApiError | None = None, share: CallerShare | None = None
    ) -> AsyncRequest:
        head, name, _ = request.to_json().rpartition('"received_at":')
        answer = await self._run(
            redis_scripts.SUBMIT,
            *(request.endpoint, request.inference_id, request.invocation_key or "", head + name, request.ttl_s),
            *(_argument(request.body), self._settings.max_pending, self._settings.max_pending_bytes, uuid4().hex),
            *(int(refusal is not None), *request.locations),
            *(("",) if share is None else (share.caller, share.max_requests, share.max_bytes)),
        )
        if answer[0] == b"in use":
            raise InferenceIdInUse(request.inference_id)
        if answer[0] == b"refused" and refusal is not None:
            raise refusal
        if answer[0] == b"taken":
            raise ResultLocationInUse
        if answer[0] == b"limited" and share is not None:
            share.check(int(answer[1]), int(answer[2]), len(request.body or b""))
        if answer[0] == b"full":
            raise QueueFull(request.endpoint, answer[1].decode())
        if answer[0] == b"new":
            return request.stamped(float(answer[1]))
        return AsyncRequest.from_json(answer[1], answer[2])

    async def claim(self, endpoint: str, lease_s: float, *, may_begin: bool = True) -> Claim | None:
        token = uuid4().hex
        expired = EXPIRED.to_json(), EXPIRED.reason
        limits = MAX_AT_ONCE, CLOCK_TOLERANCE_S
        found = await self._run(redis_scripts.CLAIM, endpoint, lease_s, token, int(may_begin), *expired, *limits)
        return None if found is None else Claim.restore(token, found)

    async def extend(self, claim: Claim, lease_s: float, *, instance: str = "") -> bool:
        return bool(await self._run(redis_scripts.EXTEND, claim.request.inference_id, claim.token, lease_s, instance))

    async def decide(self, claim: Claim, outcome: AsyncOutcome) -> bool:
        held = claim.request.inference_id, claim.token
        answer = await self._run(
            redis_scripts.DECIDE, *held, outcome.to_json(), outcome.reason, _argument(outcome.body)
        )
        return bool(answer)

    async def replace(self, claim: Claim, outcome: AsyncOutcome) -> bool:
        held = claim.request.inference_id, claim.token
        return bool(await self._run(redis_scripts.REPLACE, *held, outcome.to_json(), outcome.reason))

    async def finish(self, claim: Claim) -> bool:
        answer = await self._run(redis_scripts.FINISH, claim.request.inference_id, claim.token)
        if answer == b"undecided":
            raise ValueError("a request is finished after it is decided")
        return bool(answer == b"finished")

    async def retry(self, claim: Claim, delay_s: float, reason: str, *, counts: bool = True) -> bool:
        more = 0 if counts else -1
        return bool(
            await self._run(redis_scripts.RETRY, claim.request.inference_id, claim.token, delay_s, reason, more)
        )

    async def cancel(self, inference_id: str, outcome: AsyncOutcome = CANCELLED) -> AsyncState | None:
        answer = await self._run(redis_scripts.CANCEL, inference_id, outcome.to_json(), outcome.reason)
        if answer is None:
            return None
        end = AsyncOutcome.from_json(answer[1], None).state
        return end if end is AsyncState.CANCELLED else AsyncState(answer[0].decode())

    async def size_bytes(self) -> int:
        return 0

    async def get(self, inference_id: str) -> AsyncRecord | None:
        fields = await self._run(redis_scripts.GET, inference_id)
        return None if fields[0] is None else AsyncRecord.restore(fields)

    async def list(
        self,
        endpoint: str,
        state: AsyncState | None = None,
        after: str | None = None,
        limit: int = 100,
        *,
        is_newest_first: bool = False,
    ) -> Sequence[AsyncRecord]:
        states = [one.value for one in (AsyncState if state is None else (state,))]
        given = endpoint, after or "", limit, int(is_newest_first)
        return [AsyncRecord.restore(fields) for fields in await self._run(redis_scripts.LIST, *given, *states)]

    async def backlog(self, endpoint: str) -> Backlog:
        now, waiting, running, decided, heads = await self._run(redis_scripts.BACKLOG, endpoint)
        received = [AsyncRequest.from_json(head, None).received_at for head in heads]
        counts = {AsyncState.WAITING: waiting, AsyncState.RUNNING: running, AsyncState.DECIDED: decided}
        return Backlog.of(counts, min(received, default=None), float(now))

    async def forget(self) -> int:
        limits = self._settings.remember_s, self._settings.max_remembered, MAX_AT_ONCE
        return int(await self._run(redis_scripts.FORGET, *limits))

    async def close(self) -> None:
        await self._client.aclose()

    async def _run(self, script: str, *arguments: object) -> Any:
        """Run a script. Raises QueueUnavailable."""
        now = "" if self._clock is None else self._clock()
        task = asyncio.current_task()
        num_cancelled = 0 if task is None else task.cancelling()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                answer = await self._client.eval(redis_scripts.PRELUDE + script, 1, PREFIX, now, *arguments)
            if task is not None and task.cancelling() > num_cancelled:
                raise asyncio.CancelledError  # the client calls wait_for: Python 3.11's can lose a cancellation
            return answer
        except (RedisError, OSError) as exc:  # TimeoutError is an OSError
            if isinstance(exc, ReadOnlyError):  # a failover: the address may now be the new primary's
                await self._client.connection_pool.disconnect(inuse_connections=False)
            self._faults.add("asynchronous queue unavailable", exc)
            raise QueueUnavailable(
                "The queue of asynchronous requests cannot be used now: its server does not answer as it should. "
                "Try again."
            ) from exc


def connect(address: RedisAddress, limits: AsyncQueueSettings) -> redis.Redis:
    """Make a client with a time-out on every wait. It connects with the first command."""
    pool: Any = redis.BlockingConnectionPool(
        connection_class=redis.SSLConnection if address.tls else redis.Connection,
        **address.options(connect_timeout_s=limits.connect_timeout_s, timeout_s=limits.timeout_s),
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),  # for one cut while idle
        max_connections=limits.max_connections,
        timeout=limits.timeout_s,
    )
    return redis.Redis.from_pool(pool)


def _argument(body: bytes | None) -> bytes:
    """Encode a body for a script, so that an empty one differs from none."""
    return b"" if body is None else b"=" + body
