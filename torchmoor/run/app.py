"""The front proxy: builds its parts, connects them, and stops them in reverse order."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from random import Random

from torchmoor.admin.server import AdminServer
from torchmoor.config.credentials import Credentials
from torchmoor.config.settings import ProxySettings
from torchmoor.control.plane import describing_plane
from torchmoor.errors import ConfigError
from torchmoor.fleet.health import HealthChecker
from torchmoor.fleet.process_commands import reload_certificate, reopen_log, take_credentials
from torchmoor.fleet.status_poller import StatusPoller
from torchmoor.proxy.access.tls import make_tls, reload_tls
from torchmoor.proxy.api.control_operation import AnswerControl
from torchmoor.proxy.http.descriptors import raise_limit
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.data_plane import DataPlane
from torchmoor.run.listening import listening_on
from torchmoor.run.processes.parent import ProcessGroup

logger = logging.getLogger(__name__)


class Proxy:
    """The data plane, in one process or several, and the admin plane; they run while the context lasts.

    async with Proxy(settings, registry) as proxy:
        ...  # proxy.port, proxy.admin_port
    """

    def __init__(
        self,
        settings: ProxySettings,
        registry: Registry,
        control: AnswerControl | None = None,
        *,
        rng: Random | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raise this process's limit of open files, from which the data plane derives its own limits.

        control: answers for the control plane; None: endpoints are described only. rng, wall, clock: for the data plane
        of one process. Raises ConfigError.
        """
        raise_limit()
        listen = settings.listen
        self.registry = registry
        self._control = control or describing_plane(settings, registry).answer
        self.data: DataPlane | ProcessGroup
        if listen.processes == 1:
            self.data = DataPlane(settings, registry, self._suspect, self._control, rng=rng, wall=wall, clock=clock)
            listener = None
        else:
            self.data = listener = ProcessGroup(settings, registry, self._suspect)
        self.admin_port = listen.admin_port
        self.health = HealthChecker(registry, settings.health, self.data.tick)
        self.status = StatusPoller(registry, settings.health, self.data.operations, listener)
        self._admin_tls = make_tls(listen.admin_tls_certificate, listen.admin_tls_key)
        self._settings = settings
        self._stack = AsyncExitStack()

    def _suspect(self, instance: Instance) -> None:
        self.health.suspect(instance)

    async def __aenter__(self) -> Proxy:
        listen = self._settings.listen
        async with AsyncExitStack() as stack:
            await self.data.start(stack)
            await stack.enter_async_context(self.health)
            await stack.enter_async_context(self.status)
            admin = await self._start_admin(stack)
            if isinstance(self.data, DataPlane) and self._settings.container.shows_metrics:
                self.data.show_metrics(stack, admin.make_metrics_page)
            await self.data.listen(stack)
            self._stack = stack.pop_all()
        logger.info(
            "proxy ready host=%s port=%d admin_port=%d processes=%d",
            listen.host,
            self.port,
            self.admin_port,
            listen.processes,
        )
        return self

    async def _start_admin(self, stack: AsyncExitStack) -> AdminServer:
        credentials, control = self._settings.credentials, self._control
        if credentials.guards_data and not credentials.admin_token:  # only holders of a key may create endpoints
            control = describing_plane(self._settings, self.registry).answer
        admin = AdminServer(
            self.registry,
            self.data,
            self.health.has_asked_all,
            self._settings,
            control,
            tls=None if self._admin_tls is None else self._admin_tls.get_context,
        )
        listen = self._settings.listen
        with listening_on(listen.admin_url(listen.admin_port), "admin-"):
            await stack.enter_async_context(admin)
        self.admin_port = admin.port
        return admin

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()
        logger.info("proxy stopped")

    def reload_credentials(self, credentials: Credentials) -> None:
        """Check new requests with these credentials. Raises ConfigError, and keeps the old, if that needs a restart."""
        old = self._settings.credentials
        if credentials.guards_data != old.guards_data or credentials.admin_token != old.admin_token:
            raise ConfigError("the first or last key or token, and a change of the admin token, need a restart")
        self.data.carry_out(take_credentials, credentials)

    def reload_tls(self) -> None:
        """Use renewed certificates for new connections; a certificate that cannot be used changes nothing."""
        self.data.carry_out(reload_certificate)
        if self._admin_tls is not None:
            reload_tls(self._admin_tls)

    def on_hangup(self) -> None:
        """Handle SIGHUP where there is no configuration file: reload certificates, reopen the log."""
        self.reload_tls()
        self.data.carry_out(reopen_log)
        logger.warning("certificates are reloaded and the access log is reopened; any other change needs a restart")

    def describe(self, endpoints: Sequence[str], **more: str) -> str:
        """Return the line of JSON that tells other programs that the proxy is ready, and where."""
        where = {"ready": True, "runtime": self.runtime_url, "admin": self.admin_url, "endpoints": list(endpoints)}
        return json.dumps({**where, **more})

    @property
    def port(self) -> int:
        """The data plane's port."""
        return self.data.port

    @property
    def runtime_url(self) -> str:
        """The data plane's address."""
        return self._settings.listen.runtime_url(self.port)

    @property
    def admin_url(self) -> str:
        """The admin plane's address."""
        return self._settings.listen.admin_url(self.admin_port)
