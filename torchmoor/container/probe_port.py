"""The probe port of an instance: read-only answers for probes and proxies on other hosts.

    /live              200 while TorchServe runs
    /ready             200 while the model's worker is ready and the instance does not drain
    /models/{model}    the management port's answer, for a proxy's probes; also while the instance drains
    /metrics           the metrics port's answer

A proxy may be given this port as an instance's management_port and metrics_port.
"""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
from aiohttp import web

from torchmoor.fleet.scraper import MAX_PAGE_BYTES
from torchmoor.proxy.instances.handler_operations import read_at_most
from torchmoor.proxy.instances.instance import Instance
from torchmoor.proxy.instances.registry import Registry

TIMEOUT_S = 1.5


class ProbePort:
    """Listens for as long as the context lasts."""

    def __init__(
        self, registry: Registry, name: str, port: int, is_running: Callable[[str], bool], *, host: str | None = None
    ) -> None:
        """name: the instance. port: 0 takes any free one. is_running: whether the instance's TorchServe runs.

        host: None for all addresses of both families, on which TorchServe's inference port listens, too.
        """
        self.is_draining = False
        self.port = port
        self._registry = registry
        self._name = name
        self._is_running = is_running
        self._host = host
        app = web.Application()
        app.router.add_get("/live", self._live)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/models/{model}", self._show_model)
        app.router.add_get("/metrics", self._show_metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ProbePort:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._client = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self.port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()
        assert self._client is not None
        await self._client.close()

    async def _live(self, request: web.Request) -> web.Response:
        """Answer 200 while TorchServe runs, also while it loads its model or restarts its worker."""
        is_live = self._registry.find(self._name) is None or self._is_running(self._name)
        return _answer(is_live, "live", "TorchServe has exited and is being restarted")

    async def _ready(self, request: web.Request) -> web.Response:
        instance = self._registry.find(self._name)
        if self.is_draining:
            return _answer(False, "", "stopping")
        is_ready = instance is not None and instance.is_ready
        return _answer(
            is_ready, "ready", "the model is being loaded, or its worker has died and is being started again"
        )

    async def _show_model(self, request: web.Request) -> web.Response:
        instance = self._registry.find(self._name)
        if instance is None or request.match_info["model"] != instance.model:
            raise web.HTTPNotFound(text="there is no model of that name")
        return await self._pass_on(
            instance, f"http://{instance.host}:{instance.management_port}/models/{instance.model}"
        )

    async def _show_metrics(self, request: web.Request) -> web.Response:
        instance = self._registry.find(self._name)
        if instance is None:
            raise web.HTTPServiceUnavailable(text="TorchServe is being started")
        return await self._pass_on(instance, f"http://{instance.host}:{instance.metrics_port}/metrics")

    async def _pass_on(self, instance: Instance, url: str) -> web.Response:
        """Answer as TorchServe answers."""
        assert self._client is not None
        try:
            async with self._client.get(url) as answer:
                page = await read_at_most(MAX_PAGE_BYTES, answer)
                if page is None:
                    raise web.HTTPBadGateway(text="TorchServe's page is too long")
                return web.Response(status=answer.status, body=page, headers={"Content-Type": answer.content_type})
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise web.HTTPServiceUnavailable(text="TorchServe does not answer") from error


def _answer(is_so: bool, yes: str, no: str) -> web.Response:
    return web.Response(status=200 if is_so else 503, text=f"{yes if is_so else no}\n")
