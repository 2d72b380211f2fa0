"""An operator's actions on models, while the endpoints change."""

from types import SimpleNamespace
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from torchmoor.admin.http import add_routes
from torchmoor.admin.models import ModelsAdmin
from torchmoor.config.routing import EndpointSettings, MultiModelSettings, VariantSettings
from torchmoor.proxy.instances.handler_operations import OperationAnswer
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry


async def test_an_endpoint_may_go_while_its_instance_loads_a_model() -> None:
    """The operator gets the instance's answer; a load may take minutes."""
    registry = Registry([])
    variant = VariantSettings(model="many")
    endpoint = registry.stage(EndpointSettings(name="e", variants=(variant,), multi_model=MultiModelSettings()))
    registry.serve(endpoint)
    registry.add(Instance(name="i", endpoint="e", model="many", port=1))
    registry.set_state("i", InstanceState.READY)

    async def ask(*_: object, **__: object) -> OperationAnswer:
        registry.retire(endpoint)
        registry.remove("i")
        registry.forget(endpoint)
        return OperationAnswer(200, "", b'{"tier": "memory"}')

    operations: Any = SimpleNamespace(ask=ask)
    app = web.Application()
    add_routes(app.router, ModelsAdmin(registry, operations))
    async with TestClient(TestServer(app)) as client:
        assert await (await client.post("/models/m/pin")).json() == {
            "model": "m",
            "instances": [{"instance": "i", "status": 200, "tier": "memory"}],
        }
