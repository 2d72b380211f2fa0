"""The data plane of one process: builds the listener, the dialects, the dispatchers and the connections to instances.

Other parts set the states of instances: the proxy in the same process, or the parent of several processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

from torchmoor.config.settings import ProxySettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.data_plane_view import Values
from torchmoor.fleet.process_commands import ProcessParts
from torchmoor.metrics.process_counts import ProcessCounts
from torchmoor.proxy.access.cors import note_answer
from torchmoor.proxy.access.gate import Gate
from torchmoor.proxy.access.tls import make_tls
from torchmoor.proxy.api.application import DataPlaneApplication
from torchmoor.proxy.api.control_operation import AnswerControl
from torchmoor.proxy.api.metrics_operation import MakePage, MetricsApi
from torchmoor.proxy.dispatch.callers import Callers
from torchmoor.proxy.dispatch.dispatcher import Dispatcher
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.dispatch.id_operations import IdOperations
from torchmoor.proxy.dispatch.moved_sessions import MovedSessions
from torchmoor.proxy.dispatch.recent_decisions import DecisionQuery
from torchmoor.proxy.fast_path.routes import FastRoutes
from torchmoor.proxy.http.arriving import ArrivingBodies
from torchmoor.proxy.http.connection_parts import ConnectionParts
from torchmoor.proxy.http.descriptors import find_limit, limit_connections, limit_files
from torchmoor.proxy.http.fields import note_nothing
from torchmoor.proxy.http.outgoing import ReplayBudget
from torchmoor.proxy.http.server import HttpServer
from torchmoor.proxy.http.spool import Spool
from torchmoor.proxy.http.subrequest import Subrequests
from torchmoor.proxy.http.sweeper import Sweeper
from torchmoor.proxy.http.upstream import Connector
from torchmoor.proxy.instances.handler_operations import HandlerOperations
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.recovery import Recovery
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.observe.observing import RequestObserver, observing
from torchmoor.run.async_parts import make_async_inference
from torchmoor.run.listening import listening_on
from torchmoor.wire import operations

logger = logging.getLogger(__name__)

SUBREQUEST_GRACE_S = 1.0


class DataPlane:
    """Accepts connections from `listen` until the exit stack passed to it is closed."""

    def __init__(
        self,
        settings: ProxySettings,
        registry: Registry,
        suspect: Callable[[Instance], None],
        control: AnswerControl,
        *,
        rng: Random | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        has_async_workers: bool = True,
    ) -> None:
        """suspect: called with an instance that seems to be dead, so that it is probed at once.

        control: answers for the control plane. wall: seconds since 1970, for signatures and expiries. clock: decides
        when deadlines have passed and breakers half open. has_async_workers: False if another process has them.
        Raises ConfigError if a certificate cannot be used, or if too few files may be open.
        """
        listen = settings.listen
        self.registry = registry
        self.port = listen.port
        self.sweeper = Sweeper(settings.timeouts.sweep_interval_s, clock=clock)
        self.parts = self._make_parts(settings, clock)
        self.operations = HandlerOperations()
        self.recovery = Recovery(registry, settings.recovery, clock=clock)
        self.subrequests = Subrequests(self.parts.connector, self.sweeper, timeout_s=settings.timeouts.cancel_timeout_s)
        callers = Callers(settings.callers, wall=wall) if settings.limits_callers else None
        self.dispatchers = Dispatchers(
            settings,
            registry,
            rng or Random(),
            IdOperations(self.subrequests, operations.CANCEL, operations.REQUEST_IDS),
            MovedSessions(registry, IdOperations(self.subrequests, operations.END_CLOSED, operations.SESSION_IDS)),
            self.recovery,
            suspect,
            callers,
        )
        self._num_limited: Counter[str] = Counter() if callers is None else callers.num_refused
        self.gate = Gate(settings.access, settings.credentials, wall=wall) if settings.credentials.guards_data else None
        self.tls = make_tls(listen.tls_certificate, listen.tls_key)
        self.async_inference = make_async_inference(
            settings, registry, self.dispatchers.all, self.dispatchers if has_async_workers else None
        )
        if self.async_inference is not None:
            self.async_inference.on_submitted = self._on_submitted
        self.application = DataPlaneApplication(
            self.dispatchers, self.operations, control, self.gate, self.async_inference
        )
        self.server = HttpServer(self.application, self.parts, self.sweeper)
        runtime, pages = self.application.runtime, self.application.pages
        self.server.fast_path = FastRoutes(self.parts, self.dispatchers, runtime, pages, self.gate)
        self.observer: RequestObserver | None = None
        self._settings = settings
        registry.listen(self._on_change)

    def _make_parts(self, settings: ProxySettings, clock: Callable[[], float]) -> ConnectionParts:
        """Make the connections' shared resources. Raises ConfigError if too few files may be open for a connection."""
        limits = settings.limits
        descriptors, reserved = find_limit(), limits.reserved_descriptors
        max_connections = limit_connections(limits.max_connections, descriptors=descriptors, reserved=reserved)
        if not max_connections:
            raise ConfigError(
                f"{descriptors:.0f} files may be open, and limits.reserved_descriptors keeps {reserved}: "
                "raise the limit (ulimit -n), or reserve fewer"
            )
        max_files = limit_files(max_connections, descriptors=descriptors, reserved=reserved)
        return ConnectionParts(
            limits=limits,
            websocket=settings.websocket,
            max_connections=max_connections,
            connector=Connector(
                self.sweeper,
                limits,
                settings.timeouts,
                max_connections=max_connections,
                note=note_answer if settings.listen.allowed_origins else note_nothing,
            ),
            arriving=ArrivingBodies(limits.max_arriving_bytes, clock=clock, on_dropped=self._count_dropped),
            spool=Spool(limits, max_files=max_files),
            budget=ReplayBudget(
                max_body_bytes=limits.max_replay_body_bytes, max_total_bytes=limits.max_replay_total_bytes
            ),
            continuations=ReplayBudget(
                max_body_bytes=limits.max_continued_bytes, max_total_bytes=limits.max_continued_total_bytes
            ),
        )

    def on_need(self, wake: Callable[[], None]) -> None:
        """Register a callback for when a request waits for an instance to be started."""
        self.dispatchers.on_need.append(wake)

    def _on_submitted(self, endpoint: str) -> None:
        """React to an asynchronous request."""
        found = self.registry.find_endpoint(endpoint)
        if found is not None and not found.has_ready_instance():
            self.dispatchers.wake()

    def _count_dropped(self, setting: str) -> None:
        self._num_limited[setting] += 1

    def counts(self) -> ProcessCounts:
        """Return the numbers that belong to no variant."""
        found: ProcessCounts = {
            "AccessDenied": {} if self.gate is None else dict(self.gate.num_denied),
            "CallerLimited": dict(self._num_limited),
            "WebSocketConnections": {"": self.application.sockets.num_open},
        }
        log = None if self.observer is None else self.observer.log
        if log is not None:
            found |= {"AccessLogLines": {"": log.num_lines}, "AccessLogDropped": {"": log.num_dropped}}
        return found

    def traffic(self) -> list[Dispatcher]:
        """Return each variant's numbers."""
        return self.dispatchers.all()

    async def refresh(self) -> None:
        """Do nothing: the numbers of one process are always up to date."""

    async def find_decisions(self, query: DecisionQuery) -> dict[str, Any]:
        """Return the last routing decisions."""
        return self.dispatchers.decisions.describe(query)

    def is_idle(self, instance: Instance) -> bool:
        """Return True if an instance has nothing outstanding."""
        return not instance.outstanding

    def tick(self) -> None:
        """Advance breakers and shares; call a few times per second."""
        self.recovery.tick()

    def show_metrics(self, stack: AsyncExitStack, make_page: MakePage) -> None:
        """Serve the metrics page on the data plane too, until the stack is closed."""
        self.application.metrics = metrics = MetricsApi(self.dispatchers, make_page)
        stack.push_async_callback(metrics.stop)

    async def start(self, stack: AsyncExitStack) -> None:
        """Start everything but the listener. Raises ConfigError if a log cannot be written."""
        self.observer = self.dispatchers.observer = await stack.enter_async_context(observing(self._settings.observe))
        self.sweeper.start()
        stack.callback(self.sweeper.stop)
        stack.callback(self._close_idle)
        stack.push_async_callback(self.subrequests.stop, grace_s=SUBREQUEST_GRACE_S)
        await stack.enter_async_context(self.operations)
        if self.async_inference is not None:
            await stack.enter_async_context(self.async_inference)

    async def listen(self, stack: AsyncExitStack, *, port: int | None = None, is_shared: bool = False) -> None:
        """Take connections until the stack is closed; running requests may then end.

        port: instead of the configured one. is_shared: other processes listen on it too.
        """
        listen, limits = self._settings.listen, self._settings.limits
        tls = None if self.tls is None else self.tls.get_context
        port = listen.port if port is None else port
        with listening_on(listen.runtime_url(port)):
            self.port = await self.server.start(listen.host, port, tls, is_shared=is_shared)
        stack.push_async_callback(self.server.stop, grace_s=self._settings.timeouts.stop_grace_s)
        allowed, configured = self.parts.max_connections, limits.max_connections
        logger.log(
            logging.WARNING if allowed < configured else logging.INFO,
            "client connections limited to %d, configured %d; open files limited to %.0f, reserved %d; "
            "long bodies in files limited to %.0f",
            allowed,
            configured,
            find_limit(),
            limits.reserved_descriptors,
            self.parts.spool.max_files,
        )

    def carry_out(self, command: Callable[[ProcessParts, *Values], None], *values: *Values) -> None:
        """Carry out an operator's command."""
        command(self, *values)

    def _on_change(self, instance: Instance) -> None:
        """End the requests at an instance that is down or gone, or send them to another.

        This happens in the loop's next turn, because an exchange may have caused this call.
        """
        if instance.state is InstanceState.DOWN or not self.registry.has(instance):
            asyncio.get_running_loop().call_soon(self._end_exchanges, instance)

    def _end_exchanges(self, instance: Instance) -> None:
        for connection in list(self.server.connections):
            if connection.exchange is not None:
                connection.exchange.on_target_down(instance)

    def _close_idle(self) -> None:
        for instance in self.registry.instances():
            instance.close_idle()
