"""Runs the proxies of proxy.py that are written in Python.

    python -m benchmarks.proxy_server torchmoor|general-path|aiohttp PORT UPSTREAM_PORT[,UPSTREAM_PORT...]

torchmoor: the product with its default settings; general-path: the same without its fast path; aiohttp: a short proxy
of aiohttp's server and client, with least outstanding and streaming only.
"""

import asyncio
import gc
import sys

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from torchmoor.config.group import MIB
from torchmoor.config.limits import LimitSettings
from torchmoor.config.listen import ListenSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.sessions import SessionIdSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.proxy.instances.instance import Instance, InstanceState
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.app import Proxy
from torchmoor.run.data_plane import DataPlane

ENDPOINT = "llava"
KEY_ID, KEY = "k1", b"0123456789abcdef0123456789abcdef"
HOP_BY_HOP = ("host", "connection", "keep-alive", "transfer-encoding", "content-length")


def settings_of(port: int) -> ProxySettings:
    """Return the default settings for one endpoint with signed sessions."""
    return ProxySettings(
        endpoints=(EndpointSettings(name=ENDPOINT, variants=(VariantSettings(model=ENDPOINT),)),),
        listen=ListenSettings(port=port, admin_port=0),
        limits=LimitSettings(max_passthrough_body_bytes=256 * MIB),
        sessions=SessionIdSettings(keys={KEY_ID: KEY}),
    )


def registry_of(settings: ProxySettings, upstreams: list[int]) -> Registry:
    """Return a registry with a ready instance for each port."""
    registry = Registry(settings.endpoints)
    for number, upstream in enumerate(upstreams):
        registry.add(
            Instance(
                name=f"{ENDPOINT}-{number}",
                endpoint=ENDPOINT,
                model=ENDPOINT,
                port=upstream,
                capacity=256,
                state=InstanceState.READY,
            )
        )
    return registry


async def serve_torchmoor(port: int, upstreams: list[int]) -> None:
    settings = settings_of(port)
    async with Proxy(settings, registry_of(settings, upstreams)):
        await asyncio.Event().wait()


async def serve_general_path(port: int, upstreams: list[int]) -> None:
    settings = settings_of(port)
    async with Proxy(settings, registry_of(settings, upstreams)) as proxy:
        assert isinstance(proxy.data, DataPlane)
        proxy.data.server.fast_path = None
        await asyncio.Event().wait()


async def serve_aiohttp(port: int, upstreams: list[int]) -> None:
    outstanding = dict.fromkeys(upstreams, 0)

    async def handle(request: web.Request) -> web.StreamResponse:
        upstream = min(upstreams, key=outstanding.__getitem__)
        outstanding[upstream] += 1
        try:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
            url = f"http://127.0.0.1:{upstream}{request.path_qs}"
            body = await request.read() if (request.content_length or 0) < MIB else request.content
            async with client.request(request.method, url, headers=headers, data=body) as answer:
                passed = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
                if answer.content_length is not None:
                    return web.Response(status=answer.status, headers=passed, body=await answer.read())
                response = web.StreamResponse(status=answer.status, headers=passed)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        finally:
            outstanding[upstream] -= 1

    app = web.Application(client_max_size=256 * MIB)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=480)) as client:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    kind, listen_port, upstream_ports = sys.argv[1:]
    serve = {"torchmoor": serve_torchmoor, "general-path": serve_general_path, "aiohttp": serve_aiohttp}[kind]
    gc.freeze()  # the imported modules, as torchmoor/cli/main.py does
    uvloop.run(serve(int(listen_port), [int(number) for number in upstream_ports.split(",")]))
