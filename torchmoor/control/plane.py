"""Assembles the control plane from its services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from torchmoor.config.settings import ProxySettings
from torchmoor.control.arns import Arns
from torchmoor.control.artifacts import Artifacts
from torchmoor.control.autoscaling import ScalableTargets
from torchmoor.control.cloudwatch import CloudWatch
from torchmoor.control.deployments import Deployments
from torchmoor.control.endpoint_views import EndpointViews
from torchmoor.control.endpoints import Endpoints
from torchmoor.control.logs import EndpointLogs
from torchmoor.control.metric_history import MetricHistory
from torchmoor.control.models import Models
from torchmoor.control.protocol import ControlPlane, Service
from torchmoor.control.resources import Resources
from torchmoor.control.tags import Tags
from torchmoor.fleet.autoscaler import Autoscaler
from torchmoor.fleet.data_plane_view import DataPlaneView
from torchmoor.fleet.folder_removal import remove_folder
from torchmoor.fleet.instance_guard import CONTROL_FOLDER, MODELS_FOLDER
from torchmoor.fleet.launcher import Launcher
from torchmoor.proxy.api.runtime import DEFAULT_REGION
from torchmoor.proxy.instances.registry import Registry
from torchmoor.tasks import cancel_all

SAGEMAKER = "sagemaker"
HINT = " Start torchmoor up with --control-plane for those that create, change and delete endpoints."


def describing_plane(settings: ProxySettings, registry: Registry, run_dir: Path | None = None) -> ControlPlane:
    """Return a control plane that lists and describes endpoints, and changes nothing.

    run_dir: the parent of the instances' folders, whose logs are shown.
    """
    views = EndpointViews(registry, make_arns(settings), {}, None, settings.async_inference.output_root)
    services = [Service(SAGEMAKER, views.operations(), hint=HINT)]
    if run_dir is not None:
        services.append(Service("logs", EndpointLogs(registry, run_dir).operations()))
    return ControlPlane(services)


class LaunchingPlane:
    """A control plane that creates, changes and deletes endpoints on this host, while `running`.

    answer: answers requests. reserved: variables that all instances share. run_dir: the launcher's.
    """

    def __init__(
        self,
        settings: ProxySettings,
        registry: Registry,
        launcher: Launcher,
        *,
        model_store: Path,
        reserved: Collection[str],
        gpus: Sequence[str],
        run_dir: Path,
    ) -> None:
        """Raises ConfigError if the resources of the last run cannot be read."""
        control, arns = settings.control, make_arns(settings)
        downloads = run_dir / MODELS_FOLDER
        remove_folder(downloads)  # left by a run that could not remove it
        self._registry, self._launcher = registry, launcher
        self._are_journaled = settings.sessions.are_journaled
        self.resources = resources = Resources(run_dir / CONTROL_FOLDER, control)
        artifacts = Artifacts(control, settings.objects, model_store, reserved)
        deployments = Deployments(control, registry, launcher, artifacts, gpus, downloads)
        targets = ScalableTargets(resources, arns, deployments)
        tags = Tags(
            resources,
            arns,
            lambda name: name in resources.endpoints or registry.find_endpoint(name) is not None,
        )
        self._endpoints = Endpoints(control, resources, arns, registry, deployments, targets)
        self._deployments, self._targets = deployments, targets
        views = EndpointViews(registry, arns, resources.endpoints, deployments, settings.async_inference.output_root)
        models = Models(resources, arns, artifacts.check, views.describe_model, views.describe_config)
        operations = {
            **views.operations(),
            **models.operations(),
            **self._endpoints.operations(),
            **tags.operations(),
        }
        self._cloudwatch = CloudWatch(resources, arns)
        self._num_minutes = control.metric_minutes
        self.answer = ControlPlane(
            [
                Service(SAGEMAKER, operations),
                Service("application-autoscaling", targets.operations()),
                Service("cloudwatch", self._cloudwatch.operations()),
                Service("logs", EndpointLogs(registry, run_dir).operations()),
            ]
        ).answer

    @asynccontextmanager
    async def running(self, data: DataPlaneView, report: Callable[[str], None]) -> AsyncIterator[None]:
        """Deploy the endpoints of the last run, and scale variants, until the context ends.

        data: the data plane that serves the endpoints. report: shows a message to the operator.
        """
        autoscaler = Autoscaler([], self._registry, self._launcher, data, report, are_journaled=self._are_journaled)
        autoscaler.on_decided = self._targets.note
        self._deployments.autoscaler = autoscaler
        self._endpoints.asynchronous = data.async_inference
        data.on_need(autoscaler.wake)
        self._cloudwatch.history = history = MetricHistory(data, num_minutes=self._num_minutes)
        tasks = [asyncio.create_task(work) for work in (autoscaler.run(), history.run())]
        try:
            async with self._endpoints:
                yield
        finally:
            await cancel_all(tasks)
            await autoscaler.stop()


def make_arns(settings: ProxySettings) -> Arns:
    """Return the ARNs of resources in the account and region of the settings."""
    return Arns(settings.access.region or DEFAULT_REGION, settings.account_id)
