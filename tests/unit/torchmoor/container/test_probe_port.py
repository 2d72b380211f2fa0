"""An instance's probe port: what other hosts may learn from it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvloop
from aiohttp import web

from tests.servers import free_ports
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.container.probe_port import ProbePort
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry


class Scene:
    """A probe port, an instance, and a TorchServe with only two pages."""

    def __init__(
        self, probe_port: ProbePort, registry: Registry, port: int, client: aiohttp.ClientSession, running: list[bool]
    ) -> None:
        self.probe_port = probe_port
        self.registry = registry
        self.running = running  # whether TorchServe runs
        self._port = port
        self._client = client

    async def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        async with self._client.request(method, f"http://127.0.0.1:{self.probe_port.port}{path}") as answer:
            return answer.status, await answer.text()

    def start(self, *, management_port: int | None = None) -> Instance:
        """Report the start of TorchServe, as the launcher does."""
        instance = Instance(
            name="llava-0",
            endpoint="llava",
            model="llava",
            port=1,
            management_port=management_port or self._port,
            metrics_port=self._port,
            started_at=0.0,
        )
        self.registry.add(instance)
        return instance


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    app = web.Application()
    app.router.add_get("/models/llava", _describe)
    app.router.add_get("/metrics", _count)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    registry = Registry((EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),)),))
    try:
        running = [True]
        probe_port = ProbePort(registry, "llava-0", 0, lambda name: running[0], host="127.0.0.1")
        async with probe_port, aiohttp.ClientSession() as client:
            yield Scene(probe_port, registry, runner.addresses[0][1], client, running)
    finally:
        await runner.cleanup()


async def _describe(request: web.Request) -> web.Response:
    return web.Response(text='[{"modelName": "llava"}]')


async def _count(request: web.Request) -> web.Response:
    return web.Response(text="Requests2XX 1.0\n" * 100_000)


async def test_it_is_ready_with_its_worker_and_lives_with_its_torchserve() -> None:
    """Readiness follows the worker, and liveness follows TorchServe, which restarts a worker faster than a kubelet."""

    async def probes(at: Scene) -> tuple[int, int]:
        return (await at.ask("/live"))[0], (await at.ask("/ready"))[0]

    async with scene() as at:
        name = at.start().name
        seen = [await probes(at)]
        for state in (InstanceState.READY, InstanceState.DOWN):
            at.registry.set_state(name, state)
            seen.append(await probes(at))
        at.running[0] = False
        assert [*seen, await probes(at)] == [(200, 503), (200, 200), (200, 503), (503, 503)]


async def test_it_lives_and_is_not_ready_before_torchserve_is_there() -> None:
    """Before TorchServe has started the instance is live but not ready, so that a kubelet does not restart it."""
    async with scene() as at:
        assert [(await at.ask(path))[0] for path in ("/live", "/ready", "/metrics")] == [200, 503, 503]


async def test_an_instance_that_drains_is_not_ready_and_still_probed_as_well() -> None:
    """A draining instance is not ready, but proxies can still probe it and get the answers of running requests."""
    async with scene() as at:
        at.registry.set_state(at.start().name, InstanceState.READY)
        at.probe_port.is_draining = True
        assert await at.ask("/ready") == (503, "stopping\n")
        assert [(await at.ask(path))[0] for path in ("/live", "/models/llava")] == [200, 200]


async def test_torchserves_pages_are_passed_on_whole_and_nothing_else() -> None:
    """TorchServe's pages are forwarded unchanged; its management API cannot be reached through this port."""
    async with scene() as at:
        at.start()
        assert await at.ask("/models/llava") == (200, '[{"modelName": "llava"}]')
        assert (await at.ask("/metrics"))[1] == "Requests2XX 1.0\n" * 100_000
        assert [(await at.ask(path))[0] for path in ("/models/other", "/models", "/api-description")] == [404] * 3
        assert [(await at.ask("/models/llava", method))[0] for method in ("POST", "PUT", "DELETE")] == [405] * 3


async def test_a_torchserve_that_does_not_answer_is_told_as_unavailable() -> None:
    """If TorchServe does not answer, a scrape or probe gets an error instead of waiting."""
    async with scene() as at:
        at.start(management_port=1)
        assert (await at.ask("/models/llava"))[0] == 503


def test_hosts_of_both_address_families_reach_it() -> None:
    """A cluster may have IPv6 addresses alone, by which the kubelet and the proxies probe."""
    [port] = free_ports(1)
    registry = Registry((EndpointSettings(name="llava", variants=(VariantSettings(model="llava"),)),))

    async def ask() -> list[int]:
        async with ProbePort(registry, "llava-0", port, lambda name: True), aiohttp.ClientSession() as client:
            found = []
            for host in ("127.0.0.1", "[::1]"):
                async with client.get(f"http://{host}:{port}/live") as answer:
                    found.append(answer.status)
            return found

    assert asyncio.run(ask()) == uvloop.run(ask()) == [200, 200]
