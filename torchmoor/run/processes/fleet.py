"""Several proxy processes as one proxy: the parent, which serves no request itself.

It holds the port, the probes and the admin plane, tells every process of instances and their states, and relays what
one process learns of an instance to the others. Counts the processes share without it (fleet/shared_counts).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from torchmoor.admin.server import AdminServer, AdminSources
from torchmoor.config.settings import Credentials, ProxySettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.health import HealthChecker
from torchmoor.fleet.status import Status, StatusPoller
from torchmoor.proxy.dispatch.decisions import DecisionQuery, join_decisions
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.operations import Operations
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.instances.shared_counts import MAX_VARIANTS, SharedCounts, Slots
from torchmoor.run.app import Proxy, admin_url, runtime_url
from torchmoor.run.async_parts import make_async_inference
from torchmoor.run.data_plane import check_replaceable, make_tls, reload_tls
from torchmoor.run.processes.link import Assignment, Message, describe, write_status
from torchmoor.run.processes.port import reserve
from torchmoor.run.processes.process import Process
from torchmoor.run.processes.share import share_of
from torchmoor.run.processes.totals import Totals, VariantTotal

logger = logging.getLogger(__name__)

_UP = frozenset((InstanceState.READY, InstanceState.DRAINING))
REPORT_TIMEOUT_S = 1.0  # a scrape waits no longer for a process; then it has that one's last report


class ReplicaFleet:
    """Both planes, the data plane in `listen.processes` processes, for as long as the context lasts.

    uses_counts: whether the processes route by each other's counts; benchmarks show what it is worth.
    """

    def __init__(self, settings: ProxySettings, registry: Registry, *, uses_counts: bool = True) -> None:
        """Raises ConfigError if a certificate is no good, or this system cannot do it."""
        if not hasattr(os, "memfd_create") or not hasattr(os, "eventfd"):
            raise ConfigError("listen.processes must be 1 here: more than one need Linux")
        if sum(len(endpoint.variants) for endpoint in settings.endpoints) > MAX_VARIANTS:
            raise ConfigError(f"listen.processes must be 1 with more than {MAX_VARIANTS} variants")
        if settings.container.serves_models:
            raise ConfigError("listen.processes must be 1 where a platform loads models: one process knows which")
        if settings.container.shows_metrics:
            raise ConfigError(
                "listen.processes must be 1 with container.shows_metrics: the admin plane has the metrics"
            )
        listen = settings.listen
        make_tls(listen.tls_certificate, listen.tls_key)  # each process reads it; here only to refuse it at once
        self.admin_tls = make_tls(listen.admin_tls_certificate, listen.admin_tls_key)
        self.registry = registry
        self.port = listen.port
        self.admin_port = listen.admin_port
        self.totals = Totals(registry)
        self.processes: list[Process] = []
        self.health = HealthChecker(registry, settings.health, self._on_tick)
        self.operations = Operations()
        self.status = StatusPoller(registry, settings.health, self.operations, self)
        self.async_inference = make_async_inference(settings, registry, self.totals.variants, None)
        self._statuses: dict[str, Message] = {}  # the last of each instance, for processes to come
        self._settings = settings
        self._uses_counts = uses_counts
        self._slots = Slots()
        self._speaking: Process | None = None  # whose word is being passed on to the others
        self._counts: SharedCounts | None = None
        self._reports: dict[int, asyncio.Event] = {}
        self._decisions: dict[int, asyncio.Future[dict[str, Any]]] = {}  # of the newest round of questions
        self._num_rounds = 0
        self._wake: Callable[[], None] | None = None
        self._stack = AsyncExitStack()
        for endpoint in registry.endpoints():
            for variant in endpoint.variants:
                if variant.models is not None:
                    variant.models.on_expected = self._on_expected
        registry.listen(self._on_change)

    def _on_tick(self) -> None:
        """Breakers and shares are the processes' own."""

    async def __aenter__(self) -> ReplicaFleet:
        listen = self._settings.listen
        async with AsyncExitStack() as stack:
            self._prepare(stack)
            await stack.enter_async_context(self.health)
            await stack.enter_async_context(self.operations)
            await stack.enter_async_context(self.status)
            if self.async_inference is not None:
                await stack.enter_async_context(self.async_inference)
            admin = AdminServer(
                AdminSources(
                    registry=self.registry,
                    operations=self.operations,
                    traffic=self.totals.variants,
                    denied=self.totals.denied,
                    access_log=self.totals.log if self._settings.observe.access_log else None,
                    async_inference=self.async_inference,
                    refresh=self.refresh,
                    find_decisions=self.find_decisions,
                    has_asked_all=self.health.has_asked_all,
                ),
                host=listen.admin_host,
                port=listen.admin_port,
                token=self._settings.credentials.admin_token,
                tls=None if self.admin_tls is None else self.admin_tls.context,
            )
            await stack.enter_async_context(admin)
            self.admin_port = admin.port
            stack.push_async_callback(self._stop_processes)
            for process in self.processes:
                process.start()
            await asyncio.gather(*(process.first for process in self.processes))
            self._stack = stack.pop_all()
        logger.info("proxy ready host=%s port=%d processes=%d", listen.host, self.port, len(self.processes))
        return self

    def _prepare(self, stack: AsyncExitStack) -> None:
        """Port, map, event descriptors; the processes, not yet running."""
        listen, number = self._settings.listen, self._settings.listen.processes
        held, self.port = reserve(listen.host, listen.port)
        for each in held:
            stack.callback(each.close)
        file = SharedCounts.make_file(number)
        stack.callback(os.close, file)
        self._counts = SharedCounts(file, num_rows=number, row=None)
        stack.callback(self._close_counts)
        wakers = tuple(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(number))
        for waker in wakers:
            stack.callback(os.close, waker)
        settings = share_of(self._settings, number)
        for row in range(number):
            assignment = Assignment(
                settings=settings,
                port=self.port,
                row=row,
                num_rows=number,
                counts=file,
                wakers=wakers,
                uses_counts=self._uses_counts,
                log_level=logging.getLogger().getEffectiveLevel(),
            )
            self.processes.append(Process(assignment, self))
            self._reports[row] = asyncio.Event()
        for instance in self.registry.instances():
            self._counts.attach(instance, self._slots.take(instance.name))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        logger.info("proxy stopped")

    def _close_counts(self) -> None:
        counts, self._counts = self._counts, None
        if counts is not None:
            counts.close()

    async def _stop_processes(self) -> None:
        await asyncio.gather(*(process.stop() for process in self.processes))

    @property
    def runtime_url(self) -> str:
        """Where the data plane listens."""
        return runtime_url(self._settings.listen, self.port)

    @property
    def admin_url(self) -> str:
        """Where the admin plane listens."""
        return admin_url(self._settings.listen, self.admin_port)

    # Front, for torchmoor.run.reload

    def reload_credentials(self, credentials: Credentials) -> None:
        """Have every process judge the requests to come by these. Raises ConfigError, and changes nothing."""
        check_replaceable(self._settings.credentials, credentials)
        for process in self.processes:
            process.take_credentials(credentials)

    def reload_tls(self) -> None:
        """Have every process take a renewed certificate for the connections to come."""
        self._tell("reload_tls")
        if self.admin_tls is not None:
            reload_tls(self.admin_tls)

    def reopen_log(self) -> None:
        """Have every process go on in a new access log: the old one was moved away."""
        self._tell("reopen_log")

    def on_hangup(self) -> None:
        """SIGHUP, where no configuration is to be read again: certificates and the log."""
        self.reload_tls()
        self.reopen_log()
        logger.warning("certificates and the access log's file are taken anew; any other change needs a restart")

    def is_idle(self, instance: Instance) -> bool:
        """True if every process has heard that an instance drains, and none has anything outstanding there."""
        if self._counts is None or self.totals.is_in_use(instance.name):
            return False
        self._counts.refresh()
        return not instance.outstanding

    # Front, for torchmoor.fleet.autoscaler, too: is_idle and refresh

    def traffic(self) -> list[VariantTotal]:
        """What the clients of each variant did when `refresh` last asked."""
        return self.totals.variants

    def on_need(self, wake: Callable[[], None]) -> None:
        """Have it called when a request waits, at any process, for an instance to be started."""
        self._wake = wake

    # Numbers

    async def refresh(self) -> None:
        """Ask every process for its numbers, and add them up."""
        asked = [process for process in self.processes if process.is_ready]
        for process in asked:
            self._reports[process.row].clear()
            process.send("report")
        waits = [asyncio.create_task(self._reports[process.row].wait()) for process in asked]
        if waits:
            _, late = await asyncio.wait(waits, timeout=REPORT_TIMEOUT_S)
            for wait in late:
                wait.cancel()
        if self._counts is not None:
            self._counts.refresh()
        self.totals.compute()

    async def find_decisions(self, query: DecisionQuery) -> dict[str, Any]:
        """Those of all processes; of one that does not answer in time, none."""
        asked = [process for process in self.processes if process.is_ready]
        self._decisions = {process.row: asyncio.get_running_loop().create_future() for process in asked}
        self._num_rounds += 1
        for process in asked:
            process.send("decisions", round=self._num_rounds, query=query.as_message())
        told = []
        if asked:
            done, _ = await asyncio.wait(self._decisions.values(), timeout=REPORT_TIMEOUT_S)
            told = [each.result() for each in done if not each.cancelled()]
        return join_decisions(told, query.limit)

    # Instances, to the processes

    def _tell(self, kind: str, *, but: Process | None = None, **members: object) -> None:
        for process in self.processes:
            if process is not but:
                process.send(kind, **members)

    def _on_change(self, instance: Instance) -> None:
        if self._counts is None:
            return
        if not instance.is_ready or self.registry.find(instance.name) is not instance:
            self._statuses.pop(instance.name, None)
        if self.registry.find(instance.name) is not instance:
            self._counts.detach(instance.name)
            self._slots.give_back(instance.name)
            self._tell("removed", name=instance.name)
            return
        if not self._counts.is_counting(instance):
            self._counts.attach(instance, self._slots.take(instance.name))
        self._tell("instance", **self._describe(instance))

    def _describe(self, instance: Instance) -> Message:
        return {
            "facts": describe(instance),
            "state": instance.state.value,
            "slot": self._slots.take(instance.name),
            "last_start_s": self.registry.variant_of(instance).last_start_s,
        }

    def on_asked(self, instance: Instance) -> None:
        """What a process notes from now on, the answer may not know."""
        self._tell("asked", name=instance.name)

    def on_status(self, instance: Instance, status: Status) -> None:
        """What an instance says that it holds."""
        message = self._statuses[instance.name] = {"name": instance.name, **write_status(status)}
        self._tell("status", **message)

    def _on_expected(self, model: str, name: str) -> None:
        """An instance will load a model: a burst of requests for it, through whichever process, goes there."""
        self._tell("expecting", but=self._speaking, model=model, name=name)

    # From the processes

    def on_started(self, process: Process) -> None:
        """Tell a new process what there is."""
        for instance in self.registry.instances():
            process.send("instance", **self._describe(instance))
        for status in self._statuses.values():
            process.send("status", **status)

    def on_message(self, process: Process, message: Message) -> None:
        """Act on what a process has found out, and let the others know."""
        if message["kind"] == "report":
            self._take_report(process, message["report"])
            return
        if message["kind"] == "decisions":
            waiting = self._decisions.get(process.row)
            if waiting is not None and not waiting.done() and message["round"] == self._num_rounds:
                waiting.set_result(message["told"])
            return
        if message["kind"] == "held":
            if self._wake is not None:
                self._wake()
            return
        instance = self.registry.find(message["name"])
        if instance is None:
            return
        match message["kind"]:
            case "down":
                if instance.state in _UP and instance.port == message["port"]:
                    self.registry.set_state(instance.name, InstanceState.DOWN)
            case "suspect":
                self.health.suspect(instance)
            case "expecting":
                models = self.registry.variant_of(instance).models
                if models is not None and instance.is_ready:
                    self._speaking = process
                    models.expect(message["model"], instance.name)
                    self._speaking = None
            case "breaker":
                self._tell("breaker", but=process, name=instance.name, is_open=message["is_open"])

    def _take_report(self, process: Process, report: Message) -> None:
        self.totals.take(process.row, report)
        self.totals.show_instances()
        self._reports[process.row].set()
        for endpoint, name in report["opening"]:
            variant = self.registry.get_endpoint(endpoint).find_variant(name)
            if variant is not None:
                variant.opens_sessions = True

    def on_ended(self, process: Process) -> None:
        """Nothing of what it had outstanding is outstanding any more."""
        self.totals.end(process.row)
        waiting = self._decisions.get(process.row)
        if waiting is not None:
            waiting.cancel()
        self._reports[process.row].set()
        if self._counts is not None:
            self._counts.clear(process.row)


def make_front(settings: ProxySettings, registry: Registry) -> Proxy | ReplicaFleet:
    """The proxy, in as many processes as the settings say. Raises ConfigError."""
    return Proxy(settings, registry) if settings.listen.processes == 1 else ReplicaFleet(settings, registry)
