"""Capacity of instances for asynchronous requests: leases like all others, but waiting clients come first.

A worker leases an instance before it takes a request, so waiting requests stay in the durable queue, where the workers
of every proxy find them. While a client waits for an instance of the variant, workers get no lease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torchmoor.errors import ApiError
from torchmoor.proxy.dispatch.dispatcher import Dispatcher
from torchmoor.proxy.dispatch.dispatchers import Dispatchers
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.proxy.instances.instance import SERVING, Instance, Lease


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
        """Forget the endpoint, which is no longer served."""
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
            instance = pool.find_least_loaded(full)
            if instance is not None:
                self._held[instance.name] += 1
                return InstanceCapacityLease(self, dispatcher, instance)
        return None

    def try_take_of(self, session_id: str, principal: str) -> InstanceCapacityLease | None:
        """Lease the instance that serves a session, unless it is full or clients wait for it."""
        found = self._find_holder(session_id, principal)
        if found is None:
            return None
        dispatcher, instance = found
        is_busy = instance.outstanding >= instance.capacity or self._is_full(instance, self._held[instance.name])
        if is_busy or dispatcher.num_waiting:
            return None
        self._held[instance.name] += 1
        return InstanceCapacityLease(self, dispatcher, instance)

    def find_url(self, session_id: str, principal: str) -> str | None:
        found = self._find_holder(session_id, principal)
        return None if found is None else f"{found[1].url()}{found[0].path.decode()}"

    def is_lost(self, session_id: str, principal: str) -> bool:
        return self.dispatchers.sessions.is_lost(self._endpoint, principal, session_id)

    def _find_holder(self, session_id: str, principal: str) -> tuple[Dispatcher, Instance] | None:
        try:
            session = self.dispatchers.sessions.get(self._endpoint, principal, session_id.encode())
        except ApiError:  # the key is gone, so no instance can continue the session
            return None
        if session is None:
            return None
        dispatcher = self.dispatchers.choose(self._endpoint, session, None)
        instance = dispatcher.chooser.find_holder(session, frozenset())
        return None if instance is None or instance.state not in SERVING else (dispatcher, instance)

    def _is_full(self, instance: Instance | None, held: int) -> bool:
        return instance is None or held >= self._most_at(instance)

    def _most_at(self, instance: Instance) -> int:
        return self._most or max(1, instance.capacity // 2)

    def on_released(self, instance: str) -> None:
        """Stop counting a released lease; its instance may be free."""
        self._held[instance] -= 1
        if not self._held[instance]:
            del self._held[instance]
        self._wake_all()

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
