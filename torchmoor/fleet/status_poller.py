"""Polls instances for their free sessions and loaded models, for routing.

Only instances whose answer matters are polled: those of variants that open sessions, and those with many models. They
answer the handler's status operation under any load. The cost is bounded by a rate over all instances, and instances
with long answers are polled less often. An instance without our handler is not polled again until it has been down,
unless its variant has many models.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass
from time import thread_time
from typing import Protocol

from torchmoor.config.health import HealthSettings
from torchmoor.fault_log import FaultLog
from torchmoor.proxy.instances.handler_operations import HandlerOperations, OperationAnswer
from torchmoor.proxy.instances.instance import SERVING, Instance
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.routing.model_placement import ModelPlacement
from torchmoor.proxy.routing.reported_status import ReportedStatus, parse_status
from torchmoor.tasks import cancel_all
from torchmoor.wire.operations import STATUS

logger = logging.getLogger(__name__)

TICK_S = 0.25
READING_SHARE = 0.05  # of the proxy's time, at most, is spent on reading answers


class StatusListener(Protocol):
    """Forwards statuses to other processes."""

    def on_asked(self, instance: Instance) -> None:
        """Handle that a query is being sent."""

    def on_status(self, instance: Instance, status: ReportedStatus) -> None:
        """Handle the query's answer. May be left out."""


@dataclass(slots=True)
class _Polled:
    """Results of the queries of one instance since it became ready. reading_s: time to read its last answer."""

    asked_at: float | None = None
    reading_s: float | None = None
    is_other: bool = False  # it does not know the operation
    is_misnamed: bool = False  # it reports another name than ours


class StatusPoller:
    """Updates what ready instances have reported, and the placement of models."""

    def __init__(
        self,
        registry: Registry,
        settings: HealthSettings,
        operations: HandlerOperations,
        listener: StatusListener | None,
    ) -> None:
        self._listener = listener
        self._registry = registry
        self._settings = settings
        self._operations = operations
        self._allowed = 0.0  # queries that the rate allows now
        self._polled: defaultdict[str, _Polled] = defaultdict(_Polled)  # by instance
        self._queries: dict[str, asyncio.Task[None]] = {}
        self._loop_task: asyncio.Task[None] | None = None
        self._faults = FaultLog(logger)
        registry.listen(self._on_change)

    async def __aenter__(self) -> StatusPoller:
        self._loop_task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._loop_task is not None
        await cancel_all([self._loop_task, *self._queries.values()])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                self.ask_due(loop.time())
            except Exception as error:
                self._faults.add("statuses could not be queried", error, has_trace=True)
            await asyncio.sleep(TICK_S)

    def ask_due(self, now: float) -> None:
        """Ask the instances that are due, the longest due first, as far as the rate allows."""
        most = max(1.0, self._settings.max_status_per_s)
        self._allowed = min(most, self._allowed + self._settings.max_status_per_s * TICK_S)
        num_read = sum(each.reading_s is not None for each in self._polled.values())
        due = [
            (due_at, instance)
            for instance in self._registry.instances()
            if instance.is_ready
            and instance.name not in self._queries
            and (due_at := self._due_at(instance, num_read)) is not None
            and due_at <= now
        ]
        due.sort(key=lambda entry: entry[0])
        for _, instance in due[: int(self._allowed)]:
            self._allowed -= 1
            self._polled[instance.name].asked_at = now
            self._queries[instance.name] = asyncio.create_task(self._ask(instance))

    def _due_at(self, instance: Instance, num_read: int) -> float | None:
        """Return when to ask an instance next; None if its answer does not matter. num_read: answers of instances."""
        variant, polled = self._registry.variant_of(instance), self._polled[instance.name]
        if polled.is_other or (variant.models is None and not variant.needs_status):
            return None
        if polled.asked_at is None:
            return 0.0
        is_busy = variant.models is not None and variant.models.is_expecting(instance.name)
        interval_s = self._settings.busy_status_interval_s if is_busy else self._settings.status_interval_s
        return polled.asked_at + max(interval_s, (polled.reading_s or 0.0) * num_read / READING_SHARE)

    async def _ask(self, instance: Instance) -> None:
        models = self._registry.variant_of(instance).models
        mark = 0 if models is None else models.mark()
        if self._listener is not None:
            self._listener.on_asked(instance)
        try:
            answer = await self._operations.ask(instance, STATUS, {}, timeout_s=self._settings.probe_timeout_s)
            if not self._registry.has(instance) or not instance.is_ready:
                return
            began = thread_time()  # not the clock: on a busy host every answer would seem long
            status = self._read(instance, answer, is_always_polled=models is not None)
            take_status(instance, status, models, mark)
            if self._listener is not None:
                self._listener.on_status(instance, status)
            self._polled[instance.name].reading_s = thread_time() - began
        except Exception as error:  # the next query may succeed
            self._faults.add("a status could not be read", error, has_trace=True)
        finally:
            self._queries.pop(instance.name, None)

    def _read(self, instance: Instance, answer: OperationAnswer | None, *, is_always_polled: bool) -> ReportedStatus:
        if answer is None:
            return ReportedStatus()
        status = parse_status(answer.content()) if answer.status == 200 else ReportedStatus()
        has_none = status.session_room is None and status.models is None
        if has_none and answer.status < 500 and not is_always_polled:
            logger.info("instance has no status operation instance=%s", instance.name)
            self._polled[instance.name].is_other = True
        if status.session_room is not None and status.instance not in (None, instance.name):
            self._warn_of_name(instance.name, status.instance)
        return status

    def _warn_of_name(self, name: str, reported: str | None) -> None:
        """Warn once of an instance whose session ids contain another name than the proxy's."""
        if not self._polled[name].is_misnamed:
            self._polled[name].is_misnamed = True
            logger.warning(
                "instance=%s reports the name %r, by which the proxy cannot find its sessions: "
                "set TORCHMOOR_INSTANCE=%s in its environment, or change its name here",
                *(name, reported, name),
            )

    def _on_change(self, instance: Instance) -> None:
        """Forget what is known of an instance that is down or removed."""
        is_known = self._registry.has(instance)
        if not is_known or not instance.is_ready:
            self._polled.pop(instance.name, None)
        forget_lost(self._registry, instance)


def take_status(instance: Instance, status: ReportedStatus, models: ModelPlacement | None, mark: int) -> None:
    """Apply a status to routing. mark: the placement's, from before the query."""
    instance.take_status(status)
    if models is not None and status.models is not None:
        models.report(instance.name, status.models, mark)


def forget_lost(registry: Registry, instance: Instance) -> None:
    """Remove the models of a changed instance that has restarted or is removed."""
    models = registry.variant_of(instance).models
    if models is not None and (not registry.has(instance) or instance.state not in SERVING):
        models.forget(instance.name)
