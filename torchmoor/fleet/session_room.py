"""How many more sessions instances can take, by asking them.

Only instances of variants whose clients open sessions are asked, each by the handler's status operation, which no
load starves. The cost is bounded: so many questions a second over all instances. An instance that answers something
else is no handler of ours, and is left alone until it has been down.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from types import TracebackType

import aiohttp

from torchmoor.fleet.instance import Instance
from torchmoor.fleet.registry import Registry
from torchmoor.settings import HealthSettings

logger = logging.getLogger(__name__)

TICK_S = 0.25
MAX_STATUS_BYTES = 1 << 20


class SessionRooms:
    """Keeps `session_room` of ready instances up to date. on_told: hears of each answer."""

    def __init__(
        self, registry: Registry, settings: HealthSettings, on_told: Callable[[Instance], None] | None = None
    ) -> None:
        self._on_told = on_told
        self._registry = registry
        self._settings = settings
        self._allowed = 0.0  # questions that may be asked now
        self._next_question: dict[str, float] = {}
        self._others: set[str] = set()  # do not know the operation
        self._questions: dict[str, asyncio.Task[None]] = {}
        self._loop_task: asyncio.Task[None] | None = None
        self._client: aiohttp.ClientSession | None = None
        registry.listen(self._on_change)

    async def __aenter__(self) -> SessionRooms:
        timeout = aiohttp.ClientTimeout(total=self._settings.probe_timeout_s)
        self._client = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))
        self._loop_task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop_task is not None
        assert self._client is not None
        tasks = [self._loop_task, *self._questions.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.ask_due(loop.time())
            await asyncio.sleep(TICK_S)

    def ask_due(self, now: float) -> None:
        """Begin to ask those whose turn it is, the longest due first, as many as may be asked."""
        most = max(1.0, self._settings.max_status_per_s)
        self._allowed = min(most, self._allowed + self._settings.max_status_per_s * TICK_S)
        due = [
            instance
            for instance in self._registry.instances()
            if instance.is_ready
            and instance.name not in self._questions
            and instance.name not in self._others
            and self._next_question.get(instance.name, 0.0) <= now
            and self._registry.variant_of(instance).opens_sessions
        ]
        due.sort(key=lambda instance: self._next_question.get(instance.name, 0.0))
        for instance in due[: int(self._allowed)]:
            self._allowed -= 1
            self._next_question[instance.name] = now + self._settings.status_interval_s
            self._questions[instance.name] = asyncio.create_task(self._ask(instance))

    async def _ask(self, instance: Instance) -> None:
        assert self._client is not None
        url = f"http://{instance.host}:{instance.port}/predictions/{instance.model}"
        room: int | None = None
        try:
            headers = {"X-Torchmoor-Operation": "status", "Content-Type": "application/json"}
            async with self._client.post(url, data=b"{}", headers=headers) as answer:
                body = await answer.content.read(MAX_STATUS_BYTES)
                room = read_room(body) if answer.status == 200 else None
                if room is None and answer.status < 500:
                    logger.info("instance tells no session room instance=%s", instance.name)
                    self._others.add(instance.name)
        except (aiohttp.ClientError, OSError, TimeoutError):
            logger.debug("no status instance=%s", instance.name)
        finally:
            self._questions.pop(instance.name, None)
        if self._registry.find(instance.name) is instance and instance.is_ready:
            instance.session_room = room
            if self._on_told is not None:
                self._on_told(instance)

    def _on_change(self, instance: Instance) -> None:
        """What was known of an instance is no longer true once it is not ready, or gone."""
        if self._registry.find(instance.name) is not instance or not instance.is_ready:
            self._others.discard(instance.name)
            self._next_question.pop(instance.name, None)


def read_room(status: bytes) -> int | None:
    """Free sessions by a handler's status; None if it is not one."""
    try:
        sessions = json.loads(status)["sessions"]
        room = sessions["max"] - sessions["open"]
    except (ValueError, KeyError, TypeError):
        return None
    return max(0, room) if isinstance(room, int) else None
