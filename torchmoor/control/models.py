"""SageMaker's operations on models and endpoint configurations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from torchmoor.config.endpoint_config import check_endpoint_config, read_endpoint
from torchmoor.control.arns import CONFIG, MODEL, Arns
from torchmoor.control.listing import ListedResource, list_page
from torchmoor.control.protocol import Operation, Values
from torchmoor.control.resources import Resource, Resources
from torchmoor.errors import ConfigError, RequestInvalid

START_TIMEOUT = "ContainerStartupHealthCheckTimeoutInSeconds"  # of a variant
DOWNLOAD_TIMEOUT = "ModelDataDownloadTimeoutInSeconds"  # of a variant
NOT_FOR_MANY = "AsyncInferenceConfig is not for models in Mode MultiModel."
_UNSERVED_OF_MODEL = ("InferenceExecutionConfig",)
_UNSERVED_OF_CONTAINER = ("ModelPackageName", "InferenceSpecificationName", "AdditionalModelDataSources")


class Models:
    """Serves the operations on models and endpoint configurations.

    check_container: raises ApiError for a container that cannot be served here. describe_served_model,
    describe_served_config: describe those of endpoints that no client created.
    """

    def __init__(
        self,
        resources: Resources,
        arns: Arns,
        check_container: Callable[[Mapping[str, Any]], None],
        describe_served_model: Callable[[str], Values],
        describe_served_config: Callable[[str], Values],
    ) -> None:
        self._resources = resources
        self._arns = arns
        self._check_container = check_container
        self._describe_served_model = describe_served_model
        self._describe_served_config = describe_served_config

    def operations(self) -> dict[str, Operation]:
        """Return the operations by their names."""
        return {
            "CreateModel": self._create_model,
            "DescribeModel": self._describe_model,
            "ListModels": self._list_models,
            "DeleteModel": self._delete_model,
            "CreateEndpointConfig": self._create_config,
            "DescribeEndpointConfig": self._describe_config,
            "ListEndpointConfigs": self._list_configs,
            "DeleteEndpointConfig": self._delete_config,
        }

    async def _create_model(self, values: Values) -> Values:
        name, models = values["ModelName"], self._resources.models
        if name in models:
            raise self._arns.existing(MODEL, name)
        for key in _UNSERVED_OF_MODEL:
            if key in values:
                raise RequestInvalid(f"{key} is not supported here: leave it out.")
        self._check_container(primary_container(values))
        return {"ModelArn": await self._create(MODEL, models, name, values)}

    def _describe_model(self, values: Values) -> Values:
        name = values["ModelName"]
        model = self._resources.models.get(name)
        if model is None:
            return self._describe_served_model(name)
        return {
            "EnableNetworkIsolation": False,
            **model.values,
            "CreationTime": as_time(model.created),
            "ModelArn": self._arns.arn(MODEL, name),
        }

    def _list_models(self, values: Values) -> Values:
        return list_page(self._rows(MODEL, self._resources.models, "Model"), values, "Models")

    async def _delete_model(self, values: Values) -> Values:
        return await self._delete(MODEL, self._resources.models, values["ModelName"])

    async def _create_config(self, values: Values) -> Values:
        name, configs = values["EndpointConfigName"], self._resources.configs
        if name in configs:
            raise self._arns.existing(CONFIG, name)
        try:
            check_endpoint_config(values, "CreateEndpointConfig", also_used=(START_TIMEOUT, DOWNLOAD_TIMEOUT))
            for variant in values["ProductionVariants"]:
                if "ModelName" not in variant:
                    raise RequestInvalid(f"Variant {variant['VariantName']} has no ModelName.")
            read_endpoint({"EndpointConfig": values}, name, "CreateEndpointConfig", {})  # an endpoint's own checks
        except ConfigError as error:
            raise RequestInvalid(str(error)) from error
        for variant in values["ProductionVariants"]:
            container = primary_container(self._find(MODEL, variant["ModelName"]).values)
            if "AsyncInferenceConfig" in values and container.get("Mode") == "MultiModel":
                raise RequestInvalid(f"{NOT_FOR_MANY} Model {variant['ModelName']} is one.")
        return {"EndpointConfigArn": await self._create(CONFIG, configs, name, values)}

    def _describe_config(self, values: Values) -> Values:
        name = values["EndpointConfigName"]
        config = self._resources.configs.get(name)
        if config is None:
            return self._describe_served_config(name)
        return {
            **config.values,
            "CreationTime": as_time(config.created),
            "EndpointConfigArn": self._arns.arn(CONFIG, name),
        }

    def _list_configs(self, values: Values) -> Values:
        return list_page(self._rows(CONFIG, self._resources.configs, "EndpointConfig"), values, "EndpointConfigs")

    async def _delete_config(self, values: Values) -> Values:
        return await self._delete(CONFIG, self._resources.configs, values["EndpointConfigName"])

    def _find(self, kind: str, name: str) -> Resource:
        found = (self._resources.models if kind == MODEL else self._resources.configs).get(name)
        if found is None:
            raise self._arns.missing(kind, name)
        return found

    async def _create(self, kind: str, into: dict[str, Resource], name: str, values: Values) -> str:
        """Keep a new resource and its tags; return its ARN."""
        self._resources.check_number(into, f"{kind}s")
        arn = self._arns.arn(kind, name)
        resource = Resource({key: value for key, value in values.items() if key != "Tags"}, time.time())
        await self._resources.add(into, name, resource, arn, values.get("Tags", ()))
        return arn

    async def _delete(self, kind: str, among: dict[str, Resource], name: str) -> Values:
        self._find(kind, name)
        await self._resources.remove(among, name, self._arns.arn(kind, name))
        return {}

    def _rows(self, kind: str, among: Mapping[str, Resource], word: str) -> list[ListedResource]:
        return [
            ListedResource(
                name,
                each.created,
                summary={
                    f"{word}Name": name,
                    f"{word}Arn": self._arns.arn(kind, name),
                    "CreationTime": as_time(each.created),
                },
            )
            for name, each in among.items()
        ]


def primary_container(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's only container. Raises RequestInvalid, also for members that would change what is served."""
    containers = [values["PrimaryContainer"]] if "PrimaryContainer" in values else values.get("Containers", [])
    if len(containers) != 1 or ("PrimaryContainer" in values and "Containers" in values):
        raise RequestInvalid("A model has one container here: give PrimaryContainer alone.")
    container: Mapping[str, Any] = containers[0]
    for key in _UNSERVED_OF_CONTAINER:
        if key in container:
            raise RequestInvalid(f"PrimaryContainer.{key} is not supported here: leave it out.")
    return container


def as_time(seconds: float) -> datetime:
    """Return a time as botocore's models have it."""
    return datetime.fromtimestamp(seconds, UTC)
