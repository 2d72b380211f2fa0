"""All endpoints and instances: they come, go and change their states, and other parts register callbacks for that.

Owned by one event loop: every call is synchronous and made on that loop's thread. Does not know sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from torchmoor.config.routing import EndpointSettings
from torchmoor.errors import UnknownEndpoint, UnknownInstance, UnknownVariant
from torchmoor.proxy.instances.dns_source import DnsSource
from torchmoor.proxy.instances.endpoint import Endpoint, Variant
from torchmoor.proxy.instances.instance import SERVING, Instance, InstanceState
from torchmoor.proxy.routing.reported_status import ReportedStatus

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EndpointWatcher(NamedTuple):
    """Callbacks for an endpoint that is served, gets no new requests, and is gone with its instances."""

    on_served: Callable[[Endpoint], None]
    on_retired: Callable[[Endpoint], None]
    on_forgotten: Callable[[Endpoint], None]


def _ignore(endpoint: Endpoint) -> None:
    """Do nothing about an endpoint."""


class Registry:
    """All endpoints and instances, which come and go.

    An endpoint is staged, so that its instances can start; served, instead of an earlier one of its name, if there is
    one; retired, when it gets no new requests; and forgotten, when its instances are gone.

    A drain belongs to the instance's name: it lasts through crashes and restarts until the operator ends it. An
    instance that leaves (torchmoor.fleet.draining) gets no new work either.
    """

    def __init__(self, endpoints: Iterable[EndpointSettings], *, is_copy: bool = False) -> None:
        """is_copy: the original is in another process, which logs the instances that go down."""
        self._is_copy = is_copy
        self._down: set[str] = set()  # names of instances that went down and have not come back
        self._endpoints: dict[str, Endpoint] = {}  # served
        self._generations: dict[tuple[str, int], Endpoint] = {}
        self._watchers: list[EndpointWatcher] = []
        self._instances: dict[str, Instance] = {}
        self._drained: set[str] = set()  # names that an operator has drained
        self._leaving: set[str] = set()
        self.sources: dict[str, DnsSource] = {}  # DNS names that list instances
        self._listeners: list[Callable[[Instance], None]] = []
        for settings in endpoints:
            self.serve(self.stage(settings))

    def listen(self, listener: Callable[[Instance], None]) -> None:
        """Register a callback for every instance that came, went or changed its state."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[Instance], None]) -> None:
        """Drop a callback."""
        self._listeners.remove(listener)

    def _notify(self, instance: Instance) -> None:
        for listener in self._listeners:
            listener(instance)

    # Endpoints

    def watch(
        self,
        on_served: Callable[[Endpoint], None],
        on_retired: Callable[[Endpoint], None] = _ignore,
        on_forgotten: Callable[[Endpoint], None] = _ignore,
    ) -> None:
        """Register callbacks; on_served is called at once for each endpoint that is served."""
        self._watchers.append(EndpointWatcher(on_served, on_retired, on_forgotten))
        for endpoint in self._endpoints.values():
            on_served(endpoint)

    def map_served(self, make: Callable[[Endpoint], T]) -> Mapping[Endpoint, T]:
        """Return a table that has `make(endpoint)` for each endpoint that is served, now and later."""
        table: dict[Endpoint, T] = {}
        self.watch(lambda endpoint: table.update({endpoint: make(endpoint)}), on_retired=table.__delitem__)
        return table

    def stage(self, settings: EndpointSettings, generation: int = 0) -> Endpoint:
        """Add an endpoint that may have instances and gets no requests yet. Raises ConfigError."""
        endpoint = Endpoint(settings, generation)
        assert (endpoint.name, generation) not in self._generations
        self._generations[endpoint.name, generation] = endpoint
        return endpoint

    def serve(self, endpoint: Endpoint) -> None:
        """Send all new requests of this name to the endpoint; the endpoint that it replaces is retired."""
        replaced = self._endpoints.get(endpoint.name)
        self._endpoints[endpoint.name] = endpoint
        if replaced is not None:
            self._tell_retired(replaced)
        for watcher in self._watchers:
            watcher.on_served(endpoint)

    def retire(self, endpoint: Endpoint) -> None:
        """Send an endpoint no new request."""
        if self._endpoints.get(endpoint.name) is endpoint:
            del self._endpoints[endpoint.name]
            self._tell_retired(endpoint)

    def forget(self, endpoint: Endpoint) -> None:
        """Remove an endpoint that is not served and has no instances."""
        assert not endpoint.instances
        assert self._endpoints.get(endpoint.name) is not endpoint
        del self._generations[endpoint.name, endpoint.generation]
        for watcher in self._watchers:
            watcher.on_forgotten(endpoint)

    def _tell_retired(self, endpoint: Endpoint) -> None:
        for watcher in self._watchers:
            watcher.on_retired(endpoint)

    def endpoints(self) -> Sequence[Endpoint]:
        return list(self._endpoints.values())

    def find_endpoint(self, name: str) -> Endpoint | None:
        return self._endpoints.get(name)

    def get_endpoint(self, name: str) -> Endpoint:
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            raise UnknownEndpoint(name)
        return endpoint

    # Instances

    def instances(self) -> Sequence[Instance]:
        """Return the instances of all endpoints."""
        return list(self._instances.values())

    def find(self, name: str) -> Instance | None:
        return self._instances.get(name)

    def has(self, instance: Instance) -> bool:
        """Return False for an instance that is gone, even if another one has its name."""
        return self._instances.get(instance.name) is instance

    def add(self, instance: Instance) -> None:
        """Add an instance, replacing one of the same name. Raises UnknownEndpoint, UnknownVariant."""
        endpoint = self._generations.get((instance.endpoint, instance.generation))
        if endpoint is None:
            raise UnknownEndpoint(instance.endpoint)
        variant = endpoint.find_variant(instance.variant)
        if variant is None:
            raise UnknownVariant(instance.variant, endpoint.name, (each.name for each in endpoint.variants))
        was_down = instance.name in self._down
        if instance.name in self._instances:
            self.remove(instance.name)
        if was_down:
            self._down.add(instance.name)
        self._instances[instance.name] = instance
        self._leaving.discard(instance.name)
        instance.is_drained = self.is_drained(instance.name)
        instance.state = self._with_drain(instance, instance.state)
        endpoint.instances.append(instance)
        variant.pool.add(instance)
        instance.on_load = variant.pool.update
        self._notify(instance)
        logger.info("instance added instance=%s endpoint=%s", instance.name, instance.endpoint)

    def remove(self, name: str) -> None:
        """Remove an instance; its running requests end by themselves. Raises UnknownInstance."""
        instance = self._get(name)
        del self._instances[name]
        self._generations[instance.endpoint, instance.generation].instances.remove(instance)
        self.variant_of(instance).pool.remove(instance)
        self._leaving.discard(name)
        self._down.discard(name)
        instance.close_idle()
        self._notify(instance)
        logger.info("instance removed instance=%s endpoint=%s", name, instance.endpoint)

    def dismiss(self, name: str) -> None:
        """Remove an instance and its drain. Raises UnknownInstance."""
        self.remove(name)
        self._drained.discard(name)

    def set_state(self, name: str, state: InstanceState) -> None:
        """Set the state that a probe or the launcher found. Raises UnknownInstance."""
        instance = self._get(name)
        state = self._with_drain(instance, state)
        if instance.state is state:
            return
        self._log_change(instance, state)
        instance.state = state
        if state is InstanceState.DOWN:
            instance.take_status(ReportedStatus())
            instance.close_idle()
        self.refresh(instance)

    def _log_change(self, instance: Instance, state: InstanceState) -> None:
        """Log a change of state: as a warning, if an instance that served goes down or has come back."""
        name, before = instance.name, instance.state
        is_notable = False
        if before is InstanceState.READY and state is InstanceState.DOWN:
            self._down.add(name)
            is_notable = True
        elif state in SERVING and name in self._down:
            self._down.discard(name)
            is_notable = True
        level = logging.WARNING if is_notable and not self._is_copy else logging.INFO
        logger.log(level, "instance state instance=%s from=%s to=%s", name, before.value, state.value)

    def drain(self, name: str, *, is_resumable: bool = False) -> None:
        """Send an instance no new work, even after its restart. Raises UnknownInstance.

        is_resumable: the autoscaler drains it. An operator's drain replaces such a drain.
        """
        instance = self._get(name)
        before, state = (instance.is_drained, instance.is_resumable), instance.state
        instance.is_drained, instance.is_resumable = True, is_resumable
        self._hold(name, self._drained)
        if instance.state is state and before != (True, is_resumable):
            self.refresh(instance)

    def resume(self, name: str) -> None:
        """End a drain. Raises UnknownInstance."""
        instance = self._get(name)
        state, instance.is_drained, instance.is_resumable = instance.state, False, False
        self._release(name, self._drained)
        if instance.state is state:
            self.refresh(instance)

    def is_drained(self, name: str) -> bool:
        """Return True while an operator drains it, whatever its state."""
        return name in self._drained

    def send_off(self, name: str) -> None:
        """Send an instance no new work, because it leaves. Raises UnknownInstance."""
        self._hold(name, self._leaving)

    def call_back(self, name: str) -> None:
        """Undo send_off; an operator's drain stays. Raises UnknownInstance."""
        self._release(name, self._leaving)

    def is_leaving(self, name: str) -> bool:
        """Return True from send_off until it is removed or called back."""
        return name in self._leaving

    def _get(self, name: str) -> Instance:
        instance = self._instances.get(name)
        if instance is None:
            raise UnknownInstance(name)
        return instance

    def _hold(self, name: str, held: set[str]) -> None:
        """Add an instance to the set of drained or of leaving instances, and set DRAINING if it is ready."""
        instance = self._get(name)
        held.add(name)
        self.set_state(name, instance.state)

    def _release(self, name: str, held: set[str]) -> None:
        instance = self._get(name)
        held.discard(name)
        if instance.state is InstanceState.DRAINING:
            self.set_state(name, InstanceState.READY)

    def _with_drain(self, instance: Instance, state: InstanceState) -> InstanceState:
        """Return DRAINING for a ready instance that is drained or leaves, else the state."""
        if state is InstanceState.READY and (instance.name in self._drained or instance.name in self._leaving):
            return InstanceState.DRAINING
        return state

    def refresh(self, instance: Instance) -> None:
        """Update the pool and call the listeners after a change that routing reads."""
        self.variant_of(instance).pool.update(instance)
        self._notify(instance)

    def variant_of(self, instance: Instance) -> Variant:
        variant = self._generations[instance.endpoint, instance.generation].find_variant(instance.variant)
        assert variant is not None  # checked when the instance was added
        return variant
