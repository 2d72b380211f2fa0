"""The front proxy: builds every part, hands each its collaborators, and stops them in reverse."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from types import TracebackType

from torchmoor.access.gate import Gate
from torchmoor.access.tls import Tls
from torchmoor.admin import AdminServer
from torchmoor.admin_models import ModelsAdmin
from torchmoor.api.application import Api
from torchmoor.api.cancellation import Cancellations
from torchmoor.api.gateway import Gateway
from torchmoor.dashboard.page import Dashboard
from torchmoor.errors import ConfigError
from torchmoor.fleet.health import HealthChecker
from torchmoor.fleet.instance import Instance, InstanceState
from torchmoor.fleet.operations import Operations
from torchmoor.fleet.recovery import Recovery
from torchmoor.fleet.registry import Registry
from torchmoor.fleet.scraper import MetricsScraper
from torchmoor.fleet.status import StatusPoller
from torchmoor.http.client import ClientLimits
from torchmoor.http.delivery import ExchangeMeans
from torchmoor.http.errand import Errands
from torchmoor.http.outgoing import ReplayBudget
from torchmoor.http.server import HttpServer
from torchmoor.http.sweeper import Sweeper
from torchmoor.http.upstream import Connector
from torchmoor.metrics import MetricsCollector
from torchmoor.model_metrics import ModelMetricsCollector
from torchmoor.observe.observing import RequestObserver, observing
from torchmoor.settings import Credentials, ProxySettings

logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
ERRAND_GRACE_S = 1.0


class Proxy:
    """Both planes, for as long as the context lasts.

    async with Proxy(settings, registry) as proxy:
        ...  # proxy.port, proxy.admin_port
    """

    def __init__(
        self,
        settings: ProxySettings,
        registry: Registry,
        *,
        rng: Random | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """wall: seconds since 1970, which signatures are dated by. Raises ConfigError if a certificate is no good."""
        limits, timeouts, listen = settings.limits, settings.timeouts, settings.listen
        self.registry = registry
        self.port = listen.port
        self.admin_port = listen.admin_port
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
        self.health = HealthChecker(registry, settings.health, self.recovery.tick)
        self.errands = Errands(connector, self.sweeper, timeout_s=timeouts.cancel_timeout_s)
        self.gateway = Gateway(
            settings, registry, rng or Random(), Cancellations(self.errands), self.recovery, self.health.suspect
        )
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
        self.tls = _make_tls(listen.tls_certificate, listen.tls_key)
        self.admin_tls = _make_tls(listen.admin_tls_certificate, listen.admin_tls_key)
        self.server = HttpServer(Api(self.gateway, self.operations, self.gate), means, self.sweeper, client_limits)
        self.status = StatusPoller(registry, settings.health, self.operations)
        self.observer: RequestObserver | None = None
        self._settings = settings
        self._stack = AsyncExitStack()
        registry.listen(self._on_change)

    async def __aenter__(self) -> Proxy:
        listen = self._settings.listen
        async with AsyncExitStack() as stack:
            self.sweeper.start()
            stack.callback(self.sweeper.stop)
            stack.callback(self._close_idle)
            stack.push_async_callback(self.errands.stop, grace_s=ERRAND_GRACE_S)
            await stack.enter_async_context(self.health)
            await stack.enter_async_context(self.operations)
            await stack.enter_async_context(self.status)
            self.observer = await stack.enter_async_context(observing(self._settings.observe))
            self.gateway.observer = self.observer
            denied = {} if self.gate is None else self.gate.num_denied
            log = None if self.observer is None else self.observer.log
            collector = MetricsCollector(self.registry, self.gateway.dispatchers(), denied, log)
            scraper = await stack.enter_async_context(MetricsScraper(self.registry))
            token = self._settings.credentials.admin_token
            dashboard = await stack.enter_async_context(
                Dashboard(self.registry, self.operations, self.gateway.dispatchers())
            )
            models = ModelsAdmin(self.registry, self.operations, ModelMetricsCollector(self.gateway.dispatchers()))
            admin = AdminServer(
                self.registry,
                collector,
                scraper,
                models,
                dashboard,
                listen.admin_host,
                listen.admin_port,
                token=token,
                tls=None if self.admin_tls is None else self.admin_tls.context,
            )
            await stack.enter_async_context(admin)
            self.admin_port = admin.port
            self.port = await self.server.start(
                listen.host, listen.port, None if self.tls is None else self.tls.context
            )
            stack.push_async_callback(self.server.stop, grace_s=STOP_GRACE_S)
            self._stack = stack.pop_all()
        logger.info("proxy ready host=%s port=%d admin_port=%d", listen.host, self.port, self.admin_port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        logger.info("proxy stopped")

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

    @property
    def runtime_url(self) -> str:
        """Where the data plane listens."""
        return _url("http" if self.tls is None else "https", self._settings.listen.host, self.port)

    @property
    def admin_url(self) -> str:
        """Where the admin plane listens."""
        return _url("http" if self.admin_tls is None else "https", self._settings.listen.admin_host, self.admin_port)

    def reload_credentials(self, credentials: Credentials) -> None:
        """Judge the requests to come by these. Raises ConfigError, and changes nothing."""
        old = self._settings.credentials
        if credentials.guards_data != old.guards_data or credentials.admin_token != old.admin_token:
            raise ConfigError("the first or last key or token, and a change of the admin token, need a restart")
        if self.gate is not None:
            self.gate.take(credentials)

    def on_hangup(self) -> None:
        """SIGHUP, where no configuration is to be read again: certificates and the log."""
        self.reload_tls()
        self.reopen_log()

    def reopen_log(self) -> None:
        """Go on in a new access log: the old one was moved away."""
        if self.observer is not None and self.observer.log is not None:
            self.observer.log.reopen()

    def reload_tls(self) -> None:
        """Take renewed certificates for the connections to come; if one is no good, the old one stays."""
        for tls in (self.tls, self.admin_tls):
            if tls is not None:
                try:
                    tls.reload()
                    logger.info("certificate read again")
                except ConfigError as error:
                    logger.error("the old certificate stays in use: %s", error)

    def _close_idle(self) -> None:
        for instance in self.registry.instances():
            instance.close_idle()


def _make_tls(certificate: str, key: str) -> Tls | None:
    """Raises ConfigError if the two are no good."""
    return Tls(Path(certificate), Path(key)) if certificate else None


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
