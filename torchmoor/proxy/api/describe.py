"""GET /endpoints/{EndpointName}: the state of an endpoint, for waiting clients; in the form of AWS's DescribeEndpoint.

A variant's status names the instances that are being started, and for how long.
"""

from __future__ import annotations

from math import ceil
from time import monotonic
from typing import Any

from torchmoor.proxy.api.replies import json_reply
from torchmoor.proxy.http.message import Reply
from torchmoor.proxy.instances.endpoint import Endpoint, Variant
from torchmoor.proxy.instances.instance import Instance, InstanceState


def describe_endpoint(endpoint: Endpoint) -> Reply:
    content = {
        "EndpointName": endpoint.name,
        "EndpointStatus": status_of(endpoint),
        "ProductionVariants": [describe_variant(variant) for variant in endpoint.variants],
    }
    return json_reply(200, content)


def status_of(endpoint: Endpoint) -> str:
    """Return the EndpointStatus of an endpoint that is served."""
    return "InService" if endpoint.can_serve() else "OutOfService"


def describe_variant(variant: Variant) -> dict[str, Any]:
    """Return a variant in the form of AWS's DescribeEndpoint."""
    members = list(variant.pool.members)
    described: dict[str, Any] = {
        "VariantName": variant.name,
        "CurrentWeight": variant.settings.weight,
        "CurrentInstanceCount": sum(each.state is InstanceState.READY for each in members),
        "DesiredInstanceCount": sum(each.state is not InstanceState.DRAINING for each in members),
    }
    if starting := describe_starting(variant):
        described["VariantStatus"] = [{"Status": "Creating", "StatusMessage": message} for message in starting]
    return described


def describe_starting(variant: Variant) -> list[str]:
    """Return a line for each instance that is being started."""
    return [
        _progress(each, variant.last_start_s) for each in variant.pool.members if each.state is InstanceState.STARTING
    ]


def _progress(instance: Instance, last_s: float | None) -> str:
    text = f"{instance.name} is being started"
    if instance.started_at is not None:
        text += f", for {monotonic() - instance.started_at:.0f} s until now"
    return text if last_s is None else f"{text}; the last start took {ceil(last_s)} s"
