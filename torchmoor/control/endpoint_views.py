"""DescribeEndpoint and ListEndpoints: those that clients have created, and those of the command line or the file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torchmoor.control.listing import ListedResource, list_page
from torchmoor.control.models import as_time
from torchmoor.control.names import ENDPOINT, Names
from torchmoor.control.protocol import Operation, Values
from torchmoor.control.resources import EndpointResource
from torchmoor.proxy.api.describe import describe_variant, status_of
from torchmoor.proxy.instances.registry import Endpoint, Registry


class EndpointViews:
    """Describes endpoints.

    created: those of clients, by name. find_deployed: the instances' endpoint of one of them, served or not yet.
    """

    def __init__(
        self,
        registry: Registry,
        names: Names,
        created: Mapping[str, EndpointResource],
        find_deployed: Callable[[str], Endpoint | None],
    ) -> None:
        self._registry = registry
        self._names = names
        self._created = created
        self._find_deployed = find_deployed
        self._started_at = time.time()

    def operations(self) -> dict[str, Operation]:
        """Return the operations by their names."""
        return {"DescribeEndpoint": self._describe, "ListEndpoints": self._list}

    def _describe(self, values: Values) -> Values:
        name = values["EndpointName"]
        resource = self._created.get(name)
        if resource is not None:
            return self._describe_created(name, resource)
        endpoint = self._registry.find_endpoint(name)
        if endpoint is None:
            raise self._names.missing(ENDPOINT, name)
        return {
            "EndpointName": name,
            "EndpointArn": self._names.arn(ENDPOINT, name),
            "EndpointConfigName": name,
            "EndpointStatus": status_of(endpoint),
            "ProductionVariants": [describe_variant(variant) for variant in endpoint.variants],
            "CreationTime": as_time(self._started_at),
            "LastModifiedTime": as_time(self._started_at),
        }

    def _describe_created(self, name: str, resource: EndpointResource) -> dict[str, Any]:
        endpoint = self._find_deployed(name)
        known = {} if endpoint is None else {each.name: describe_variant(each) for each in endpoint.variants}
        return {
            "EndpointName": name,
            "EndpointArn": self._names.arn(ENDPOINT, name),
            "EndpointConfigName": resource.config_name,
            "EndpointStatus": resource.status,
            "FailureReason": resource.failure or None,
            "ProductionVariants": [
                {
                    "CurrentInstanceCount": 0,
                    **known.get(variant["VariantName"], {}),
                    "VariantName": variant["VariantName"],
                    "CurrentWeight": resource.weight_of(variant),
                    "DesiredWeight": resource.weight_of(variant),
                    "DesiredInstanceCount": self._desired(endpoint, variant["VariantName"], resource.count_of(variant)),
                }
                for variant in resource.config["ProductionVariants"]
            ],
            "AsyncInferenceConfig": resource.config.get("AsyncInferenceConfig"),
            "CreationTime": as_time(resource.created),
            "LastModifiedTime": as_time(resource.modified),
        }

    def _desired(self, endpoint: Endpoint | None, variant: str, count: int) -> int:
        """Return the desired instances of a variant: the autoscaler's decision, or what the client asked for."""
        found = None if endpoint is None else endpoint.find_variant(variant)
        return count if found is None or found.scale is None else found.scale.desired

    def _list(self, values: Values) -> Values:
        rows = [
            self._row(name, resource.status, resource.created, resource.modified)
            for name, resource in self._created.items()
        ]
        rows += [
            self._row(endpoint.name, status_of(endpoint), self._started_at, self._started_at)
            for endpoint in self._registry.endpoints()
            if endpoint.name not in self._created
        ]
        return list_page(rows, values, "Endpoints")

    def _row(self, name: str, status: str, created: float, modified: float) -> ListedResource:
        summary = {
            "EndpointName": name,
            "EndpointArn": self._names.arn(ENDPOINT, name),
            "CreationTime": as_time(created),
            "LastModifiedTime": as_time(modified),
            "EndpointStatus": status,
        }
        return ListedResource(name, created, modified, status, summary)
