"""The instances of this host: their start, and the autoscaler that keeps enough of them running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from torchmoor.config.settings import ProxySettings
from torchmoor.fleet.autoscaler import Autoscaler
from torchmoor.fleet.data_plane_view import DataPlaneView
from torchmoor.fleet.launcher import Launcher
from torchmoor.fleet.scaled_variant import ScaledVariant
from torchmoor.fleet.torchserve import Launch
from torchmoor.proxy.instances.registry import Registry


class HostFleet:
    """Starts the instances of variants with Autoscaling on demand, and all other instances in `start`.

    The launcher stops the instances.
    """

    def __init__(
        self,
        settings: ProxySettings,
        registry: Registry,
        launcher: Launcher,
        data: DataPlaneView,
        launches: Sequence[Launch],
        report: Callable[[str], None],
    ) -> None:
        """launches: all instances that may run."""
        self._launcher = launcher
        self._launches = launches
        self._data = data
        self._fixed: list[Launch] = []
        self._stack = AsyncExitStack()
        scaled: list[ScaledVariant] = []
        for endpoint in registry.endpoints():
            for variant in endpoint.variants:
                own = [each for each in launches if (each.endpoint, each.variant) == (endpoint.name, variant.name)]
                if variant.settings.scaling is None:
                    self._fixed += own
                else:
                    scaled.append(ScaledVariant(variant, own))
        self._autoscaler: Autoscaler | None = None
        if scaled:
            are_journaled = settings.sessions.are_journaled
            self._autoscaler = Autoscaler(scaled, registry, launcher, data, report, are_journaled=are_journaled)

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
        self._data.on_need(self._autoscaler.wake)
        running = asyncio.create_task(self._autoscaler.run())
        self._stack.callback(running.cancel)
