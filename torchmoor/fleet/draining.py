"""Instances on their way out: they are sent nothing new, end what they do, and are forgotten or replaced.

Who takes an instance out of the configuration file, or finds that DNS names it no more, hands it over here.
"""

from __future__ import annotations

from asyncio import TimerHandle, get_running_loop
from collections import Counter
from typing import NamedTuple, Protocol

from torchmoor.proxy.instances.instance import SERVING, Instance
from torchmoor.proxy.instances.registry import Registry

CHECK_INTERVAL_S = 0.1  # how often an instance that is to leave is looked at


class Front(Protocol):
    """The running proxy."""

    def is_idle(self, instance: Instance) -> bool:
        """True if an instance that drains has nothing to do any more."""
        ...


class DrainOrder(NamedTuple):
    """successor: who comes in its place. is_until_down: it goes only when it is down: its sessions live nowhere else.

    is_for_good: another one of its name is not drained, whatever an operator has said of this one.
    """

    successor: Instance | None
    is_until_down: bool
    is_for_good: bool


class Drainer:
    """Of all instances of a proxy."""

    def __init__(self, registry: Registry, front: Front) -> None:
        self._registry = registry
        self._front = front
        self._orders: dict[str, DrainOrder] = {}
        self._timer: TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """True if no instance is on its way out."""
        return not self._orders

    def is_draining(self, name: str) -> bool:
        """True if an instance of that name is on its way out."""
        return name in self._orders

    def find_successor(self, name: str) -> Instance | None:
        """Who comes in the place of an instance that leaves, if anybody does."""
        order = self._orders.get(name)
        return None if order is None else order.successor

    def drain(
        self, name: str, successor: Instance | None = None, *, is_until_down: bool = False, is_for_good: bool = False
    ) -> None:
        """Have an instance leave; of several orders the last counts. One that nobody knows makes room at once."""
        if self._registry.find(name) is not None:
            self._registry.send_off(name)
        self._orders[name] = DrainOrder(successor, is_until_down, is_for_good)
        self._check_soon()

    def keep(self, name: str) -> None:
        """Have it stay."""
        if self._orders.pop(name, None) is not None and self._registry.find(name) is not None:
            self._registry.call_back(name)

    def stop(self) -> None:
        """Look after those that leave no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        """Let go of those that have nothing to do any more, and look again while there are others."""
        self.stop()
        at: Counter[tuple[str, int]] = Counter()
        if any(order.is_until_down for order in self._orders.values()):
            at.update((each.host, each.port) for each in self._registry.instances())
        for name, order in list(self._orders.items()):
            instance = self._registry.find(name)
            if instance is None or self._may_go(instance, order, at):
                self._let_go(name, instance, order)
        if self._orders:
            self._timer = get_running_loop().call_later(CHECK_INTERVAL_S, self.check)

    def _may_go(self, instance: Instance, order: DrainOrder, at: Counter[tuple[str, int]]) -> bool:
        """at: how many instances are said to be at a place. Where there are two it is down: another has its address."""
        if instance.state not in SERVING:  # what it was doing has been given up
            return True
        is_bound = order.is_until_down and at[instance.host, instance.port] < 2
        return not is_bound and self._front.is_idle(instance)

    def _let_go(self, name: str, instance: Instance | None, order: DrainOrder) -> None:
        del self._orders[name]
        if instance is not None:
            if order.is_for_good:
                self._registry.dismiss(name)
            else:
                self._registry.remove(name)
        if order.successor is not None:
            self._registry.add(order.successor)

    def _check_soon(self) -> None:
        if self._timer is None:
            self._timer = get_running_loop().call_later(0, self.check)
