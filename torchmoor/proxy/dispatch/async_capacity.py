"""Capacity of instances for asynchronous requests: leases like all others, which yield to waiting clients.

A lease is taken before a request is, so waiting requests stay in the durable queue, where the workers of every proxy
find them. While a client waits for an instance of the variant, none is given out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torchmoor.proxy.dispatch.dispatcher import Dispatcher
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.instances.instance import Instance, Lease
from torchmoor.proxy.instances.registry import Endpoint


class InstanceCapacityLease:
    """A CapacityLease (see torchmoor.async_inference.workers.capacity): an instance's lease."""

    def __init__(self, capacity: EndpointCapacity, dispatcher: Dispatcher, instance: Instance) -> None:
        self.instance = instance.name
        self.variant = instance.variant
        self.url = f"{instance.url()}{dispatcher.path.decode()}"
        self.max_body_bytes = instance.max_body_bytes
        self._capacity = capacity
        self._dispatcher = dispatcher
        self._instance = instance
        self._lease: Lease | None = instance.lease()

    def try_hold_body(self, num_bytes: int) -> bool:
        return self._lease is not None and self._lease.try_hold_body(num_bytes)

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
            self._dispatcher.on_free(self._instance)
            self._capacity.on_released(self.instance)

    def on_answered(self) -> None:
        if self._instance.breaker.num_failures:
            self._capacity.dispatchers.recovery.on_answered(self._instance)

    def on_failed(self, *, is_dead: bool) -> None:
        self._capacity.dispatchers.recovery.on_failed(self._instance)
        if is_dead:
            self._capacity.dispatchers.suspect(self._instance)

    def on_unreachable(self) -> None:
        self._capacity.dispatchers.report_unreachable(self._instance)

    def abandon(self, request_id: str) -> None:
        self._capacity.dispatchers.cancellations.send(self._instance, self._dispatcher.path, request_id)


class EndpointCapacity:
    """The Capacity (see torchmoor.async_inference.workers.capacity) of one endpoint."""

    def __init__(self, dispatchers: Dispatchers, endpoint: Endpoint) -> None:
        self.dispatchers = dispatchers
        self._endpoint = endpoint
        settings = endpoint.settings.async_inference
        self._most = None if settings is None else settings.max_concurrent_per_instance
        self._held: Counter[str] = Counter()  # by instance
        self._wake: list[Callable[[], None]] = []
        dispatchers.registry.listen(self._on_change)

    def close(self) -> None:
        """Forget the endpoint, which is not served any more."""
        self.dispatchers.registry.unlisten(self._on_change)

    def try_take(self) -> InstanceCapacityLease | None:
        """Lease the least loaded instance of a variant by weight; of another variant if that one is full."""
        chosen = self.dispatchers.choose(self._endpoint, None, None)
        others = [each for each in self.dispatchers.of(self._endpoint) if each is not chosen]
        for dispatcher in (chosen, *others):
            if dispatcher.num_waiting or not dispatcher.variant.settings.weight:
                continue
            pool = dispatcher.variant.pool
            full = frozenset(name for name, held in self._held.items() if self._is_full(pool.find(name), held))
            instance = pool.find_least_outstanding(full)
            if instance is not None:
                self._held[instance.name] += 1
                return InstanceCapacityLease(self, dispatcher, instance)
        return None

    def _is_full(self, instance: Instance | None, held: int) -> bool:
        return instance is None or held >= self._most_at(instance)

    def _most_at(self, instance: Instance) -> int:
        return self._most or max(1, instance.capacity // 2)

    def on_released(self, instance: str) -> None:
        """Count down a released lease; an instance may be free."""
        self._held[instance] -= 1
        if not self._held[instance]:
            del self._held[instance]
        self._wake_all()

    @property
    def num_ready(self) -> int:
        return sum(instance.is_ready for instance in self._endpoint.instances)

    @property
    def max_running(self) -> int:
        return sum(self._most_at(instance) for instance in self._endpoint.instances if instance.is_ready)

    def listen(self, wake: Callable[[], None]) -> None:
        self._wake.append(wake)

    def _wake_all(self) -> None:
        for wake in self._wake:
            wake()

    def _on_change(self, instance: Instance) -> None:
        if instance.endpoint == self._endpoint.name and instance.is_ready:
            self._wake_all()
