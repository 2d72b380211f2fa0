"""The reload of the configuration file, the keys and the certificate on SIGHUP, while requests run.

A reload can change the instances, the DNS names that list instances, the keys and tokens, and the certificate. An
instance that is removed or gets another address drains first: its running requests end there. All other settings are
fixed at the start. A file that changes them, or that is invalid, changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torchmoor.config.settings import Configuration
from torchmoor.errors import ConfigError
from torchmoor.fleet.discovery import Discovery
from torchmoor.fleet.draining import Drainer
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.app import Proxy
from torchmoor.run.static_instances import make_instances

logger = logging.getLogger(__name__)


class Reloader:
    """Compares the file with its previous content, and applies the difference.

    read: returns the checked configuration, with the credentials in its `proxy`.
    """

    def __init__(
        self,
        configuration: Configuration,
        read: Callable[[], Configuration],
        registry: Registry,
        proxy: Proxy,
        drainer: Drainer,
        discovery: Discovery,
    ) -> None:
        self._configuration = configuration
        self._read = read
        self._registry = registry
        self._proxy = proxy
        self._drainer = drainer
        self._discovery = discovery

    def reload(self) -> None:
        """Read the file again. An error is logged, and then nothing changes."""
        try:
            new = self._read()
            self._check_fixed(new)
            self._proxy.reload_credentials(new.proxy.credentials)
        except ConfigError as error:
            logger.error("the old configuration stays in use: %s", error)
            return
        self._proxy.reload_tls()
        self._apply(new)
        self._configuration = new
        logger.warning("configuration read again instances=%d discovery=%d", len(new.instances), len(new.discovery))

    def _check_fixed(self, new: Configuration) -> None:
        old_proxy = self._configuration.proxy.replace(credentials=new.proxy.credentials)
        changed = [name for name, value in old_proxy if value != getattr(new.proxy, name)]
        changed += ["launcher"] if new.launch != self._configuration.launch else []
        if changed:
            what = ", ".join("Endpoints or Autoscaling" if name == "endpoints" else name for name in changed)
            raise ConfigError(f"a change of {what} needs a restart; instances, keys and the certificate do not")

    def _apply(self, new: Configuration) -> None:
        before = {each.name: each for each in self._configuration.instances}
        wanted: dict[str, Instance] = {}
        for settings, instance in zip(new.instances, make_instances(new), strict=True):
            if before.get(settings.name) != settings or self._drainer.is_draining(settings.name):
                wanted[settings.name] = instance
        for name in before.keys() - {each.name for each in new.instances}:
            self._drainer.drain(name, is_for_good=True)
        for name, instance in wanted.items():
            if self._registry.find(name) is None and not self._drainer.is_draining(name):
                self._registry.add(instance)
            else:
                self._drainer.drain(name, instance)
        self._discovery.take(new.discovery)
        self._drainer.check()
