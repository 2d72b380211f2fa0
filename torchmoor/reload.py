"""SIGHUP to `torchmoor serve`: the configuration file, the keys and the certificate read again while requests run.

What can change so: the instances, the keys and tokens, the certificate. An instance that is taken out, or gets another
address, is drained first: what runs there ends there. Everything else is fixed at the start, and a file that changes
it, or that is wrong, changes nothing at all.
"""

from __future__ import annotations

import logging
from asyncio import TimerHandle, get_running_loop
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Protocol

from torchmoor.config import Configuration
from torchmoor.errors import ConfigError
from torchmoor.fleet.instance import Instance
from torchmoor.fleet.registry import Registry
from torchmoor.settings import Credentials

logger = logging.getLogger(__name__)

LOOK_S = 0.1  # how often an instance that is to leave is looked at


class Front(Protocol):
    """The running proxy, as a reload changes it."""

    def reload_credentials(self, credentials: Credentials) -> None:
        """Judge the requests to come by these. Raises ConfigError, and changes nothing."""
        ...

    def reload_tls(self) -> None:
        """Take a renewed certificate for the connections to come."""
        ...

    def is_idle(self, instance: Instance) -> bool:
        """True if an instance that drains has nothing to do any more."""
        ...


class Reloader:
    """Compares what a file says now with what it said before, and applies the difference.

    read: the file and its credentials, checked. A configuration's `proxy` has the credentials in it.
    """

    def __init__(
        self, configuration: Configuration, read: Callable[[], Configuration], registry: Registry, front: Front
    ) -> None:
        self._configuration = configuration
        self._read = read
        self._registry = registry
        self._front = front
        self._leaving: dict[str, Instance | None] = {}  # by name: who comes in its place, once it has nothing to do
        self._timer: TimerHandle | None = None

    @property
    def is_at_rest(self) -> bool:
        """True if no instance is on its way out."""
        return not self._leaving

    def reload(self) -> None:
        """Read the file again. What is wrong with it is logged, and everything stays as it was."""
        try:
            new = self._read()
            self._check_fixed(new)
            self._front.reload_credentials(new.proxy.credentials)
        except ConfigError as error:
            logger.error("the old configuration stays in use: %s", error)
            return
        self._front.reload_tls()
        self._apply(new)
        self._configuration = new
        logger.warning("configuration read again instances=%d", len(new.instances))

    def stop(self) -> None:
        """Look after those that leave no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def _check_fixed(self, new: Configuration) -> None:
        old_proxy = replace(self._configuration.proxy, credentials=new.proxy.credentials)
        changed = [
            item.name for item in fields(old_proxy) if getattr(old_proxy, item.name) != getattr(new.proxy, item.name)
        ]
        if changed:
            what = ", ".join("Endpoints" if name == "endpoints" else name for name in changed)
            raise ConfigError(f"a change of {what} needs a restart; instances, keys and the certificate do not")

    def _apply(self, new: Configuration) -> None:
        before = {each.name: each for each in self._configuration.instances}
        wanted = dict(zip((each.name for each in new.instances), new.make_instances(), strict=True))
        for each in new.instances:
            if before.get(each.name) == each and each.name not in self._leaving:
                del wanted[each.name]
        for name in before:
            if name in wanted or name not in {each.name for each in new.instances}:
                self._leave(name, wanted.pop(name, None))
        for name, instance in wanted.items():
            if name in self._leaving:  # taken out a moment ago
                self._leaving[name] = instance
            else:
                self._registry.add(instance)
        self._look()

    def _leave(self, name: str, successor: Instance | None) -> None:
        if self._registry.find(name) is not None:
            self._registry.drain(name)
        self._leaving[name] = successor

    def _look(self) -> None:
        """Let go of those that have nothing to do any more, and look again while there are others."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for name, successor in list(self._leaving.items()):
            instance = self._registry.find(name)
            if instance is None or self._front.is_idle(instance):
                del self._leaving[name]
                if instance is not None:
                    self._registry.dismiss(name)
                if successor is not None:
                    self._registry.add(successor)
        if self._leaving:
            self._timer = get_running_loop().call_later(LOOK_S, self._look)
