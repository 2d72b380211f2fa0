"""The admin plane: health, metrics and the state of the instances, on its own address and port."""

from __future__ import annotations

import base64
import binascii
import hmac
import ssl
from collections.abc import Awaitable, Callable
from types import TracebackType
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from torchmoor.admin.asynchronous import AsyncAdmin
from torchmoor.admin.cross_origin import find_foreign_page
from torchmoor.admin.dashboard.page import Dashboard, describe_discovery, describe_instance, describe_scaling
from torchmoor.admin.decisions import DecisionsAdmin
from torchmoor.admin.models import ModelsAdmin
from torchmoor.admin.sessions import SessionsAdmin
from torchmoor.errors import ConfigError
from torchmoor.fleet.scraper import MetricsScraper
from torchmoor.metrics.host import HostCollector
from torchmoor.metrics.invocations import MetricsCollector
from torchmoor.proxy.access.exposure import is_loopback
from torchmoor.proxy.instances.registry import Registry

HEALTH = "/healthz"
LIVE = "/livez"
READY = "/readyz"
PROBES = (HEALTH, LIVE, READY)  # a prober has no token


class AdminServer:
    """Serves GET / (the dashboard), the probes /healthz, /livez and /readyz, /metrics, /instances and /models,
    POST /instances/NAME/drain and /resume, what may be done to models (torchmoor.admin.models), sessions
    (torchmoor.admin.sessions), /decisions (torchmoor.admin.decisions), and asynchronous requests
    (torchmoor.admin.asynchronous).

    With a token, all but the probes ask for it: as a bearer token, or as the password of any user, which is how a
    browser can give it. A POST that a browser sends for a page of elsewhere is refused.
    """

    def __init__(
        self,
        registry: Registry,
        collector: MetricsCollector,
        scraper: MetricsScraper,
        models: ModelsAdmin,
        sessions: SessionsAdmin,
        decisions: DecisionsAdmin,
        dashboard: Dashboard,
        host: str,
        port: int,
        *,
        async_admin: AsyncAdmin | None = None,
        token: str = "",
        refresh: Callable[[], Awaitable[None]],
        has_asked_all: Callable[[], bool],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """async_admin: None if no endpoint takes asynchronous requests.

        refresh: brings what is shown up to date, where that takes asking other processes.
        has_asked_all: whether each instance has been probed at least once.
        """
        self.port = port
        self._registry = registry
        self._scraper = scraper
        self._metrics = CollectorRegistry(auto_describe=False)
        self._metrics.register(collector)
        self._metrics.register(models.collector)
        self._metrics.register(HostCollector())
        ProcessCollector(registry=self._metrics)
        self._host = host
        self._token = token.encode()
        self._refresh = refresh
        self._has_asked_all = has_asked_all
        self._knows_instances = False  # and has told so
        self._tls = tls
        app = web.Application(middlewares=[self._check_token if token else self._check_host])
        app.router.add_get(HEALTH, self._healthz)
        app.router.add_get(LIVE, self._livez)
        app.router.add_get(READY, self._readyz)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/instances", self._show_instances)
        app.router.add_post("/instances/{name}/drain", self._drain)
        app.router.add_post("/instances/{name}/resume", self._resume)
        models.add_to(app.router)
        sessions.add_to(app.router)
        decisions.add_to(app.router)
        dashboard.add_to(app.router)
        if async_admin is not None:
            self._metrics.register(async_admin.collector)
            async_admin.add_to(app.router)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> AdminServer:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self.port, ssl_context=self._tls)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in PROBES and not hmac.compare_digest(_token_of(request), self._token):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": 'Basic realm="torchmoor", charset="UTF-8"'})
        return await handler(request)

    @web.middleware
    async def _check_host(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Without a token only this machine's own names lead here.

        A page of elsewhere can have its name lead to a loopback address, and would then be of the same origin.
        """
        host = request.headers.get("Host")
        try:
            is_own = host is None or is_loopback(urlsplit(f"//{host}").hostname or "")  # every browser names one
        except (ConfigError, ValueError):
            is_own = False
        if not is_own:
            raise web.HTTPForbidden(text=f"The admin plane is not called {host!r}: use its address.")
        return await handler(request)

    async def _healthz(self, request: web.Request) -> web.Response:
        """200 while every endpoint has a ready instance, or starts one when a request comes."""
        missing = [endpoint.name for endpoint in self._registry.endpoints() if not endpoint.can_serve()]
        return web.json_response(
            {"ok": not missing, "endpoints_without_instance": missing}, status=503 if missing else 200
        )

    async def _livez(self, request: web.Request) -> web.Response:
        """200 while this process runs at all."""
        return web.json_response({"ok": True})

    async def _readyz(self, request: web.Request) -> web.Response:
        """200 once it is known which instances there are and how they do, however few can serve.

        For a balancer of several proxies: where no instance is ready, clients are told so by a proxy. It stays so, for
        all proxies hear of an instance that joins at the same time, and must not all be unready until it has answered.
        """
        waits_for = [source.dns_name for source in self._registry.sources.values() if source.answered_at is None]
        self._knows_instances = self._knows_instances or (not waits_for and self._has_asked_all())
        return web.json_response(
            {"ok": self._knows_instances, "waits_for_dns": waits_for}, status=200 if self._knows_instances else 503
        )

    async def make_metrics_page(self) -> bytes:
        """The proxy's own numbers, then the instances', in Prometheus' text form."""
        await self._refresh()
        return generate_latest(self._metrics) + (await self._scraper.scrape()).encode()

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=await self.make_metrics_page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _show_instances(self, request: web.Request) -> web.Response:
        await self._refresh()
        rows = [describe_instance(instance, self._registry) for instance in self._registry.instances()]
        return web.json_response(
            {
                "instances": rows,
                "autoscaling": describe_scaling(self._registry),
                "discovery": describe_discovery(self._registry),
            }
        )

    async def _drain(self, request: web.Request) -> web.Response:
        """Send the instance nothing new. With a journal that includes turns of its sessions, which others take over.

        In whatever state it is, and also after it was started again, until a resume.
        """
        return await self._move(request, self._registry.drain, is_end=False)

    async def _resume(self, request: web.Request) -> web.Response:
        """End a drain: an instance that is well gets work again."""
        return await self._move(request, self._registry.resume, is_end=True)

    async def _move(self, request: web.Request, move: Callable[[str], None], *, is_end: bool) -> web.Response:
        """Drain or resume an instance; answers with its state and with how many requests it still works on."""
        origin = find_foreign_page(request)
        if origin is not None:
            return web.json_response({"error": f"A page of {origin} may not do this."}, status=403)
        name = request.match_info["name"]
        instance = self._registry.find(name)
        if instance is None:
            return web.json_response({"error": f"There is no instance {name!r}; see GET /instances."}, status=404)
        if is_end and not self._registry.is_drained(name):
            if self._registry.is_leaving(name):
                error = f"Instance {name!r} leaves: DNS or the configuration names it no more, or elsewhere."
                return web.json_response({"error": error}, status=409)
            return web.json_response({"error": f"Instance {name!r} is not drained: nothing to resume."}, status=409)
        move(name)
        await self._refresh()
        return web.json_response({"name": name, "state": instance.state.value, "outstanding": instance.outstanding})


def _token_of(request: web.Request) -> bytes:
    """What a request gives for a token; empty if nothing, which is no token."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(given, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""
