"""The endpoints, their variants, and the instances that serve each.

Owned by one event loop: every call is synchronous and made on that loop's thread. Does not know sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import time
from typing import NamedTuple, TypeVar

from torchmoor.config.routing import EndpointSettings, MultiModelSettings, VariantSettings
from torchmoor.errors import ConfigError, UnknownEndpoint, UnknownInstance, UnknownVariant
from torchmoor.proxy.instances.dns_source import DnsSource
from torchmoor.proxy.instances.instance import SERVING, Instance, InstanceState
from torchmoor.proxy.routing.model_placement import ModelPlacement
from torchmoor.proxy.routing.pool import Pool
from torchmoor.proxy.routing.reported_status import ReportedStatus
from torchmoor.proxy.routing.strategies import STRATEGIES

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ScalingDecision(NamedTuple):
    """The autoscaler's last decision on a variant: the desired instances, the backlog and the reason.

    is_limited: MaxCapacity leaves fewer than the load asks for.
    """

    desired: int
    backlog: int
    why: str
    is_limited: bool


class Variant:
    """A variant of an endpoint: its settings, and its instances in order of their load.

    needs_status: whether a client has opened a session or the chat page, so that the instances' status matters.
    models: which instances have which of many models; None if they serve one. last_start_s: how long the last started
    instance took to become ready; None before the first. scale: None without autoscaling. on_starts_ended: called when
    no instance is there and none will be started.
    """

    def __init__(
        self, endpoint: str, settings: VariantSettings, multi_model: MultiModelSettings | None, generation: int = 0
    ) -> None:
        """generation: of the endpoint. Raises ConfigError if there is no such strategy."""
        self.settings = settings
        self.name = settings.name
        self.endpoint = endpoint
        self.generation = generation
        strategy = settings.routing_strategy
        if strategy not in STRATEGIES:
            raise ConfigError(
                f"variant {settings.name} of endpoint {endpoint}: RoutingStrategy must be one of "
                f"{', '.join(STRATEGIES)}, not {strategy!r}"
            )
        self.strategy_class = STRATEGIES[strategy]
        self.pool: Pool[Instance] = Pool()
        self.needs_status = False
        self.last_start_s: float | None = None
        self.scale: ScalingDecision | None = None
        self.on_starts_ended: Callable[[], None] = lambda: None
        self.models: ModelPlacement | None = None
        if multi_model is not None:
            self.models = ModelPlacement(
                hot_outstanding=multi_model.hot_outstanding,
                max_models=multi_model.max_models,
                is_cached=multi_model.is_cached,
            )

    @property
    def may_start(self) -> bool:
        """Return whether an instance is started, or resumed, for a request: operators' drains leave room for one."""
        scaling = self.settings.scaling
        if scaling is None:
            return False
        drained = (
            (each.is_drained or each.state is InstanceState.DRAINING) and not each.is_resumable
            for each in self.pool.members
        )
        return sum(drained) < scaling.max_capacity


class Endpoint:
    """An endpoint's settings, its variants, and all their instances in the order in which they were added.

    created_at: when this process added it, in seconds since 1970.
    """

    def __init__(self, settings: EndpointSettings, generation: int) -> None:
        """generation: differs from that of an earlier endpoint of the same name, which this one replaces."""
        self.settings = settings
        self.name = settings.name
        self.generation = generation
        self.created_at = time()
        self.variants = [
            Variant(settings.name, variant, settings.multi_model, generation) for variant in settings.variants
        ]
        self.instances: list[Instance] = []

    def find_variant(self, name: str) -> Variant | None:
        return next((variant for variant in self.variants if variant.name == name), None)

    def find_variant_of(self, instance: str) -> Variant | None:
        """Return the variant whose instance has, had or would have that name; None if unknown."""
        for variant in self.variants:
            if variant.pool.find(instance) is not None:
                return variant
        stem = instance.rpartition("-")[0]
        for variant in self.variants:
            if variant.settings.scaling is not None and stem == name_stem(self.settings, variant.settings):
                return variant
        return None

    def has_ready_instance(self) -> bool:
        """Return True if at least one instance may be sent new work."""
        return any(instance.is_ready for instance in self.instances)

    def can_serve(self) -> bool:
        """Return True if a new request can be served, perhaps by an instance that is started for it."""
        return self.has_ready_instance() or any(
            variant.settings.scaling is not None and variant.settings.scaling.min_capacity == 0 and variant.may_start
            for variant in self.variants
        )


def name_stem(endpoint: EndpointSettings, variant: VariantSettings) -> str:
    """Return the beginning of the names of a variant's instances that this host starts."""
    return (endpoint.name if len(endpoint.variants) == 1 else f"{endpoint.name}-{variant.name}").lower()


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
