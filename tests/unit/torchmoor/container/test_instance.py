"""The drain of an instance that is asked to stop."""

import asyncio
import json
from collections.abc import Mapping

import pytest

from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.container import instance
from torchmoor.container.environment import ContainerEnvironment
from torchmoor.container.instance import drain
from torchmoor.proxy.instances.handler_operations import OperationAnswer
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry


class Handler:
    """Reports the number of requests in flight, one value per query; the last one repeats."""

    def __init__(self, *in_flight: int) -> None:
        self.in_flight = list(in_flight)
        self.num_looks = 0

    async def ask(
        self, instance: Instance, operation: str, body: Mapping[str, object], *, timeout_s: float
    ) -> OperationAnswer | None:
        assert operation == "in-flight"
        self.num_looks += 1
        number = self.in_flight.pop(0) if len(self.in_flight) > 1 else self.in_flight[0]
        return OperationAnswer(200, "", json.dumps({"in_flight": number}).encode())


@pytest.fixture
def registry() -> Registry:
    registry = Registry([EndpointSettings(name="llava", variants=(VariantSettings(name="v", model="m"),))])
    registry.add(Instance(name="llava-0", endpoint="llava", variant="v", model="m", port=85))
    return registry


def told(**values: float) -> ContainerEnvironment:
    return ContainerEnvironment(instance_name="llava-0", **values)


async def test_one_look_at_an_idle_instance_is_not_enough(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two queries must find the instance idle, because one may fall between two requests of a proxy."""
    monkeypatch.setattr(instance, "POLL_S", 0.01)
    monkeypatch.setattr(instance, "IDLE_S", 0.05)
    handler = Handler(1, 0, 1, 0, 2, 0)

    await drain(registry, told(settle_s=0, drain_s=60), handler, lambda name: True)

    assert handler.in_flight == [0]
    assert handler.num_looks > 6


async def test_what_is_not_running_is_not_waited_for(registry: Registry) -> None:
    """A TorchServe that has ended is not waited for, because none of its requests can end."""
    handler = Handler(1)

    async with asyncio.timeout(60):
        await drain(registry, told(settle_s=600, drain_s=3600), handler, lambda name: False)

    assert handler.num_looks == 0


async def test_the_time_to_drain_has_an_end(registry: Registry) -> None:
    """The drain ends after its time, even if the handler never reports zero requests."""
    handler = Handler(1)

    await drain(registry, told(settle_s=0, drain_s=0.1), handler, lambda name: True)

    assert handler.num_looks > 0
