"""The instances of this host: their plan, their start, and the autoscaler that keeps enough of them running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from torchmoor.config.routing import EndpointSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.errors import ConfigError
from torchmoor.fleet.archives import archive_name
from torchmoor.fleet.autoscaler import Autoscaler
from torchmoor.fleet.data_plane_view import DataPlaneView
from torchmoor.fleet.launcher import Launcher
from torchmoor.fleet.scaled_variant import ScaledVariant
from torchmoor.fleet.torchserve import Launch
from torchmoor.proxy.instances.registry import Registry, name_stem
from torchmoor.wire.session_ids import is_instance_name


class HostFleet:
    """Starts the instances of variants with Autoscaling on demand, and all other instances in `start`.

    The launcher stops the instances.
    """

    def __init__(
        self,
        settings: ProxySettings,
        registry: Registry,
        launcher: Launcher,
        front: DataPlaneView,
        launches: Sequence[Launch],
        report: Callable[[str], None],
    ) -> None:
        """launches: all instances that may run."""
        self._launcher = launcher
        self._launches = launches
        self._front = front
        self._fixed: list[Launch] = []
        self._stack = AsyncExitStack()
        groups: list[ScaledVariant] = []
        for endpoint in registry.endpoints():
            for variant in endpoint.variants:
                own = [each for each in launches if (each.endpoint, each.variant) == (endpoint.name, variant.name)]
                scaling = variant.settings.scaling
                if scaling is None:
                    self._fixed += own
                else:
                    groups.append(ScaledVariant(variant, scaling, own))
        self._autoscaler: Autoscaler | None = None
        if groups:
            are_journaled = settings.sessions.are_journaled
            self._autoscaler = Autoscaler(groups, registry, launcher, front, report, are_journaled=are_journaled)

    async def __aenter__(self) -> HostFleet:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def start(self) -> None:
        """Start the first instances and wait until they are ready. Raises LaunchError if one fails to start."""
        if self._autoscaler is None:
            await self._launcher.start(self._fixed)
            return
        self._launcher.check(self._launches)
        self._stack.push_async_callback(self._autoscaler.stop)
        await asyncio.gather(self._launcher.start(self._fixed), self._autoscaler.start())
        self._front.on_need(self._autoscaler.wake)
        running = asyncio.create_task(self._autoscaler.run())
        self._stack.callback(running.cancel)


def plan_scaled(endpoints: Sequence[EndpointSettings], gpus: Sequence[str]) -> list[Launch]:
    """Return all instances that variants with Autoscaling may have, spread over the GPUs if there are any.

    Raises ConfigError if the endpoint's name leads to an invalid instance name.
    """
    launches: list[Launch] = []
    for endpoint in endpoints:
        for variant in endpoint.variants:
            for number in range(variant.scaling.max_capacity if variant.scaling else 0):
                name = f"{name_stem(endpoint, variant)}-{number}"
                if not is_instance_name(name):
                    raise ConfigError(
                        f"an instance of {endpoint.name} would have the name {name!r}: choose a shorter one"
                    )
                gpu = gpus[len(launches) % len(gpus)] if gpus else None
                launches.append(Launch(name, endpoint.name, archive_name(variant.model), gpu, variant.name))
    names = [launch.name for launch in launches]
    if len(set(names)) != len(names):
        raise ConfigError("two variants with Autoscaling would have instances of one name: choose other names")
    return launches
