"""The instances' own statuses, for the dashboard and the sessions view: sessions, memory by tier, turns, tokens.

Each instance is asked at most once in MAX_AGE_S, however many pages are open, and never while no page is open. Session
ids are credentials and are not kept. Instances with many models are asked by torchmoor.admin.models instead, since
their answers may be long.
"""

from __future__ import annotations

import asyncio
from typing import Any

from torchmoor.admin.http import read_content
from torchmoor.admin.views import SHOWN_VALUES
from torchmoor.proxy.instances.handler_operations import HandlerOperations, OperationAnswer
from torchmoor.proxy.instances.instance import SERVING, Instance
from torchmoor.proxy.instances.registry import Registry
from torchmoor.tasks import cancel_all
from torchmoor.wire import operations

MAX_AGE_S = 1.5
WAIT_S = 0.5  # for answers; then the page shows the last known ones
TIMEOUT_S = 2.0
MAX_QUERIES = 32  # at once
_TEXTS = frozenset(each.used.removeprefix("status.") for each in SHOWN_VALUES if each.unit == "text")


class InstanceStatuses:
    """Asks the handlers' operation `status`."""

    def __init__(self, registry: Registry, operations: HandlerOperations) -> None:
        self._registry = registry
        self._operations = operations
        self._known: dict[str, dict[str, Any]] = {}
        self._asked_at: dict[str, float] = {}
        self._queries: dict[str, asyncio.Task[None]] = {}
        self._free = asyncio.Semaphore(MAX_QUERIES)
        registry.listen(self._on_change)

    async def stop(self) -> None:
        """Cancel the queries that are under way."""
        await cancel_all(self._queries.values())

    def find(self, name: str) -> dict[str, Any] | None:
        """Return an instance's last status; None if it reports none."""
        return self._known.get(name)

    async def refresh(self, wait_s: float | None = WAIT_S) -> None:
        """Ask the instances that are due, the longest-known first, and wait a little for their answers."""
        now = asyncio.get_running_loop().time()
        due = [
            instance
            for instance in self._registry.instances()
            if (instance.state in SERVING or instance.name in self._known)
            and self._registry.variant_of(instance).models is None
            and instance.name not in self._queries
            and now - self._asked_at.get(instance.name, -MAX_AGE_S) >= MAX_AGE_S
        ]
        due.sort(key=lambda instance: self._asked_at.get(instance.name, 0.0))
        for instance in due:
            self._asked_at[instance.name] = now
            self._queries[instance.name] = asyncio.create_task(self._ask(instance))
        if self._queries:
            await asyncio.wait(list(self._queries.values()), timeout=wait_s)

    async def refresh_all(self) -> None:
        """As `refresh`, but wait until each instance has answered or timed out."""
        await self.refresh(None)

    async def _ask(self, instance: Instance) -> None:
        try:
            async with self._free:
                answer = await self._operations.ask(instance, operations.STATUS, {}, timeout_s=TIMEOUT_S)
        finally:
            self._queries.pop(instance.name, None)
        if not self._registry.has(instance):
            return
        status = _read(answer)
        if status is None:
            self._known.pop(instance.name, None)
        else:
            self._known[instance.name] = status

    def _on_change(self, instance: Instance) -> None:
        """Forget an instance that is gone."""
        if not self._registry.has(instance):
            self._known.pop(instance.name, None)
            self._asked_at.pop(instance.name, None)


def _read(answer: OperationAnswer | None) -> dict[str, Any] | None:
    """Return a status's shown texts and groups of numbers; None if another program than our handler answered."""
    status = read_content(answer)
    if not isinstance(status.get("sessions"), dict):
        return None
    return {key: value for key, value in status.items() if key in _TEXTS or _has_numbers(value)}


def _has_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(type(number) in (int, float) for number in value.values())
