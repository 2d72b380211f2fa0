"""Breakers and slow start, driven by the results of requests.

A probe shows whether TorchServe has a worker; only requests show whether the worker answers. Breakers open for at most
half of a variant's ready instances: if more fail, the cause is likely elsewhere, and refusing all requests would make
the outage worse.

In slow start, an instance that becomes ready again gets a growing share of the usual work. It has fewer outstanding
requests and more free room than any other. Without slow start it would get all new work, and with a journal all of its
sessions would be rebuilt there at the same moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torchmoor.config.recovery import RecoverySettings
from torchmoor.proxy.instances.breaker import Breaker, BreakerState
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.wire.last_kept import LastKept

logger = logging.getLogger(__name__)

MAX_FAILED = 4096  # names of failed instances that are remembered: pods that are replaced get new names


class Recovery:
    """Updates `breaker` and `share` of all instances."""

    def __init__(self, registry: Registry, settings: RecoverySettings, *, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._settings = settings
        self._clock = clock
        self._known: dict[str, Instance] = {}
        # Names, because an instance that restarts becomes a new object; the one that failed last is the last.
        self._have_failed: LastKept[str, None] = LastKept(MAX_FAILED)
        self._back_since: dict[str, float] = {}
        for instance in registry.instances():
            self._on_change(instance)
        registry.listen(self._on_change)

    # Results of requests

    def on_answered(self, instance: Instance) -> None:
        """Reset the instance's count of failures in a row, which closes its breaker."""
        if instance.breaker.num_failures:
            self.restore(instance)

    def restore(self, instance: Instance) -> None:
        """Close the breaker because the instance, or another process's breaker, shows that it answers again."""
        if not self._registry.has(instance):
            return
        was_open = instance.breaker.state is not BreakerState.CLOSED
        instance.breaker.on_success()
        if was_open:
            logger.info("breaker closed instance=%s", instance.name)
            self._begin_slow_start(instance)
            self._registry.refresh(instance)

    def on_failed(self, instance: Instance) -> None:
        """Count a request that the instance lost or did not answer in time."""
        if not self._registry.has(instance):
            return
        breaker = instance.breaker
        was_open = breaker.state is BreakerState.OPEN
        breaker.on_failure(self._clock(), may_open=self._can_do_without(instance))
        if breaker.state is BreakerState.OPEN and not was_open:
            logger.warning("breaker open instance=%s failures=%d", instance.name, breaker.num_failures)
            self._registry.refresh(instance)

    def try_cut_off(self, instance: Instance) -> bool:
        """Open the breaker because another process's has opened. False if too many are open in this process."""
        if not self._can_do_without(instance):
            return False
        instance.breaker.open(self._clock())
        self._registry.refresh(instance)
        return True

    def _can_do_without(self, instance: Instance) -> bool:
        members = [m for m in self._registry.variant_of(instance).pool.members if m.state is InstanceState.READY]
        cut_off = [m for m in members if m is not instance and m.breaker.state is not BreakerState.CLOSED]
        return 2 * (len(cut_off) + 1) <= len(members)

    # Time

    def tick(self) -> None:
        """Advance the breakers and shares by the time that has passed; call a few times per second."""
        now = self._clock()
        for instance in self._registry.instances():
            if instance.breaker.tick(now):
                instance.trial = None
                self._registry.refresh(instance)
            since = self._back_since.get(instance.name)
            if since is not None:
                self._set_share(instance, now - since)

    def _begin_slow_start(self, instance: Instance) -> None:
        self._back_since[instance.name] = self._clock()
        self._set_share(instance, 0.0)

    def _set_share(self, instance: Instance, elapsed_s: float) -> None:
        instance.share = share_after(elapsed_s, self._settings)
        if instance.share == 1.0:
            self._back_since.pop(instance.name, None)
        self._registry.refresh(instance)

    def _on_change(self, instance: Instance) -> None:
        """React to an instance that came, went or changed its state."""
        name = instance.name
        if not self._registry.has(instance):
            if self._known.pop(name, None) is None:
                return
            self._back_since.pop(name, None)
            if instance.state is InstanceState.DRAINING:  # removed on purpose: the next of its name is new
                self._have_failed.pop(name, None)
            else:
                self._have_failed.keep(name, None)
            return
        if self._known.get(name) is not instance:
            self._known[name] = instance
            instance.breaker = Breaker(self._settings)
        if instance.state is InstanceState.READY:
            if name in self._have_failed:
                del self._have_failed[name]
                self._begin_slow_start(instance)
        elif instance.state is not InstanceState.STARTING:
            self._have_failed.keep(name, None)
            self._back_since.pop(name, None)
            instance.breaker = Breaker(self._settings)


def share_after(elapsed_s: float, settings: RecoverySettings) -> float:
    """Return an instance's share in slow start: it grows evenly from `least_share` to 1.0 over `slow_start_s`."""
    if elapsed_s >= settings.slow_start_s:
        return 1.0
    return settings.least_share + (1.0 - settings.least_share) * max(0.0, elapsed_s) / settings.slow_start_s
