"""What instances say of themselves while somebody looks: sessions, memory by tier, turns, tokens.

Asked by the handler's status operation, each instance at most once in MAX_AGE_S however many look, and never when
nobody does. The ids of sessions, which are as good as credentials, are not kept. Instances with many models are not
asked here: their answer may be long, and torchmoor.admin.models has it.
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any

from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.operations import OperationAnswer, Operations
from torchmoor.proxy.instances.registry import Registry
from torchmoor.wire import operations

MAX_AGE_S = 1.5
WAIT_S = 0.5  # for answers, before what is known is shown
TIMEOUT_S = 2.0
MAX_QUESTIONS = 32  # at once
_UP = frozenset((InstanceState.READY, InstanceState.DRAINING))
SHOWN = ("device", "sessions", "memory", "turns", "tokens", "images", "engine")


class InstanceStatuses:
    """Use as a context."""

    def __init__(self, registry: Registry, operations: Operations) -> None:
        self._registry = registry
        self._operations = operations
        self._known: dict[str, dict[str, Any]] = {}
        self._asked_at: dict[str, float] = {}
        self._questions: dict[str, asyncio.Task[None]] = {}
        registry.listen(self._on_change)

    async def __aenter__(self) -> InstanceStatuses:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._questions.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def find(self, name: str) -> dict[str, Any] | None:
        """What an instance has said last; None if it does not say."""
        return self._known.get(name)

    async def refresh(self, wait_s: float = WAIT_S) -> None:
        """Ask those that were not asked lately, the longest ago first; wait a little for what they say."""
        now = asyncio.get_running_loop().time()
        due = [
            instance
            for instance in self._registry.instances()
            if (instance.state in _UP or instance.name in self._known)
            and self._registry.variant_of(instance).models is None
            and instance.name not in self._questions
            and now - self._asked_at.get(instance.name, -MAX_AGE_S) >= MAX_AGE_S
        ]
        due.sort(key=lambda instance: self._asked_at.get(instance.name, 0.0))
        for instance in due[: MAX_QUESTIONS - len(self._questions)]:
            self._asked_at[instance.name] = now
            self._questions[instance.name] = asyncio.create_task(self._ask(instance))
        if self._questions:
            await asyncio.wait(list(self._questions.values()), timeout=wait_s)

    async def refresh_all(self) -> None:
        """The same, until all have answered or will not: for who depends on it."""
        await self.refresh(TIMEOUT_S)

    async def _ask(self, instance: Instance) -> None:
        try:
            answer = await self._operations.ask(instance, operations.STATUS, {}, timeout_s=TIMEOUT_S)
        finally:
            self._questions.pop(instance.name, None)
        if self._registry.find(instance.name) is not instance:
            return
        status = _read(answer)
        if status is None:
            self._known.pop(instance.name, None)
        else:
            self._known[instance.name] = status

    def _on_change(self, instance: Instance) -> None:
        """An instance that is gone has nothing to say any more."""
        if self._registry.find(instance.name) is not instance:
            self._known.pop(instance.name, None)
            self._asked_at.pop(instance.name, None)


def _read(answer: OperationAnswer | None) -> dict[str, Any] | None:
    """What is shown of an answer; None if it is not one of a handler of ours."""
    try:
        status = json.loads(answer.body) if answer is not None and answer.status == 200 else None
    except ValueError:
        return None
    if not isinstance(status, dict) or not isinstance(status.get("sessions"), dict):
        return None
    return {key: status[key] for key in SHOWN if key in status}
