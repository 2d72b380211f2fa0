"""SageMaker's operations that create, change and delete endpoints.

An operation checks its request, records the new status and answers; a task then starts and stops instances. A restart
continues from the records: endpoints are deployed again, and a deletion is finished.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchmoor.async_inference.service import AsyncInference
from torchmoor.config.control import ControlSettings
from torchmoor.config.endpoint_config import read_async_inference
from torchmoor.control.arns import CONFIG, ENDPOINT, MODEL, Arns
from torchmoor.control.autoscaling import ScalableTargets
from torchmoor.control.deployments import Deployments
from torchmoor.control.protocol import Operation, Values
from torchmoor.control.resources import EndpointResource, Resources
from torchmoor.errors import RequestInvalid, TorchmoorError
from torchmoor.proxy.instances.registry import Registry
from torchmoor.tasks import BackgroundTasks

logger = logging.getLogger(__name__)

MAX_REASON = 1024  # characters of a FailureReason
TAKEN = "The command line or the configuration file now has an endpoint {}. Delete this one, or rename that one."
DELETED = "The endpoint was deleted before the request was done."
NOT_ASYNC = "The endpoint was updated before the request was done, to a configuration without AsyncInferenceConfig."
INTERRUPTED = "The update to {} was interrupted by a restart; the endpoint serves its earlier configuration."


class Endpoints:
    """Creates, changes and deletes endpoints while its context lasts. Continues with those of the last run.

    asynchronous: the data plane's; set before the context begins.
    """

    asynchronous: AsyncInference | None

    def __init__(
        self,
        settings: ControlSettings,
        resources: Resources,
        arns: Arns,
        registry: Registry,
        deployments: Deployments,
        targets: ScalableTargets,
    ) -> None:
        self._settings = settings
        self._resources = resources
        self._arns = arns
        self._registry = registry
        self._deployments = deployments
        self._targets = targets
        self._left = list(resources.endpoints)  # by the last run
        self._tasks = BackgroundTasks()

    def operations(self) -> dict[str, Operation]:
        """Return the operations by their names."""
        return {
            "CreateEndpoint": self._create,
            "UpdateEndpoint": self._update,
            "UpdateEndpointWeightsAndCapacities": self._reweigh,
            "DeleteEndpoint": self._delete,
        }

    async def __aenter__(self) -> Endpoints:
        """Continue the operations that the last run has not finished."""
        for name in self._left:
            resource = self._resources.endpoints[name]
            if self._registry.find_endpoint(name) is not None:
                resource.status, resource.failure = "Failed", TAKEN.format(name)
            elif resource.status == "Deleting":
                self._tasks.start(self._run_deletion(name))
            elif resource.status != "Failed":
                failure = INTERRUPTED.format(resource.pending) if resource.pending else ""
                resource.status, resource.pending = "Creating", ""
                self._tasks.start(self._run_start(name, resource, failure))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._tasks.cancel()
        await self._resources.finish_saving()

    async def _create(self, values: Values) -> Values:
        name, endpoints = values["EndpointName"], self._resources.endpoints
        if name in endpoints or self._registry.find_endpoint(name) is not None:
            raise self._arns.existing(ENDPOINT, name)
        self._resources.check_number(endpoints, "endpoints")
        resource = self._make(values["EndpointConfigName"])
        self._deployments.check_room(_num_instances(resource))
        arn = self._arns.arn(ENDPOINT, name)
        await self._resources.add(endpoints, name, resource, arn, values.get("Tags", ()))
        self._tasks.start(self._run_start(name, resource))
        return {"EndpointArn": arn}

    async def _update(self, values: Values) -> Values:
        name = values["EndpointName"]
        old = self._find_changeable(name)
        new = self._make(values["EndpointConfigName"])
        self._targets.check_update(name, old, new)
        variants = (each["VariantName"] for each in old.config["ProductionVariants"])
        scaled = [variant for variant in variants if self._deployments.is_scaled(name, variant)]
        reached = {variant: self._deployments.count_of(name, variant) for variant in scaled}
        retain_properties(values, replace(old, counts={**old.counts, **reached}), new)
        _check_weights(name, new)
        if "DeploymentConfig" in values:
            logger.info("without effect here: DeploymentConfig, all traffic moves at once endpoint=%s", name)
        self._deployments.check_room(_num_instances(new))
        new.created = old.created
        await self._record(old, status="Updating", pending=values["EndpointConfigName"], failure="")
        self._tasks.start(self._run_update(name, old, new))
        return {"EndpointArn": self._arns.arn(ENDPOINT, name)}

    async def _reweigh(self, values: Values) -> Values:
        name = values["EndpointName"]
        resource = self._find_changeable(name)
        known = resource.variants
        weights, counts = dict(resource.weights), dict(resource.counts)
        for desired in values["DesiredWeightsAndCapacities"]:
            variant = desired["VariantName"]
            if variant not in known:
                raise RequestInvalid(f"Endpoint {name} has no variant {variant}, but {', '.join(known)}.")
            if "ServerlessUpdateConfig" in desired:
                raise RequestInvalid("ServerlessUpdateConfig is not supported here: leave it out.")
            if "DesiredWeight" in desired:
                weights[variant] = float(desired["DesiredWeight"])
            if "DesiredInstanceCount" in desired:
                counts[variant] = desired["DesiredInstanceCount"]
                self._check_count(name, resource, variant, counts[variant])
        new = replace(resource, weights=weights, counts=counts)
        _check_weights(name, new)
        self._deployments.check_room(_num_added(resource, new))
        await self._record(resource, status="Updating", weights=weights)
        self._deployments.set_weights(name, weights)
        self._tasks.start(self._run_resize(name, resource, counts))
        return {"EndpointArn": self._arns.arn(ENDPOINT, name)}

    def _check_count(self, name: str, resource: EndpointResource, variant: str, count: int) -> None:
        """Raise RequestInvalid if a variant's number of instances must not be set to this."""
        if self._deployments.is_scaled(name, variant):
            raise RequestInvalid(f"Variant {variant} has a scaling policy: deregister its scalable target first.")
        if count == 0 and "AsyncInferenceConfig" not in resource.config:
            raise RequestInvalid(
                f"DesiredInstanceCount of variant {variant} must be 1 or more: only an endpoint with "
                "AsyncInferenceConfig may have 0. To stop idle instances, register a scalable target."
            )

    async def _delete(self, values: Values) -> Values:
        name = values["EndpointName"]
        resource = self._find_changeable(name, or_failed=True)
        await self._record(resource, status="Deleting")
        self._tasks.start(self._run_deletion(name))
        return {}

    def _make(self, config_name: str) -> EndpointResource:
        """Return an endpoint of a configuration and its models, as they are now. Raises RequestInvalid."""
        config = self._resources.configs.get(config_name)
        if config is None:
            raise self._arns.missing(CONFIG, config_name)
        models: dict[str, dict[str, Any]] = {}
        for variant in config.values["ProductionVariants"]:
            model = self._resources.models.get(variant["ModelName"])
            if model is None:
                raise self._arns.missing(MODEL, variant["ModelName"])
            models[variant["ModelName"]] = model.values
        now = time.time()
        return EndpointResource(
            config_name=config_name,
            config=config.values,
            models=models,
            serial=self._resources.next_serial(),
            created=now,
            modified=now,
        )

    def _find_changeable(self, name: str, *, or_failed: bool = False) -> EndpointResource:
        """Return a created endpoint that no operation changes now. Raises RequestInvalid."""
        resource = self._resources.endpoints.get(name)
        if resource is None:
            if self._registry.find_endpoint(name) is not None:
                raise RequestInvalid(
                    f"Endpoint {name} is one of torchmoor's command line or configuration file: change it there."
                )
            raise self._arns.missing(ENDPOINT, name)
        if resource.status == "InService" or (or_failed and resource.status == "Failed"):
            return resource
        arn = self._arns.arn(ENDPOINT, name)
        if resource.status == "Failed":
            raise RequestInvalid(f'Cannot update failed endpoint "{arn}": delete it, and create it again.')
        raise RequestInvalid(f'Cannot update in-progress endpoint "{arn}".')

    async def _run_start(self, name: str, resource: EndpointResource, failure: str = "") -> None:
        """Start an endpoint. failure: the reason for which an update before it failed."""
        try:
            await self._deployments.start(name, resource)
        except Exception as error:
            resource.status, resource.failure = "Failed", _reason(name, error)
        else:
            resource.status, resource.failure = "InService", failure
            await self._scale(name, resource)
        await self._keep(resource)

    async def _run_update(self, name: str, old: EndpointResource, new: EndpointResource) -> None:
        """Serve a new configuration; if its instances fail to start, the old one stays in service."""
        try:
            await self._deployments.start(name, new)
        except Exception as error:
            old.status, old.pending, old.failure = "InService", "", _reason(name, error)
            await self._scale(name, old)
            await self._keep(old)
            return
        if "AsyncInferenceConfig" not in new.config:  # before the record changes: a restart would not know the old one
            await self._end_requests(name, old, NOT_ASYNC)
        self._resources.endpoints[name] = new
        new.status = "InService"
        await self._scale(name, new)
        await self._keep(new)

    async def _scale(self, name: str, resource: EndpointResource) -> None:
        """Give the variants with scalable targets to the autoscaler; the endpoint serves without it too."""
        try:
            await self._targets.apply(name)
        except Exception as error:
            resource.failure = _reason(name, error)

    async def _run_resize(self, name: str, resource: EndpointResource, counts: Mapping[str, int]) -> None:
        try:
            await self._deployments.resize(name, counts)
        except Exception as error:
            resource.failure = _reason(name, error)
        else:
            resource.counts, resource.failure = dict(counts), ""
        resource.status = "InService"
        await self._scale(name, resource)  # counts that a client has requested meanwhile
        await self._keep(resource)

    async def _run_deletion(self, name: str) -> None:
        try:
            await self._deployments.stop(name)
        except Exception:
            logger.exception("instances of a deleted endpoint could not be stopped endpoint=%s", name)
        resource = self._resources.endpoints[name]
        await self._end_requests(name, resource, DELETED)
        self._resources.forget(self._resources.endpoints, name, self._arns.arn(ENDPOINT, name))
        self._targets.forget(name)
        await self._keep(resource)

    async def _end_requests(self, name: str, resource: EndpointResource, reason: str) -> None:
        """End the asynchronous requests of an endpoint that accepts no more. resource: with its configuration."""
        try:
            settings = read_async_inference(resource.config.get("AsyncInferenceConfig"), name)
            if settings is not None and self.asynchronous is not None:
                await self.asynchronous.end_requests(name, settings, reason, self._settings.removal_timeout_s)
        except Exception:
            logger.exception("asynchronous requests could not be ended endpoint=%s", name)

    async def _record(self, resource: EndpointResource, **changes: Any) -> None:
        """Set fields of an endpoint and save them. Raises OSError and takes them back if that fails."""
        before = {name: getattr(resource, name) for name in (*changes, "modified")}
        _set(resource, changes)
        try:
            await self._save(resource)
        except OSError:
            _set(resource, before)
            raise

    async def _keep(self, resource: EndpointResource) -> None:
        """Record what a task has done. If that fails, a restart continues from the last record."""
        try:
            await self._save(resource)
        except OSError:
            logger.exception("resources not written")

    async def _save(self, resource: EndpointResource) -> None:
        resource.modified = time.time()
        await self._resources.save()


def _set(resource: EndpointResource, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(resource, name, value)


def retain_properties(values: Values, old: EndpointResource, new: EndpointResource) -> None:
    """Give a new configuration the weights and counts that an update retains."""
    if not values.get("RetainAllVariantProperties"):
        return
    excluded = {each["VariantPropertyType"] for each in values.get("ExcludeRetainedVariantProperties", ())}
    kept = new.variants.keys()
    for name, before in old.variants.items():
        if name in kept and "DesiredWeight" not in excluded:
            new.weights[name] = old.weight_of(before)
        if name in kept and "DesiredInstanceCount" not in excluded:
            new.counts[name] = old.count_of(before)


def _check_weights(name: str, resource: EndpointResource) -> None:
    """Raise RequestInvalid if no variant of an endpoint would get a request."""
    if not any(resource.weight_of(variant) for variant in resource.variants.values()):
        raise RequestInvalid(f"A variant of endpoint {name} must have a weight above 0.")


def _num_instances(resource: EndpointResource) -> int:
    return sum(resource.count_of(variant) for variant in resource.variants.values())


def _num_added(old: EndpointResource, new: EndpointResource) -> int:
    """Return how many instances a change of counts starts; those that other variants lose are stopped afterwards."""
    return sum(max(0, new.count_of(variant) - old.count_of(variant)) for variant in new.variants.values())


def _reason(name: str, error: Exception) -> str:
    """Return the FailureReason of an error. A fault of the proxy shows no details there."""
    if isinstance(error, (TorchmoorError, OSError)):
        logger.error("endpoint failed endpoint=%s error=%s", name, error)
        return str(error)[:MAX_REASON]
    logger.error("endpoint failed endpoint=%s", name, exc_info=error)
    return "The control plane failed; its log has the reason."
