"""Draining of instances that left the configuration file or DNS: they finish their requests, then are removed."""

from __future__ import annotations

from asyncio import TimerHandle, get_running_loop
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from torchmoor.proxy.instances.instance import SERVING, Instance
from torchmoor.proxy.instances.registry import Registry

CHECK_INTERVAL_S = 0.1


class DrainOrder(NamedTuple):
    """How an instance is drained.

    successor: replaces it. is_until_down: it stays until it is down, because its sessions exist nowhere else.
    is_for_good: its name's drained state, which an operator may have set, is forgotten.
    """

    successor: Instance | None
    is_until_down: bool
    is_for_good: bool


class Drainer:
    """Drains the instances of a proxy. is_instance_idle: whether a draining instance has nothing left to do."""

    def __init__(self, registry: Registry, is_instance_idle: Callable[[Instance], bool]) -> None:
        self._registry = registry
        self._is_instance_idle = is_instance_idle
        self._orders: dict[str, DrainOrder] = {}
        self._timer: TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether no instance is draining."""
        return not self._orders

    def is_draining(self, name: str) -> bool:
        """Return whether an instance of that name is draining."""
        return name in self._orders

    def find_successor(self, name: str) -> Instance | None:
        """Return the instance that will replace a draining one, if any."""
        order = self._orders.get(name)
        return None if order is None else order.successor

    def drain(
        self, name: str, successor: Instance | None = None, *, is_until_down: bool = False, is_for_good: bool = False
    ) -> None:
        """Drain an instance; the last of several orders counts. An unknown one is replaced at once."""
        if self._registry.find(name) is not None:
            self._registry.send_off(name)
        self._orders[name] = DrainOrder(successor, is_until_down, is_for_good)
        if self._timer is None:
            self._timer = get_running_loop().call_later(0, self.check)

    def keep(self, name: str) -> None:
        """Cancel an instance's order, so that it serves again."""
        if self._orders.pop(name, None) is not None and self._registry.find(name) is not None:
            self._registry.call_back(name)

    def stop(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        """Remove the instances that are idle, and check again while others are draining."""
        self.stop()
        num_at: Counter[tuple[str, int]] = Counter()
        if any(order.is_until_down for order in self._orders.values()):
            num_at.update((each.host, each.port) for each in self._registry.instances())
        for name, order in list(self._orders.items()):
            instance = self._registry.find(name)
            if instance is None or self._can_remove(instance, order, num_at):
                self._remove(name, instance, order)
        if self._orders:
            self._timer = get_running_loop().call_later(CHECK_INTERVAL_S, self.check)

    def _can_remove(self, instance: Instance, order: DrainOrder, num_at: Counter[tuple[str, int]]) -> bool:
        """Return True if an instance can be removed. num_at: number of instances at each address.

        If two instances have one address, this one is down, because the other process uses the address.
        """
        if instance.state not in SERVING:  # its requests have failed
            return True
        must_stay = order.is_until_down and num_at[instance.host, instance.port] < 2
        return not must_stay and self._is_instance_idle(instance)

    def _remove(self, name: str, instance: Instance | None, order: DrainOrder) -> None:
        del self._orders[name]
        if instance is not None:
            if order.is_for_good:
                self._registry.dismiss(name)
            else:
                self._registry.remove(name)
        if order.successor is not None:
            self._registry.add(order.successor)
