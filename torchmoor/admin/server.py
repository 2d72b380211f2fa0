"""The admin plane's server: its routes, which callers may use them, the health probes and the metrics page."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from torchmoor.admin.async_requests import AsyncAdmin
from torchmoor.admin.collectors import FleetCollector
from torchmoor.admin.connections import AdminConnection, AdminConnections
from torchmoor.admin.control import ControlAdmin
from torchmoor.admin.dashboard.page import Dashboard
from torchmoor.admin.decisions import DecisionsAdmin
from torchmoor.admin.http import add_routes, answer_errors, get, is_own_fault, routes_of
from torchmoor.admin.instances import InstancesAdmin
from torchmoor.admin.models import ModelsAdmin
from torchmoor.admin.sessions import SessionsAdmin
from torchmoor.config.settings import ProxySettings
from torchmoor.errors import ApiError
from torchmoor.fleet.data_plane_view import DataPlaneView
from torchmoor.fleet.scraper import MetricsScraper
from torchmoor.metrics.host import HostCollector
from torchmoor.proxy.access.web_pages import WebPageGuard
from torchmoor.proxy.api.control_operation import AnswerControl
from torchmoor.proxy.api.reference import admin_schemas
from torchmoor.proxy.api.reference.common_schemas import TEXT, Schema
from torchmoor.proxy.api.reference.data_routes import REFERENCE
from torchmoor.proxy.api.reference.document import make_document
from torchmoor.proxy.api.reference.route import Answers, Body, Group, json_body
from torchmoor.proxy.http.handshakes import GetContext, Handshakes
from torchmoor.proxy.instances.registry import Registry

logger = logging.getLogger(__name__)

HEALTH = "/healthz"
LIVE = "/livez"
READY = "/readyz"
CLOSING_TIMEOUT_S = 5.0  # also of refused connections, which are not counted
PROBES = (HEALTH, LIVE, READY)  # a prober has no token
METRICS_PAGE = ((200, "The page.", Body(schema=TEXT, types=("text/plain",))),)


def _yes_or_no(schema: Schema) -> Answers:
    return ((200, "Yes.", json_body(schema)), (503, "No.", json_body(schema)))


class AdminServer:
    """Serves the dashboard, the probes, the metrics page and the JSON API while its context lasts.

    With a token, all routes but the probes need it: as a bearer token, or as the password of any user, which a browser
    can send. A POST from another site's page is refused. port 0: any free port; `port` says which after the start.
    """

    def __init__(
        self,
        registry: Registry,
        data: DataPlaneView,
        has_asked_all: Callable[[], bool],
        settings: ProxySettings,
        control: AnswerControl,
        *,
        tls: GetContext | None,
    ) -> None:
        """has_asked_all: whether a probe of each instance was tried. control: answers for the control plane."""
        operations, async_inference = data.operations, data.async_inference
        self.port = settings.listen.admin_port
        self.connections = AdminConnections(settings.limits)
        self._host = settings.listen.admin_host
        self._pages = WebPageGuard(self._host, settings.listen.allowed_hosts)
        self._token = settings.credentials.admin_token.encode()
        self._tls = tls
        self._registry = registry
        self._refresh = data.refresh
        self._has_asked_all = has_asked_all
        self._knows_instances = False  # stays true once /readyz has answered 200
        self._scraper = MetricsScraper(registry)
        chat_scheme = settings.listen.runtime_scheme if settings.chat_page.is_on else None
        self._dashboard = Dashboard(registry, data, chat_scheme=chat_scheme)
        self._metrics = CollectorRegistry(auto_describe=False)
        self._metrics.register(FleetCollector(registry, data, self.connections))
        self._metrics.register(HostCollector())
        ProcessCollector(registry=self._metrics)
        check = self._check_token if self._token else self._check_host
        app = web.Application(
            middlewares=[self.connections.watch, answer_errors, check],
            client_max_size=settings.control.max_body_bytes,
        )
        add_routes(
            app.router,
            self,
            InstancesAdmin(registry, data.refresh),
            ModelsAdmin(registry, operations),
            SessionsAdmin(registry, operations, self._dashboard.statuses),
            DecisionsAdmin(data.find_decisions, settings.observe.trace_link),
            AsyncAdmin(async_inference),
        )
        self._dashboard.add_to(app.router)
        ControlAdmin(control, settings.limits.body_timeout_s).add_to(app.router)
        app.router.add_get("/openapi.json", self._show_reference)
        logger.addFilter(is_own_fault)
        self._runner = web.AppRunner(app, access_log=None, logger=logger, shutdown_timeout=1.0)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> AdminServer:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._scraper)
            await stack.enter_async_context(self._dashboard)
            stack.push_async_callback(self._runner.cleanup)
            await self._runner.setup()
            self.port = await self._listen(stack)
            self._stack = stack.pop_all()
        return self

    async def _listen(self, stack: AsyncExitStack) -> int:
        """Accept connections until the stack is closed; return the port."""
        serve, connections = self._runner.server, self.connections
        assert serve is not None  # the runner is set up
        connections.sweeper.start()
        stack.callback(connections.stop)

        def make() -> AdminConnection:
            return AdminConnection(connections, serve())

        handshakes = Handshakes(
            make,
            lambda: len(handshakes) < connections.max_connections,
            timeout_s=connections.header_timeout_s,
            closing_timeout_s=CLOSING_TIMEOUT_S,
        )
        stack.push_async_callback(handshakes.stop)
        accept = make if self._tls is None else partial(handshakes.accept, self._tls)
        server = await asyncio.get_running_loop().create_server(accept, self._host, self.port)
        stack.callback(server.close)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in PROBES and not hmac.compare_digest(_token_of(request), self._token):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": 'Basic realm="torchmoor", charset="UTF-8"'})
        return await handler(request)

    @web.middleware
    async def _check_host(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Without a token, accept only loopback and allowed names in the Host header.

        A foreign site's DNS name can point to a loopback address, and its page would then be of the same origin.
        """
        host = request.headers.get("Host")
        if host is not None and not self._pages.is_own_host(host):  # every browser sends one
            raise ApiError(f"The admin plane does not answer for the host {host!r}: use its address.", status=403)
        return await handler(request)

    @get(HEALTH, "healthz", "Has each endpoint a ready instance?", answers=_yes_or_no(admin_schemas.HEALTH))
    async def _healthz(self, request: web.Request) -> web.Response:
        """Answer 200 while every endpoint has a ready instance, or starts one for the next request."""
        missing = [endpoint.name for endpoint in self._registry.endpoints() if not endpoint.can_serve()]
        return web.json_response(
            {"ok": not missing, "endpoints_without_instance": missing}, status=503 if missing else 200
        )

    @get(LIVE, "livez", "Does the process run?", admin_schemas.LIVENESS)
    async def _livez(self, request: web.Request) -> web.Response:
        """Answer 200 while this process runs."""
        return web.json_response({"ok": True})

    @get(READY, "readyz", "Is the state of the instances known?", answers=_yes_or_no(admin_schemas.READINESS))
    async def _readyz(self, request: web.Request) -> web.Response:
        """Answer 200 once the proxy knows its instances and their states, even if none is ready.

        A load balancer in front of several proxies uses it: without a ready instance, the proxy answers its clients.
        The answer stays 200, since a new instance reaches all proxies at once and must not make them all unready.
        """
        waits_for = [source.dns_name for source in self._registry.sources.values() if source.answered_at is None]
        self._knows_instances = self._knows_instances or (not waits_for and self._has_asked_all())
        return web.json_response(
            {"ok": self._knows_instances, "waits_for_dns": waits_for}, status=200 if self._knows_instances else 503
        )

    async def make_metrics_page(self) -> bytes:
        """Return the proxy's metrics, then the instances', in Prometheus' text format."""
        await self._refresh()
        return generate_latest(self._metrics) + (await self._scraper.scrape()).encode()

    @get("/metrics", "metrics", "Get the metrics in Prometheus' format.", answers=METRICS_PAGE)
    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=await self.make_metrics_page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _show_reference(self, request: web.Request) -> web.Response:
        return web.json_response(make_document(ADMIN_PLANE))


ADMIN = Group(
    "admin",
    "The operators' API, on the admin plane's port.",
    admin_schemas.ERROR,
    routes_of(AdminServer, InstancesAdmin, ModelsAdmin, SessionsAdmin, DecisionsAdmin, Dashboard, AsyncAdmin),
)
ADMIN_PLANE = (ADMIN, REFERENCE)


def _token_of(request: web.Request) -> bytes:
    """Return the token that a request carries; empty if none, which never equals a configured token."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(given, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""
