"""GET /instances, and an operator's drain of an instance and its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from torchmoor.admin.http import get, post
from torchmoor.admin.views import describe_discovery, describe_instance, describe_scaling
from torchmoor.errors import ApiError
from torchmoor.proxy.api.reference import admin_schemas
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry


class InstancesAdmin:
    """Serves GET /instances, and POST /instances/NAME/drain and resume.

    refresh: collects the counts of other processes.
    """

    def __init__(self, registry: Registry, refresh: Callable[[], Awaitable[None]]) -> None:
        self._registry = registry
        self._refresh = refresh

    @get("/instances", "listInstances", "List the instances and their states.", admin_schemas.INSTANCES)
    async def _show_instances(self, request: web.Request) -> web.Response:
        await self._refresh()
        rows = [describe_instance(instance, self._registry) for instance in self._registry.instances()]
        return web.json_response(
            {
                "endpoints": [each.name for each in self._registry.endpoints()],
                "instances": rows,
                "autoscaling": describe_scaling(self._registry),
                "discovery": describe_discovery(self._registry),
            }
        )

    @post(
        "/instances/{name}/drain",
        "drainInstance",
        "Drain an instance: it gets no new work.",
        admin_schemas.MOVED_INSTANCE,
    )
    async def _drain(self, request: web.Request) -> web.Response:
        """Stop new requests to an instance until a resume, even if it is restarted.

        With a journal that includes the turns of its sessions, which other instances take over.
        """
        instance = self._find_instance(request)
        self._registry.drain(instance.name)
        return await self._show_moved(instance)

    @post("/instances/{name}/resume", "resumeInstance", "End the drain of an instance.", admin_schemas.MOVED_INSTANCE)
    async def _resume(self, request: web.Request) -> web.Response:
        """End a drain."""
        instance = self._find_instance(request)
        name = instance.name
        if not self._registry.is_drained(name):
            reason = "is not drained: nothing to resume"
            if self._registry.is_leaving(name):
                reason = "is leaving: DNS or the configuration no longer lists it at this address"
            raise ApiError(f"Instance {name!r} {reason}.", status=409)
        self._registry.resume(name)
        return await self._show_moved(instance)

    def _find_instance(self, request: web.Request) -> Instance:
        name = request.match_info["name"]
        instance = self._registry.find(name)
        if instance is None:
            raise ApiError(f"There is no instance {name!r}; see GET /instances.", status=404)
        return instance

    async def _show_moved(self, instance: Instance) -> web.Response:
        """Answer with the instance's state and its outstanding requests."""
        await self._refresh()
        state, outstanding = instance.state.value, instance.outstanding
        return web.json_response({"name": instance.name, "state": state, "outstanding": outstanding})
