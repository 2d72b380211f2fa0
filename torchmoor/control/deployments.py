"""Starts, replaces and stops the instances of created endpoints."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from torchmoor.config.control import ControlSettings
from torchmoor.config.scaling import ScalingSettings
from torchmoor.control.artifacts import Artifacts, ServedModel
from torchmoor.control.deployment import Deployment, Start, settings_of, start_timeout_s
from torchmoor.control.downloads import DownloadState
from torchmoor.control.instance_names import make_stem
from torchmoor.control.models import DOWNLOAD_TIMEOUT, primary_container
from torchmoor.control.resources import EndpointResource
from torchmoor.errors import LaunchError, LimitExceeded
from torchmoor.fleet.autoscaler import Autoscaler
from torchmoor.fleet.folder_removal import remove_folder
from torchmoor.fleet.launcher import Launcher
from torchmoor.fleet.scaled_variant import ScaledVariant
from torchmoor.fleet.torchserve import Launch
from torchmoor.proxy.instances.endpoint import Endpoint
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry
from torchmoor.tasks import in_thread, start_thread

logger = logging.getLogger(__name__)

POLL_S = 0.1
END_TIMEOUT_S = 5.0  # for requests to notice that their instance has ended


class Deployments:
    """Runs the instances of created endpoints.

    gpus: as CUDA_VISIBLE_DEVICES names them. autoscaler: set before the first variant is scaled.
    """

    autoscaler: Autoscaler

    def __init__(
        self,
        settings: ControlSettings,
        registry: Registry,
        launcher: Launcher,
        artifacts: Artifacts,
        gpus: Sequence[str],
        folder: Path,
    ) -> None:
        """folder: for downloaded and unpacked models."""
        self._settings = settings
        self._registry = registry
        self._launcher = launcher
        self._artifacts = artifacts
        self._gpus = gpus
        self._folder = folder
        self._by_name: dict[str, Deployment] = {}
        self._starts: dict[str, Start] = {}
        self._changes = WeakValueDictionary[str, asyncio.Lock]()  # a lock exists while a task holds it or waits for it
        self._running: dict[str, Launch] = {}  # those that start or leave, and all that a scaled variant may have

    def find_endpoint(self, name: str) -> Endpoint | None:
        """Return the endpoint that has the instances, served or not yet."""
        found = self._by_name.get(name)
        return None if found is None else found.endpoint

    def progress_of(self, name: str, variant: str) -> list[str]:
        """Return the progress of a variant that is created or updated, such as its download."""
        start = self._starts.get(name)
        return [] if start is None else start.describe(variant)

    def check_room(self, num_instances: int) -> None:
        """Raise LimitExceeded if this number of further instances is not allowed."""
        most = self._settings.max_instances
        if len(self._running) + num_instances > most:
            raise LimitExceeded(
                f"{num_instances} more instances were needed, {len(self._running)} run for created endpoints, and "
                f"control.max_instances allows {most}: delete an endpoint, or allow more."
            )

    async def start(self, name: str, resource: EndpointResource) -> None:
        """Start an endpoint's instances and serve it, then drain those of an earlier configuration.

        Raises TorchmoorError or OSError after the started instances have ended; the earlier ones then continue.
        """
        async with self._one_change(name):
            before = self._by_name.get(name)
            deployment = await self._deploy(name, resource)
            self._registry.serve(deployment.endpoint)
            self._by_name[name] = deployment
            if before is not None:
                try:
                    await self._end(before)
                except Exception:
                    logger.exception("instances of an earlier configuration could not be stopped endpoint=%s", name)

    async def stop(self, name: str) -> None:
        """Send an endpoint no new request, and stop its instances when their requests have ended."""
        async with self._one_change(name):
            deployment = self._by_name.get(name)
            if deployment is not None:
                self._registry.retire(deployment.endpoint)
                await self._end(deployment)
                del self._by_name[name]

    def _one_change(self, name: str) -> asyncio.Lock:
        """Return the lock of an endpoint: one change at a time."""
        lock = self._changes.get(name)
        if lock is None:
            lock = self._changes[name] = asyncio.Lock()
        return lock

    def set_weights(self, name: str, weights: Mapping[str, float]) -> None:
        """Share an endpoint's requests among its variants by these weights."""
        for variant in self._by_name[name].endpoint.variants:
            if variant.name in weights:
                variant.settings = variant.settings.replace(weight=weights[variant.name])

    def count_of(self, name: str, variant: str) -> int:
        """Return the number of a variant's instances; 0 if the endpoint is not deployed."""
        deployment = self._by_name.get(name)
        if deployment is None:
            return 0
        if variant in deployment.scaled:
            return deployment.scaled[variant].scaling.desired
        return len(deployment.launches_of(variant))

    def is_scaled(self, name: str, variant: str) -> bool:
        """Return whether the autoscaler decides about a variant."""
        deployment = self._by_name.get(name)
        return deployment is not None and variant in deployment.scaled

    async def scale(self, name: str, variant: str, settings: ScalingSettings | None) -> None:
        """Let the autoscaler start and stop a variant's instances; None: keep those that run. Raises LimitExceeded."""
        async with self._one_change(name):
            if (deployment := self._by_name.get(name)) is not None:
                await self._scale(deployment, variant, settings)

    async def _scale(self, deployment: Deployment, variant: str, settings: ScalingSettings | None) -> None:
        found = deployment.endpoint.find_variant(variant)
        assert found is not None  # of the configuration
        if settings is not None:
            self.check_room(settings.max_capacity - len(deployment.launches_of(variant)))
        await self._stop_scaling(deployment, variant)
        running = deployment.launches_of(variant)
        if settings is None:
            if not running:
                found.on_starts_ended()
            return
        planned = self._plan(deployment, variant, settings.max_capacity - len(running))
        self._running |= {launch.name: launch for launch in planned}
        deployment.launches |= {launch.name: launch for launch in planned}
        found.settings = found.settings.replace(scaling=settings)
        scaled = ScaledVariant(found, deployment.launches_of(variant), [launch.name for launch in running])
        deployment.scaled[variant] = scaled
        self.autoscaler.add(scaled)

    async def _stop_scaling(self, deployment: Deployment, variant: str) -> None:
        """Take a variant's running instances back from the autoscaler; drains by operators stay."""
        if (scaled := deployment.scaled.pop(variant, None)) is None:
            return
        await self.autoscaler.remove(scaled)
        scaled.variant.settings = scaled.variant.settings.replace(scaling=None)
        for name in scaled.launches:
            if name not in scaled.members:
                deployment.launches.pop(name, None)
                self._running.pop(name, None)
            elif (instance := self._registry.find(name)) is not None and instance.is_resumable:
                self._registry.resume(name)

    async def resize(self, name: str, counts: Mapping[str, int]) -> None:
        """Start or stop instances until each variant has its count. Raises TorchmoorError or OSError.

        Does nothing if the endpoint is no longer deployed.
        """
        async with self._one_change(name):
            if (deployment := self._by_name.get(name)) is not None:
                await self._resize(deployment, counts)

    async def _resize(self, deployment: Deployment, counts: Mapping[str, int]) -> None:
        added: list[Launch] = []
        leaving: list[str] = []
        for variant, count in counts.items():
            if variant in deployment.scaled:
                continue
            own = [each.name for each in deployment.launches_of(variant)]
            leaving += own[count:]
            added += self._plan(deployment, variant, count - len(own))
        await self._launch(added)
        deployment.launches |= {launch.name: launch for launch in added}
        for each in leaving:
            del deployment.launches[each]
        await self._drain(leaving)

    async def _deploy(self, name: str, resource: EndpointResource) -> Deployment:
        """Start all instances of a configuration, and wait until they are ready."""
        stem = make_stem(name, resource.serial, self._registry.endpoints())
        start = self._starts[name] = Start({variant: DownloadState() for variant in resource.variants})
        try:
            return await self._deploy_from(name, resource, stem, start)
        finally:
            del self._starts[name]

    async def _deploy_from(self, name: str, resource: EndpointResource, stem: str, start: Start) -> Deployment:
        work, variants = self._folder / stem, resource.variants
        try:
            served = {
                variant: await self._fetch(
                    values,
                    primary_container(resource.models[values["ModelName"]]),
                    work / variant,
                    start.downloads[variant],
                )
                for variant, values in variants.items()
            }
            endpoint = start.endpoint = self._registry.stage(settings_of(name, resource, served), resource.serial)
        except BaseException:
            await in_thread(remove_folder, work)
            raise
        timeouts_s = {variant: start_timeout_s(values, served[variant]) for variant, values in variants.items()}
        deployment = Deployment(endpoint, served, stem, work, timeouts_s)
        try:
            launches = [
                launch
                for variant, values in variants.items()
                for launch in self._plan(deployment, variant, resource.count_of(values))
            ]
            await self._launch(launches)
        except Exception:
            await self._forget(deployment)
            raise
        deployment.launches = {launch.name: launch for launch in launches}
        return deployment

    async def _fetch(
        self, variant: Mapping[str, Any], container: Mapping[str, Any], work: Path, download: DownloadState
    ) -> ServedModel:
        """Fetch a variant's model. Raises LaunchError if that takes too long.

        It returns or raises only after the last write, even when cancelled.
        """
        timeout_s = variant.get(DOWNLOAD_TIMEOUT, self._settings.download_timeout_s)
        fetching = start_thread(self._artifacts.fetch, container, variant["ModelName"], work, download)
        try:
            done, _ = await asyncio.wait([fetching], timeout=timeout_s)
        finally:
            download.end()
            await asyncio.wait([fetching])
            error = fetching.exception()
        if not done:
            raise LaunchError(
                f"model {variant['ModelName']} was not downloaded and unpacked in {timeout_s:.0f} s: set "
                f"{DOWNLOAD_TIMEOUT} of variant {variant['VariantName']} to a longer time"
            ) from error
        return fetching.result()

    def _plan(self, deployment: Deployment, variant: str, count: int) -> list[Launch]:
        """Return `count` new instances of a variant, each on the GPU with the fewest instances."""
        served, endpoint = deployment.served[variant], deployment.endpoint
        used = Counter(launch.gpu for launch in self._running.values())
        planned = []
        for _ in range(count):
            gpu = min(self._gpus, key=lambda each: used[each]) if self._gpus else None
            used[gpu] += 1
            planned.append(
                Launch(
                    name=f"{deployment.stem}-{deployment.num_named}",
                    endpoint=endpoint.name,
                    archive=served.archive,
                    gpu=gpu,
                    variant=variant,
                    generation=endpoint.generation,
                    contents=served.contents,
                    store=served.store,
                    environment=served.environment,
                    properties=served.properties,
                    start_timeout_s=deployment.start_timeouts_s[variant],
                )
            )
            deployment.num_named += 1
        return planned

    async def _launch(self, launches: Sequence[Launch]) -> None:
        """Start instances and wait until all are ready; if one fails, end all of them and raise its error."""
        self.check_room(len(launches))
        self._launcher.check(launches)
        starting = []
        for launch in launches:
            self._running[launch.name] = launch
            starting.append(self._launcher.begin(launch))
        if not starting:
            return
        done, _ = await asyncio.wait(starting, return_when=asyncio.FIRST_EXCEPTION)
        failed: BaseException | None = None
        for each in done:
            if each.cancelled():
                failed = failed or LaunchError("an instance was ended while it started")
            else:
                failed = each.exception() or failed
        if failed is not None:
            await self._end_instances(launch.name for launch in launches)
            raise failed

    async def _end(self, deployment: Deployment) -> None:
        """Drain and end all instances of an endpoint that is no longer served, and forget it."""
        for variant in list(deployment.scaled):
            await self._stop_scaling(deployment, variant)
        await self._drain(list(deployment.launches))
        await self._forget(deployment)

    async def _forget(self, deployment: Deployment) -> None:
        self._registry.forget(deployment.endpoint)
        await in_thread(remove_folder, deployment.work)

    async def _drain(self, names: Sequence[str]) -> None:
        """Send instances no new requests, wait at most drain_timeout_s for the running ones, and end the instances."""
        instances = [instance for name in names if (instance := self._registry.find(name)) is not None]
        for instance in instances:
            self._registry.send_off(instance.name)
        await _until_idle(instances, self._settings.drain_timeout_s)
        await self._end_instances(names)
        await _until_idle(instances, END_TIMEOUT_S)

    async def _end_instances(self, names: Iterable[str]) -> None:
        async def end(name: str) -> None:
            await self._launcher.end(name)
            self._running.pop(name, None)

        await asyncio.gather(*(end(name) for name in names))


async def _until_idle(instances: Sequence[Instance], timeout_s: float) -> None:
    """Wait until no request runs at the instances, or the time is over."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + timeout_s
    while loop.time() < ends_at:
        if not any(instance.outstanding for instance in instances):
            return
        await asyncio.sleep(POLL_S)
