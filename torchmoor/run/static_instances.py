"""The instances that the configuration file lists."""

from __future__ import annotations

from torchmoor.config.settings import Configuration
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry


def make_registry(configuration: Configuration) -> Registry:
    """Return the endpoints with their listed instances."""
    registry = Registry(configuration.proxy.endpoints)
    for instance in make_instances(configuration):
        registry.add(instance)
    return registry


def make_instances(configuration: Configuration) -> list[Instance]:
    """Return the listed instances, each with its variant's model."""
    models = {
        (endpoint.name, variant.name): variant.model
        for endpoint in configuration.proxy.endpoints
        for variant in endpoint.variants
    }
    return [
        Instance(
            **each.facts(),
            name=each.name,
            model=models[each.endpoint, each.variant],
            host=each.host,
            port=each.port,
        )
        for each in configuration.instances
    ]
