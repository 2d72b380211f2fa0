"""An endpoint and its variants: their settings and their instances.

Does not know sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import NamedTuple

from torchmoor.config.routing import EndpointSettings, MultiModelSettings, VariantSettings
from torchmoor.errors import ConfigError
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.routing.model_placement import ModelPlacement
from torchmoor.proxy.routing.pool import Pool
from torchmoor.proxy.routing.strategies import STRATEGIES


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
