"""DescribeEndpoint and ListEndpoints, for endpoints of clients, of the command line and of the configuration file.

The configuration of an endpoint that no client created has the endpoint's name; it and its models can be described.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torchmoor.async_inference.objects.locations import endpoint_paths
from torchmoor.control.arns import CONFIG, ENDPOINT, MODEL, Arns
from torchmoor.control.deployments import Deployments
from torchmoor.control.listing import ListedResource, list_page
from torchmoor.control.models import as_time, primary_container
from torchmoor.control.protocol import Operation, Values
from torchmoor.control.resources import EndpointResource
from torchmoor.proxy.api.describe import describe_variant, status_of
from torchmoor.proxy.instances.endpoint import Endpoint, Variant
from torchmoor.proxy.instances.registry import Registry

MAX_VARIANT_STATUSES = 5  # the service's own limit


class EndpointViews:
    """Describes endpoints.

    created: endpoints of clients, by name. deployments: their instances; None if clients create none. output_root:
    async_inference.output_root.
    """

    def __init__(
        self,
        registry: Registry,
        arns: Arns,
        created: Mapping[str, EndpointResource],
        deployments: Deployments | None,
        output_root: str,
    ) -> None:
        self._registry = registry
        self._arns = arns
        self._created = created
        self._deployments = deployments
        self._output_root = output_root
        self._started_at = time.time()

    def operations(self) -> dict[str, Operation]:
        """Return the operations by their names."""
        return {
            "DescribeEndpoint": self._describe,
            "DescribeEndpointConfig": lambda values: self.describe_config(values["EndpointConfigName"]),
            "DescribeModel": lambda values: self.describe_model(values["ModelName"]),
            "ListEndpoints": self._list,
        }

    def describe_config(self, name: str) -> Values:
        """Describe the configuration of an endpoint that no client created. Raises RequestInvalid if there is none."""
        endpoint = next((each for each in self._served() if each.name == name), None)
        if endpoint is None:
            raise self._arns.missing(CONFIG, name)
        return {
            "EndpointConfigName": name,
            "EndpointConfigArn": self._arns.arn(CONFIG, name),
            "ProductionVariants": [_configured(variant) for variant in endpoint.variants],
            "AsyncInferenceConfig": self._async_config(endpoint),
            "CreationTime": as_time(self._started_at),
        }

    def describe_model(self, name: str) -> Values:
        """Describe a model of an endpoint that no client created. Raises RequestInvalid if there is none."""
        for endpoint in self._served():
            if any(variant.settings.model == name for variant in endpoint.variants):
                return {
                    "ModelName": name,
                    "ModelArn": self._arns.arn(MODEL, name),
                    "PrimaryContainer": {"Mode": "MultiModel" if endpoint.settings.has_many else "SingleModel"},
                    "EnableNetworkIsolation": False,
                    "CreationTime": as_time(self._started_at),
                }
        raise self._arns.missing(MODEL, name)

    def _served(self) -> list[Endpoint]:
        """Return the endpoints that no client created."""
        return [each for each in self._registry.endpoints() if each.name not in self._created]

    def _describe(self, values: Values) -> Values:
        name = values["EndpointName"]
        resource = self._created.get(name)
        if resource is not None:
            return self._describe_created(name, resource)
        endpoint = self._registry.find_endpoint(name)
        if endpoint is None:
            raise self._arns.missing(ENDPOINT, name)
        return {
            "EndpointName": name,
            "EndpointArn": self._arns.arn(ENDPOINT, name),
            "EndpointConfigName": name,
            "EndpointStatus": status_of(endpoint),
            "ProductionVariants": [describe_variant(variant) for variant in endpoint.variants],
            "AsyncInferenceConfig": self._async_config(endpoint),
            "CreationTime": as_time(self._started_at),
            "LastModifiedTime": as_time(self._started_at),
        }

    def _async_config(self, endpoint: Endpoint) -> dict[str, Any] | None:
        """Return an endpoint's AsyncInferenceConfig as AWS's CreateEndpointConfig takes it; None without one."""
        settings = endpoint.settings.async_inference
        if settings is None:
            return None
        output, failure = endpoint_paths(settings, self._output_root, endpoint.name)
        notification = {
            "SuccessTopic": settings.success_topic or None,
            "ErrorTopic": settings.error_topic or None,
            "IncludeInferenceResponseIn": list(settings.include_response_in) or None,
        }
        number = settings.max_concurrent_per_instance
        return {
            "ClientConfig": None if number is None else {"MaxConcurrentInvocationsPerInstance": number},
            "OutputConfig": {
                "S3OutputPath": output,
                "S3FailurePath": failure,
                "NotificationConfig": notification if any(notification.values()) else None,
            },
        }

    def _describe_created(self, name: str, resource: EndpointResource) -> dict[str, Any]:
        variants = [self._describe_variant(name, resource, each) for each in resource.variants.values()]
        pending = {"EndpointConfigName": resource.pending, "StartTime": as_time(resource.modified)}
        return {
            "EndpointName": name,
            "EndpointArn": self._arns.arn(ENDPOINT, name),
            "EndpointConfigName": resource.config_name,
            "EndpointStatus": resource.status,
            "FailureReason": resource.failure or None,
            "ProductionVariants": variants,
            "PendingDeploymentSummary": pending if resource.pending else None,
            "AsyncInferenceConfig": resource.config.get("AsyncInferenceConfig"),
            "CreationTime": as_time(resource.created),
            "LastModifiedTime": as_time(resource.modified),
        }

    def _describe_variant(self, name: str, resource: EndpointResource, variant: Mapping[str, Any]) -> dict[str, Any]:
        assert self._deployments is not None  # it has the endpoint's instances
        variant_name = variant["VariantName"]
        endpoint = self._deployments.find_endpoint(name)
        found = None if endpoint is None else endpoint.find_variant(variant_name)
        image = primary_container(resource.models[variant["ModelName"]]).get("Image")
        described = {
            "CurrentInstanceCount": 0,
            **({} if found is None else describe_variant(found)),
            "VariantName": variant_name,
            "CurrentWeight": resource.weight_of(variant),
            "DesiredWeight": resource.weight_of(variant),
            "DesiredInstanceCount": _desired_count(found, resource.count_of(variant)),
            "RoutingConfig": variant.get("RoutingConfig"),
            "DeployedImages": [{"SpecifiedImage": image}] if image else None,
        }
        status = "Updating" if resource.status == "Updating" else "Creating"
        if progress := self._deployments.progress_of(name, variant_name):
            described["VariantStatus"] = [
                {"Status": status, "StatusMessage": message} for message in progress[:MAX_VARIANT_STATUSES]
            ]
        return described

    def _list(self, values: Values) -> Values:
        rows = [
            self._row(name, resource.status, resource.created, resource.modified)
            for name, resource in self._created.items()
        ]
        rows += [
            self._row(endpoint.name, status_of(endpoint), self._started_at, self._started_at)
            for endpoint in self._served()
        ]
        return list_page(rows, values, "Endpoints")

    def _row(self, name: str, status: str, created: float, modified: float) -> ListedResource:
        summary = {
            "EndpointName": name,
            "EndpointArn": self._arns.arn(ENDPOINT, name),
            "CreationTime": as_time(created),
            "LastModifiedTime": as_time(modified),
            "EndpointStatus": status,
        }
        return ListedResource(name, created, modified, status, summary)


def _configured(variant: Variant) -> Values:
    """Return a variant in the form of AWS's CreateEndpointConfig."""
    return {
        "VariantName": variant.name,
        "ModelName": variant.settings.model,
        "InitialInstanceCount": describe_variant(variant)["DesiredInstanceCount"] or None,  # AWS's is 1 or more
        "InitialVariantWeight": variant.settings.weight,
        "RoutingConfig": {"RoutingStrategy": variant.settings.routing_strategy},
    }


def _desired_count(variant: Variant | None, count: int) -> int:
    """Return a variant's desired instances: the autoscaler's decision, or what the client asked for."""
    return count if variant is None or variant.scale is None else variant.scale.desired
