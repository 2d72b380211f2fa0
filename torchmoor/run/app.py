"""The front proxy: builds every part, hands each its collaborators, and stops them in reverse."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random
from types import TracebackType
from typing import Any

from torchmoor.admin.metrics_page import MetricsPages
from torchmoor.admin.server import AdminServer, AdminSources
from torchmoor.config.settings import Credentials, ListenSettings, ProxySettings
from torchmoor.fleet.health import HealthChecker
from torchmoor.fleet.status import StatusPoller
from torchmoor.proxy.api.metrics_operation import MetricsApi
from torchmoor.proxy.dispatch.decisions import DecisionQuery
from torchmoor.proxy.dispatch.dispatcher import Dispatcher
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.data_plane import DataPlane, check_replaceable, make_tls, reload_tls

logger = logging.getLogger(__name__)


class Proxy(DataPlane):
    """Both planes in one process, for as long as the context lasts.

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
        super().__init__(settings, registry, self._suspect, rng=rng, wall=wall)
        self.admin_port = settings.listen.admin_port
        self.admin_tls = make_tls(settings.listen.admin_tls_certificate, settings.listen.admin_tls_key)
        self.health = HealthChecker(registry, settings.health, self.recovery.tick)
        self.status = StatusPoller(registry, settings.health, self.operations)
        self._settings = settings
        self._stack = AsyncExitStack()

    def _suspect(self, instance: Instance) -> None:
        self.health.suspect(instance)

    async def __aenter__(self) -> Proxy:
        listen = self._settings.listen
        async with AsyncExitStack() as stack:
            await self.start(stack)
            await stack.enter_async_context(self.health)
            await stack.enter_async_context(self.status)
            dispatchers = self.gateway.dispatchers()
            log = None if self.observer is None else self.observer.log
            admin = AdminServer(
                AdminSources(
                    registry=self.registry,
                    operations=self.operations,
                    traffic=dispatchers,
                    denied=self.num_denied,
                    access_log=log,
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
            if self._settings.container.shows_metrics:
                pages = MetricsPages(admin.make_metrics_page)
                stack.push_async_callback(pages.stop)
                self.api.metrics = MetricsApi(self.gateway, pages.try_start)
            await self.listen(stack, port=listen.port)
            self._stack = stack.pop_all()
        logger.info("proxy ready host=%s port=%d admin_port=%d", listen.host, self.port, self.admin_port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        logger.info("proxy stopped")

    # Front, for torchmoor.run.reload

    def reload_credentials(self, credentials: Credentials) -> None:
        """Judge the requests to come by these. Raises ConfigError, and changes nothing."""
        check_replaceable(self._settings.credentials, credentials)
        self.take_credentials(credentials)

    def reload_tls(self) -> None:
        """Take renewed certificates for the connections to come; if one is no good, the old one stays."""
        super().reload_tls()
        if self.admin_tls is not None:
            reload_tls(self.admin_tls)

    def on_hangup(self) -> None:
        """SIGHUP, where no configuration is to be read again: certificates and the log."""
        self.reload_tls()
        self.reopen_log()
        logger.warning("certificates and the access log's file are taken anew; any other change needs a restart")

    def is_idle(self, instance: Instance) -> bool:
        """True if an instance that drains has nothing to do any more."""
        return not instance.outstanding

    # Front, for torchmoor.fleet.autoscaler

    async def refresh(self) -> None:
        """All that is counted is counted in this process."""

    async def find_decisions(self, query: DecisionQuery) -> dict[str, Any]:
        """Those of this process, which are all."""
        return self.gateway.decisions.describe(query)

    def traffic(self) -> list[Dispatcher]:
        """What the clients of each variant do."""
        return self.gateway.dispatchers()

    @property
    def runtime_url(self) -> str:
        """Where the data plane listens."""
        return runtime_url(self._settings.listen, self.port)

    @property
    def admin_url(self) -> str:
        """Where the admin plane listens."""
        return admin_url(self._settings.listen, self.admin_port)


def runtime_url(listen: ListenSettings, port: int) -> str:
    """The data plane's address."""
    return _url("https" if listen.tls_certificate else "http", listen.host, port)


def admin_url(listen: ListenSettings, port: int) -> str:
    """The admin plane's address."""
    return _url("https" if listen.admin_tls_certificate else "http", listen.admin_host, port)


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
