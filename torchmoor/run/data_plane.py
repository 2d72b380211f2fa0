"""The data plane: all that stands between a client's connection and an instance's, in one process.

Whether instances are ready is told it by others: by `app` in the same process, or by the parent of several.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

from torchmoor.config.access import Credentials
from torchmoor.config.settings import ProxySettings
from torchmoor.errors import ConfigError
from torchmoor.proxy.access.gate import Gate
from torchmoor.proxy.access.tls import Tls
from torchmoor.proxy.api.application import Api
from torchmoor.proxy.dispatch.cancellation import Cancellations
from torchmoor.proxy.dispatch.gateway import Gateway
from torchmoor.proxy.http.client import ClientLimits
from torchmoor.proxy.http.delivery import ExchangeMeans
from torchmoor.proxy.http.outgoing import ReplayBudget
from torchmoor.proxy.http.server import HttpServer
from torchmoor.proxy.http.subrequest import Errands
from torchmoor.proxy.http.timeouts import Sweeper
from torchmoor.proxy.http.upstream import Connector
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.operations import Operations
from torchmoor.proxy.instances.recovery import Recovery
from torchmoor.proxy.instances.registry import Registry
from torchmoor.proxy.observe.observing import RequestObserver, observing
from torchmoor.run.async_parts import make_async_inference

logger = logging.getLogger(__name__)

ERRAND_GRACE_S = 1.0


class DataPlane:
    """Listens from `listen` until the stack that it was given is closed."""

    def __init__(
        self,
        settings: ProxySettings,
        registry: Registry,
        suspect: Callable[[Instance], None],
        *,
        rng: Random | None = None,
        wall: Callable[[], float] = time.time,
        has_async_workers: bool = True,
    ) -> None:
        """suspect: told of an instance that seems to be dead. wall: seconds since 1970, which signatures are dated by.

        has_async_workers: False if another process works for all.

        Raises ConfigError if a certificate is no good.
        """
        limits, timeouts, listen = settings.limits, settings.timeouts, settings.listen
        self.registry = registry
        self.port = listen.port
        self.sweeper = Sweeper(timeouts.sweep_interval_s)
        self.budget = ReplayBudget(
            max_body_bytes=limits.max_replay_body_bytes, max_total_bytes=limits.max_replay_total_bytes
        )
        connector = Connector(
            self.sweeper,
            connect_timeout_s=timeouts.connect_timeout_s,
            idle_timeout_s=timeouts.pool_idle_timeout_s,
            max_header_bytes=4 * limits.max_header_bytes,
        )
        self.operations = Operations()
        self.recovery = Recovery(registry, settings.recovery)
        self.errands = Errands(connector, self.sweeper, timeout_s=timeouts.cancel_timeout_s)
        self.gateway = Gateway(settings, registry, rng or Random(), Cancellations(self.errands), self.recovery, suspect)
        means = ExchangeMeans(
            connector=connector,
            budget=self.budget,
            body_timeout_s=limits.body_timeout_s,
            max_error_body_bytes=limits.max_error_body_bytes,
        )
        client_limits = ClientLimits(
            max_header_bytes=limits.max_header_bytes,
            max_connections=limits.max_connections,
            header_timeout_s=limits.header_timeout_s,
            body_timeout_s=limits.body_timeout_s,
            keep_alive_timeout_s=limits.keep_alive_timeout_s,
        )
        self.gate = Gate(settings.access, settings.credentials, wall=wall) if settings.credentials.guards_data else None
        self.tls = make_tls(listen.tls_certificate, listen.tls_key)
        self.async_inference = make_async_inference(
            settings, registry, self.gateway.dispatchers(), self.gateway if has_async_workers else None
        )
        self.api = Api(self.gateway, self.operations, self.gate, self.async_inference)
        self.server = HttpServer(self.api, means, self.sweeper, client_limits)
        self.observer: RequestObserver | None = None
        self._observe = settings.observe
        self._listen = listen
        self._stop_grace_s = timeouts.stop_grace_s
        registry.listen(self._on_change)

    def on_need(self, wake: Callable[[], None]) -> None:
        """Have it called when a request waits for an instance to be started."""
        for dispatcher in self.gateway.dispatchers():
            dispatcher.on_held = wake

        def on_submitted(endpoint: str) -> None:
            if not self.registry.get_endpoint(endpoint).has_ready_instance():
                wake()

        if self.async_inference is not None:
            self.async_inference.on_submitted = on_submitted

    @property
    def num_denied(self) -> dict[str, int]:
        """Requests refused for their credentials, by kind of error."""
        return {} if self.gate is None else self.gate.num_denied

    async def start(self, stack: AsyncExitStack) -> None:
        """Everything but the listener; stops with the stack. Raises ConfigError if a log cannot be written."""
        self.observer = self.gateway.observer = await stack.enter_async_context(observing(self._observe))
        self.sweeper.start()
        stack.callback(self.sweeper.stop)
        stack.callback(self._close_idle)
        stack.push_async_callback(self.errands.stop, grace_s=ERRAND_GRACE_S)
        await stack.enter_async_context(self.operations)
        if self.async_inference is not None:
            await stack.enter_async_context(self.async_inference)

    async def listen(self, stack: AsyncExitStack, *, port: int, is_shared: bool = False) -> None:
        """Take connections until the stack is closed; then what runs may end. is_shared: with other processes."""
        tls = None if self.tls is None else self.tls.context
        self.port = await self.server.start(self._listen.host, port, tls, is_shared=is_shared)
        stack.push_async_callback(self.server.stop, grace_s=self._stop_grace_s)

    def take_credentials(self, credentials: Credentials) -> None:
        """Judge the requests to come by these."""
        if self.gate is not None:
            self.gate.take(credentials)

    def reload_tls(self) -> None:
        """Read the certificate again, if there is one."""
        if self.tls is not None:
            reload_tls(self.tls)

    def reopen_log(self) -> None:
        """Go on in a new access log: the old one was moved away."""
        if self.observer is not None and self.observer.log is not None:
            self.observer.log.reopen()

    def _on_change(self, instance: Instance) -> None:
        """Of an instance that is down or gone nothing will come: what it was doing goes elsewhere, or ends.

        Soon, and not now: an exchange may be what has found it out.
        """
        if instance.state is InstanceState.DOWN or self.registry.find(instance.name) is not instance:
            asyncio.get_running_loop().call_soon(self._give_up, instance)

    def _give_up(self, instance: Instance) -> None:
        for connection in list(self.server.connections):
            if connection.exchange is not None:
                connection.exchange.on_target_down(instance)

    def _close_idle(self) -> None:
        for instance in self.registry.instances():
            instance.close_idle()


def make_tls(certificate: str, key: str) -> Tls | None:
    """The two as connections use them; None without. Raises ConfigError if they are no good."""
    return Tls(Path(certificate), Path(key)) if certificate else None


def reload_tls(tls: Tls) -> None:
    """Take a renewed certificate for the connections to come; if it is no good, the old one stays."""
    try:
        tls.reload()
        logger.info("certificate read again")
    except ConfigError as error:
        logger.error("the old certificate stays in use: %s", error)


def check_replaceable(old: Credentials, new: Credentials) -> None:
    """Raise ConfigError if these cannot come in the place of those while requests run."""
    if new.guards_data != old.guards_data or new.admin_token != old.admin_token:
        raise ConfigError("the first or last key or token, and a change of the admin token, need a restart")
